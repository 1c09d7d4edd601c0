"""What tests of healing share: states of many kinds, donors that really listen, and donors that misbehave."""

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxft._arrays._layout import LeafSpec
from jaxft._arrays._leaf_types import LeafType, type_of
from jaxft._arrays._placement import place
from jaxft._heal._blob import Blob, BlobLayout, HostArray, bands_of
from jaxft._heal._fetch import DonorAt, Fetcher
from jaxft._heal._frames import REQUEST_BYTES, Kind, Reply, Request, Status
from jaxft._heal._server import HealServer
from jaxft._heal._store import StateStore
from jaxft._transport._listener import Abort, Connection, ConnectionRequest, Listener, recv_exactly
from jaxft._transport._seals import Checksums
from tests import patience

MB = 1 << 20
# What only a hanging test reaches.
LONG_S = patience.FAR_S

Script = Callable[[socket.socket, Callable[[], Request]], None]


def soon(wait_s: float = LONG_S) -> float:
    return time.monotonic() + wait_s


def values(shape: Sequence[int], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Every bit pattern may occur, NaNs included, unless the dtype has fewer."""
    random = np.random.default_rng([seed, *shape])
    if dtype in ("bool", "int4", "uint4"):
        return random.integers(0, 2, tuple(shape)).astype(dtype)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(random.bytes(size), dtype).reshape(tuple(shape))


def mesh(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("x", "y")[: len(shape)])


def sharded(array: Any, over: Mesh, *spec: str | None) -> jax.Array:
    return jax.device_put(array, NamedSharding(over, PartitionSpec(*spec)))


def own(array: np.ndarray) -> jax.Array:
    """An array in memory of JAX's own, which a donation may really overwrite."""
    return jax.block_until_ready(jnp.array(array, copy=True))


def mixed_state(seed: int = 0) -> list[jax.Array]:
    """Leaves of many types; more than one chunk in all, some in the middle of one."""
    return [
        own(values((700, 400), seed=seed)),
        own(values((3, 5), "bfloat16", seed)),
        own(np.int32(seed)),
        own(values((0, 4), seed=seed)),
        own(values((MB + 13,), "uint8", seed)),
        jax.random.key(seed),
        own(values((17,), "bool", seed)),
        own(values((9, 2), "int4", seed)),
    ]


def raw(leaf: Any) -> bytes:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.ascontiguousarray(leaf).tobytes()


def same_bits(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return [raw(leaf) for leaf in one] == [raw(leaf) for leaf in other]


def read(blob: Blob, chunk: int) -> list[memoryview]:
    """A chunk, as a donor would send it: read, and found intact after that. Raises Spoiled."""
    pieces = blob.read(chunk)
    blob.check_intact(chunk)
    return pieces


def content(blob: Blob) -> bytes:
    """The whole run of bytes of a blob, with every chunk found intact."""
    run = bytearray()
    for chunk in range(blob.layout.chunks):
        run += b"".join(read(blob, chunk))
    assert len(run) == blob.layout.total_bytes
    return bytes(run)


def leaves_of(blob: Blob) -> list[np.ndarray]:
    return blob.layout.arrays(np.frombuffer(content(blob), np.uint8))


def blob_of_leaves(leaves: Sequence[Any]) -> Blob:
    arrays = [np.frombuffer(raw(leaf), type_of(leaf).dtype).reshape(type_of(leaf).shape) for leaf in leaves]
    types = [type_of(leaf) for leaf in leaves]
    return Blob(BlobLayout.of(types, bands_of(types)), [HostArray(array) for array in arrays])


def specs_of(means: Sequence[np.ndarray]) -> list[LeafSpec]:
    return [LeafSpec(f"[{number}]", tuple(mean.shape), mean.dtype.name) for number, mean in enumerate(means)]


@dataclass
class Donor:
    """A donor as its peers see it: a store behind a port."""

    name: str
    address: str
    store: StateStore
    served: Counter[Kind] = field(default_factory=Counter[Kind])  # how many chunks
    before_chunks: Callable[[], Any] | None = None
    incarnation: int = 1

    @property
    def at(self) -> DonorAt:
        return DonorAt(self.name, self.incarnation, self.address)


class _Observed(HealServer):
    def __init__(self, donor: Donor) -> None:
        super().__init__(donor.store)
        self.donor = donor

    def _send_chunks(self, connection: Connection, request: Request) -> None:
        if self.donor.before_chunks is not None:
            self.donor.before_chunks()
        super()._send_chunks(connection, request)
        self.donor.served[request.kind] += request.count


@contextmanager
def donor(name: str = "group-0", leaves: Sequence[Any] | None = None, *, step: int = 0) -> Iterator[Donor]:
    """A donor that holds `leaves` as state `step`; nothing is pinned yet."""
    made = Donor(name, "", StateStore())
    if leaves is not None:
        made.store.publish(step, leaves)
    listener = Listener(
        host="127.0.0.1", job="job", group=name, incarnation=made.incarnation, on_heal=_Observed(made).serve
    )
    made.address = f"127.0.0.1:{listener.port}"
    try:
        yield made
    finally:
        listener.close()


@contextmanager
def hostile(name: str, script: Script) -> Iterator[Donor]:
    """A donor that accepts the connection and then follows the script; `ask` gives the next request."""

    def serve(connection: Connection, _: ConnectionRequest) -> None:
        def ask() -> Request:
            data = bytearray(REQUEST_BYTES + Checksums.size_bytes)
            recv_exactly(connection.sock, memoryview(data), deadline_s=soon())
            return Request.decode(data[:REQUEST_BYTES])

        try:
            script(connection.sock, ask)
        except (ConnectionError, TimeoutError, OSError):
            return  # the joiner has gone

    listener = Listener(host="127.0.0.1", job="job", group=name, incarnation=1, on_heal=serve)
    try:
        yield Donor(name, f"127.0.0.1:{listener.port}", StateStore())
    finally:
        listener.close()


def fetcher(
    *donors: Donor | tuple[str, str],
    heal_id: int = 5,
    timeout_s: float = LONG_S,
    group: str = "joiner",
    **options: Any,
) -> Fetcher:
    named = [each.at if isinstance(each, Donor) else DonorAt(each[0], 1, each[1]) for each in donors]
    return Fetcher(
        job="job",
        group=group,
        incarnation=3,
        heal_id=heal_id,
        donors=named,
        timeout_s=timeout_s,
        **options,
    )


@contextmanager
def joiner(*donors: Donor | tuple[str, str], **options: Any) -> Iterator[Fetcher]:
    made = fetcher(*donors, **options)
    try:
        yield made
    finally:
        made.close()


def fetch_state(
    made: Fetcher, step: int, like: Sequence[Any], cancel: Abort | None = None
) -> list[jax.Array]:
    return place(made.state(step, list(map(type_of, like)), cancel=cancel or Abort()), like)


def manifest(sock: socket.socket, leaves: Sequence[Any], *, step: int = 0, **changes: Any) -> None:
    """A good donor's answer to the first request."""
    types = [type_of(leaf) for leaf in leaves]
    listed = [[list(each.shape), each.dtype] for each in types]
    sent = {"step": step, "leaves": listed, "stripe": [0, 1], "live": True, **changes}
    send_text(sock, Status.OK, json.dumps(sent))


def send_text(sock: socket.socket, status: Status, sent: str | bytes) -> None:
    data = sent if isinstance(sent, bytes) else sent.encode()
    sock.sendall(tagged(Reply(status, 0, len(data)), data))


def tagged(reply: Reply, data: bytes, *, of: bytes | None = None) -> bytes:
    """An answer in bytes; with the tag of another payload, if there is one."""
    header = reply.encode()
    return header + data + Checksums().tag(header, data if of is None else of)


def request_bytes(request: Request) -> bytes:
    """A request in bytes, with its tag."""
    return request.encode() + Checksums().tag(request.encode())


def send_chunk(sock: socket.socket, blob: Blob, chunk: int, *, flip: bool = False) -> None:
    whole = b"".join(blob.read(chunk))
    data = bytearray(whole)
    if flip:
        data[len(data) // 2] ^= 1
    sock.sendall(tagged(Reply(Status.OK, chunk, len(data)), bytes(data), of=whole))


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start a call; the function returned waits for it, and has its result or exception."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        patience.join(thread)
        if failure:
            raise failure[0]
        return outcome[0]

    return result


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for something that another thread does; polled, with a limit that only a hanging test reaches."""
    patience.until(condition, what)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def heal_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("jaxft-heal")]


def leaf_types(*leaves: tuple[Sequence[int], str]) -> list[LeafType]:
    return [LeafType(tuple(shape), dtype) for shape, dtype in leaves]
