"""The joiner's end: state and means in stripes from all donors at once, each chunk checked.

Spans of chunks lie in one queue; each donor has a connection and a thread that takes the next span. A donor that
fails in any way (EOF, silence, a wrong digest, "gone") is dropped with a line in the log, and what it had taken goes
back into the queue. Only when no donor is left does the heal fail.
"""

import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft._dataplane import Abort, Hello, dial, recv_exactly, send_all
from jaxft._exchange._layout import LeafSpec
from jaxft._exchange._memory import aligned_empty
from jaxft._heal import HealFailed
from jaxft._heal._blob import BlobLayout, LeafType, checksum
from jaxft._heal._frames import (
    MAX_TEXT_BYTES,
    REPLY_BYTES,
    BadFrame,
    Kind,
    Reply,
    Request,
    Status,
)

_log = logging.getLogger("jaxft")

# Chunks taken at once: enough to keep a connection busy, few enough that the last donor does not drag on.
SPAN_CHUNKS = 8
MAX_MANIFEST_BYTES = 64 << 20


class _Donor:
    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.sock: socket.socket | None = None
        self.failed = ""


class Fetcher:
    """Fetches what one heal needs. Not thread-safe.

    Args:
        donors: (group, address of its data plane).
        timeout_s: how long a donor may take for a chunk, and how long all of them may stand still.
    """

    def __init__(
        self,
        *,
        job: str,
        group: str,
        incarnation: int,
        heal_id: int,
        donors: Sequence[tuple[str, str]],
        timeout_s: float,
    ) -> None:
        self.transferred_bytes = 0
        self._hello = Hello("heal", job, group, incarnation, 0)
        self._heal_id = heal_id
        self._timeout_s = timeout_s
        self._donors = [_Donor(name, address) for name, address in donors]

    def state(self, step: int, like: Sequence[jax.Array], *, cancel: Abort) -> list[jax.Array]:
        """Fetch the pinned state `step`, placed as the leaves of `like` are.

        Raises:
            HealFailed: no donor is left, the donors hold other leaves, or `cancel` was set.
        """
        types = [_type_of(leaf) for leaf in like]
        layout = BlobLayout.of(types)
        self._each(lambda donor: self._check_manifest(donor, step, types, cancel), cancel)
        arena = self._fetch(Request(Kind.STATE, self._heal_id, step), layout, cancel)
        return place(layout.arrays(arena), like)

    def means(self, step: int, specs: Sequence[LeafSpec], *, cancel: Abort) -> list[np.ndarray]:
        """Fetch the means of a step, waiting until it is committed.

        Raises:
            HealFailed: no donor is left, or `cancel` was set.
        """
        layout = BlobLayout.of([LeafType(spec.shape, spec.dtype) for spec in specs])
        return layout.arrays(self._fetch(Request(Kind.MEANS, self._heal_id, step), layout, cancel))

    def close(self) -> None:
        for donor in self._donors:
            if donor.sock is not None:
                donor.sock.close()
                donor.sock = None

    # ---- donors ----

    def _each(self, work: Any, cancel: Abort) -> None:
        """Run `work(donor)` for all usable donors at once; drop those that fail."""
        threads = [
            threading.Thread(target=self._guarded, args=(donor, work), name=f"jaxft-heal-{donor.name}")
            for donor in self._donors
            if not donor.failed
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if cancel.is_set:
            raise HealFailed(f"the heal was overtaken: {cancel.reason}")
        if all(donor.failed for donor in self._donors):
            reasons = "; ".join(f"{donor.name}: {donor.failed}" for donor in self._donors)
            raise HealFailed(f"no donor is left ({reasons or 'none was named'})")

    def _guarded(self, donor: _Donor, work: Any) -> None:
        try:
            work(donor)
        except (ConnectionError, TimeoutError, OSError, ValueError) as error:
            donor.failed = str(error) or type(error).__name__
            if donor.sock is not None:
                donor.sock.close()
                donor.sock = None
            _log.warning("donor %s is dropped: %s", donor.name, donor.failed)

    def _connection(self, donor: _Donor, cancel: Abort) -> socket.socket:
        if donor.sock is None:
            deadline_s = time.monotonic() + self._timeout_s
            donor.sock = dial(donor.address, self._hello, deadline_s=deadline_s, abort=cancel)
        return donor.sock

    def _check_manifest(self, donor: _Donor, step: int, types: list[LeafType], cancel: Abort) -> None:
        sock = self._connection(donor, cancel)
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            _ask(sock, Request(Kind.MANIFEST, self._heal_id, step), deadline_s, cancel)
            reply = _header(sock, deadline_s, cancel)
            text = _text(sock, reply, MAX_MANIFEST_BYTES, deadline_s, cancel)
            if reply.status is not Status.NOT_YET:
                break
        if reply.status is not Status.OK:
            raise BadFrame(text)
        manifest = json.loads(text)
        theirs = [LeafType(tuple(shape), dtype) for shape, dtype in manifest["leaves"]]
        if manifest["step"] != step:
            raise BadFrame(f"it keeps state {manifest['step']}, not {step}")
        if theirs != types:
            raise BadFrame(f"its state has other leaves: {_first_difference(theirs, types)}")

    # ---- chunks ----

    def _fetch(self, request: Request, layout: BlobLayout, cancel: Abort) -> np.ndarray:
        arena = aligned_empty(layout.total_bytes)
        run = _Run(request, layout, arena, self._timeout_s, cancel)
        self._each(lambda donor: run.serve(self._connection(donor, cancel)), cancel)
        self.transferred_bytes += layout.total_bytes
        return arena


class _Run:
    """One blob on its way into one arena."""

    def __init__(
        self, request: Request, layout: BlobLayout, arena: np.ndarray, timeout_s: float, cancel: Abort
    ) -> None:
        self._request = request
        self._layout = layout
        self._arena = arena.data
        self._timeout_s = timeout_s
        self._cancel = cancel
        self._changed = threading.Condition()
        self._missing = layout.chunks
        self._spans: deque[tuple[int, int]] = deque(
            (first, min(SPAN_CHUNKS, layout.chunks - first)) for first in range(0, layout.chunks, SPAN_CHUNKS)
        )

    def serve(self, sock: socket.socket) -> None:
        """Take spans and fetch them over `sock`, until every chunk is there, from whomever."""
        while (span := self._take()) is not None:
            first, count = span
            done = 0
            try:
                while done < count:
                    done += self._fetch_span(sock, first + done, count - done)
            finally:
                self._give_back(first + done, count - done)

    def _take(self) -> tuple[int, int] | None:
        with self._changed:
            # Nothing to take now, but another donor may still fail and give back what it took.
            self._changed.wait_for(
                lambda: self._spans or not self._missing or self._cancel.is_set, self._timeout_s
            )
            if not self._missing:
                return None
            if self._cancel.is_set:
                raise ConnectionAbortedError(self._cancel.reason)
            if not self._spans:
                raise TimeoutError("the other donors stand still")
            return self._spans.popleft()

    def _give_back(self, first: int, count: int) -> None:
        with self._changed:
            if count:
                self._spans.appendleft((first, count))
            self._changed.notify_all()

    def _fetch_span(self, sock: socket.socket, first: int, count: int) -> int:
        """Fetch some chunks, from `first` on; return how many."""
        request = Request(self._request.kind, self._request.heal_id, self._request.step, first, count)
        _ask(sock, request, time.monotonic() + self._timeout_s, self._cancel)
        for chunk in range(first, first + count):
            if not self._fetch_chunk(sock, chunk):
                return chunk - first
            with self._changed:
                self._missing -= 1
        return count

    def _fetch_chunk(self, sock: socket.socket, chunk: int) -> bool:
        """Fetch a chunk; False if the donor does not have it yet."""
        deadline_s = time.monotonic() + self._timeout_s
        reply = _header(sock, deadline_s, self._cancel)
        if reply.status is not Status.OK:
            text = _text(sock, reply, MAX_TEXT_BYTES, deadline_s, self._cancel)
            if reply.status is Status.NOT_YET:
                return False
            raise BadFrame(text)
        start, length = self._layout.span_of(chunk)
        if (reply.index, reply.length) != (chunk, length):
            raise BadFrame(
                f"it sent chunk {reply.index} of {reply.length} bytes for chunk {chunk} of {length}"
            )
        target = self._arena[start : start + length]
        recv_exactly(sock, target, deadline_s=deadline_s, abort=self._cancel, what="a donor's chunk")
        if checksum([target]) != reply.digest:
            raise BadFrame(f"chunk {chunk} arrived damaged: its digest is not the one it was sent with")
        return True


def place(arrays: Sequence[np.ndarray], like: Sequence[jax.Array]) -> list[jax.Array]:
    """Put host arrays where the leaves of `like` are. On the CPU backend they stay where they lie."""
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in like]
    raw = [
        jnp.array(array) if key else array  # small, and wrapped below
        for array, key in zip(arrays, keys, strict=True)
    ]
    targets = [None if key else leaf.sharding for leaf, key in zip(like, keys, strict=True)]
    placed = jax.device_put(raw, targets)
    return [
        jax.device_put(jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)), leaf.sharding)
        if key
        else array
        for array, leaf, key in zip(placed, like, keys, strict=True)
    ]


def _type_of(leaf: jax.Array) -> LeafType:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return LeafType(tuple(data.shape), data.dtype.name)
    return LeafType(tuple(leaf.shape), leaf.dtype.name)


def _ask(sock: socket.socket, request: Request, deadline_s: float, cancel: Abort) -> None:
    send_all(sock, [request.encode()], deadline_s=deadline_s, abort=cancel, what="a donor to take a request")


def _header(sock: socket.socket, deadline_s: float, cancel: Abort) -> Reply:
    data = bytearray(REPLY_BYTES)
    recv_exactly(sock, memoryview(data), deadline_s=deadline_s, abort=cancel, what="a donor's answer")
    return Reply.decode(data)


def _text(sock: socket.socket, reply: Reply, limit: int, deadline_s: float, cancel: Abort) -> str:
    if reply.length > limit:
        raise BadFrame(f"it announced a text of {reply.length} bytes; {limit} are allowed")
    data = bytearray(reply.length)
    recv_exactly(sock, memoryview(data), deadline_s=deadline_s, abort=cancel, what="a donor's answer")
    return data.decode(errors="replace")


def _first_difference(theirs: list[LeafType], ours: list[LeafType]) -> str:
    if len(theirs) != len(ours):
        return f"{len(theirs)} leaves instead of {len(ours)}"
    index = next(i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
    return f"leaf {index} is {theirs[index]}, here {ours[index]}"
