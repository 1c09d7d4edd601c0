"""One member of an exchange: jaxft's own, and bare sockets between the same processes."""

import contextlib
import functools
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, cast
from unittest import mock

import jax
import numpy as np
import xxhash
from jaxft_protocol.credentials import DataKey
from jaxft_protocol.ranks.lanes import Span

from benchmarks._worker import serve
from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._arrays._pieces import Pieces
from jaxft._exchange import _compiled
from jaxft._exchange._grid_links import AnyLinks, open_links
from jaxft._exchange._links import Peer
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import Patience
from jaxft._exchange._plan import CHUNK_BYTES, ONE_TRIP_BYTES
from jaxft._exchange._spans import Contribution, SpanLinks
from jaxft._programs import _quantise
from jaxft._transport._listener import Abort, Listener
from tests.exchange.members import reference_sum

TIMEOUT_S = 60.0


class Member:
    def __init__(self) -> None:
        self._plain = socket.create_server(("127.0.0.1", 0))
        self._plain.settimeout(TIMEOUT_S)
        self._links: dict[tuple[bool, int], SpanLinks] = {}  # by whether they have a token, and threads
        self._socks: list[socket.socket] = []
        self._step = 0

    def listen(self, me: int) -> list[int]:
        """Listen as a member of this number; returns the ports: without and with a token, and for bare sockets."""
        self._listeners = {
            token: Listener(
                host="127.0.0.1",
                job="benchmark",
                group=f"group-{me}",
                incarnation=1,
                on_heal=None,
                key=DataKey(bytes(32)) if token else None,
            )
            for token in (False, True)
        }
        return [*(each.port for each in self._listeners.values()), self._plain.getsockname()[1]]

    def join(self, me: int, members: int, ports: Sequence[Sequence[int]], gbit: float | None) -> None:
        """Connect to the others with bare sockets; with jaxft, the first exchange of each kind does.

        Args:
            me: the number of this member.
            members: the number of all.
            ports: what `listen` has returned, of each.
            gbit: the rate of each connection, in Gbit/s; None: what it can.
        """
        self._me, self._members, self._ports, self._gbit = me, members, ports, gbit
        for *_, port in ports[:me]:
            self._socks.append(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S))
        for _ in ports[me + 1 :]:
            self._socks.append(self._plain.accept()[0])
        for sock in self._socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(0.0)
            self._pace(sock)

    def prepare(self, shapes: Sequence[Sequence[int]], dtype: str) -> None:
        """Make this member's contribution, of random numbers."""
        specs = [LeafSpec(f"leaf {i}", tuple(shape), dtype) for i, shape in enumerate(shapes)]
        self._layout = Layout.of(specs)
        self._leaves = [jax.block_until_ready(jax.numpy.asarray(leaf)) for leaf in self._numbers(self._me)]
        self._halves = [
            Layout.of([kind(one) for one in self._layout.specs]) for kind in (_exponents_spec, _integers_spec)
        ]
        self._scaled = [jax.numpy.zeros_like(leaf) for leaf in self._leaves]
        self._checked = False
        self._bare: list[np.ndarray] = []

    def exchange(
        self,
        count: int,
        *,
        token: bool = False,
        python: bool = False,
        threads: int = 1,
        quantize: bool = False,
    ) -> dict[str, Any]:
        """Average `count` times, from JAX arrays to arrays that JAX takes without a copy.

        Args:
            token: with a MAC in place of the checksum of each frame.
            python: without the compiled lane.
            threads: how many it has, each with its own connections.
            quantize: in eight bits.
        """
        with _python_lane() if python else contextlib.nullcontext():
            means_of = self._quantised if quantize else self._means_of
            return self._exchange(count, self._links_of(threads, token=token), means_of)

    def _links_of(self, threads: int, *, token: bool) -> SpanLinks:
        if (token, threads) not in self._links:
            connected = functools.partial(self._open, len(self._links), token=token)
            self._links[token, threads] = SpanLinks(1, [None], Abort(), connected, strands=threads)
        return self._links[token, threads]

    def _open(
        self,
        kind: int,
        _span: Span | None,
        strand: int,
        abort: Abort,
        before: AnyLinks | None,
        *,
        token: bool,
    ) -> AnyLinks:
        peers = [
            Peer(f"group-{number}", 1, f"127.0.0.1:{each[token]}", (number,))
            for number, each in enumerate(self._ports)
        ]
        links = open_links(
            self._listeners[token],
            job="benchmark",
            quorum_id=1,
            me=f"group-{self._me}",
            members=peers,
            abort=abort,
            patience=Patience(TIMEOUT_S),
            lane=kind,  # so that each kind has its own connections
            strand=strand,
            before=before,
        )
        for connection in links.all_connections():
            self._pace(connection.sock)
        return links

    def _pace(self, sock: socket.socket) -> None:
        if self._gbit is not None:
            sock.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, round(self._gbit * 1e9 / 8))

    def _exchange(
        self, count: int, links: SpanLinks, means_of: Callable[[SpanLinks], Sequence[Any]]
    ) -> dict[str, Any]:
        spans: list[tuple[float, float]] = []
        digests: set[str] = set()
        cpu_s: list[float] = []
        for _ in range(count):
            self._step += 1
            began_cpu_s, began_s = time.process_time(), time.monotonic()
            means = means_of(links)
            spans.append((began_s, time.monotonic()))
            cpu_s.append(time.process_time() - began_cpu_s)
            digests.add(self._check(means, exact=means_of == self._means_of))
            del means
        (digest,) = digests
        return {"spans": spans, "cpu_s": cpu_s, "digest": digest}

    def _means_of(self, links: SpanLinks) -> list[np.ndarray]:
        return self._exchanged(links, self._layout, self._leaves)

    def _quantised(self, links: SpanLinks) -> Sequence[jax.Array]:
        exponents = self._exchanged(links, self._halves[0], jax.block_until_ready(_exponents(self._leaves)))
        integers = jax.block_until_ready(_integers(self._leaves, exponents))
        totals = self._exchanged(links, self._halves[1], integers)
        self._scaled = jax.block_until_ready(_scaled(self._scaled, totals, exponents, self._members))
        return self._scaled

    def _exchanged(self, links: SpanLinks, layout: Layout, leaves: Sequence[jax.Array]) -> list[np.ndarray]:
        partials = Partials(layout, self._members)
        partials.add(self._me, leaves)
        return links.exchange(
            Contribution(partials, cast(Pieces, None), lambda _: layout),
            step=self._step,
            total_shards=self._members,
            patience=lambda later_s: Patience(TIMEOUT_S + later_s),
        )

    def bare(self, count: int) -> dict[str, Any]:
        """Move the bytes of such an exchange, without summing."""
        size_bytes = self._layout.size_bytes
        one_trip = size_bytes * (self._members - 1) <= ONE_TRIP_BYTES
        each_bytes = size_bytes if one_trip else 2 * size_bytes // self._members
        spans: list[tuple[float, float]] = []
        cpu_s: list[float] = []
        # Kept for all rounds: memory that is returned to the system would slow down the next measurement.
        if not self._bare:
            self._bare = [np.ones(each_bytes, np.uint8) for _ in range(self._members)]
        out, *into = self._bare
        for _ in range(count):
            began_cpu_s, began_s = time.process_time(), time.monotonic()
            _move(self._socks, out, into)
            spans.append((began_s, time.monotonic()))
            cpu_s.append(time.process_time() - began_cpu_s)
        return {"spans": spans, "cpu_s": cpu_s}

    def _numbers(self, member: int) -> list[np.ndarray]:
        rng = np.random.default_rng(member)
        return [
            rng.random(spec.shape, np.float32).astype(np.dtype(spec.dtype), copy=False)
            for spec in self._layout.specs
        ]

    def _check(self, means: Sequence[Any], *, exact: bool) -> str:
        """The first result of the first member against numpy's own, all else by digests, which must be the same."""
        digest = xxhash.xxh3_64()
        for leaf in means:
            digest.update(np.asarray(leaf).view(np.uint8).reshape(-1).data)
        if exact and self._me == 0 and not self._checked:
            self._checked = True
            same = all(
                np.array_equal(got.view(np.uint8), wanted.view(np.uint8))
                for got, wanted in zip(means, self._means(), strict=True)
            )
            if not same:
                raise AssertionError("the exchange computed a wrong sum")
        return digest.hexdigest()

    def _means(self) -> list[np.ndarray]:
        """The sum in the order of the tree, in float32, which every member must hold bit for bit."""
        numbers = [self._numbers(member) for member in range(self._members)]
        means: list[np.ndarray] = []
        for leaves in zip(*numbers, strict=True):
            total = reference_sum([leaf.astype(np.float32) for leaf in leaves])
            means.append((total / np.float32(self._members)).astype(leaves[0].dtype))
        return means


# Of asm-generic/socket.h: bytes per second.
_MAX_PACING_RATE = 47


def _exponents_spec(spec: LeafSpec) -> LeafSpec:
    shape = jax.eval_shape(_quantise.exponents_of, jax.ShapeDtypeStruct(spec.shape, spec.dtype)).shape
    return LeafSpec(f"{spec.path} exponents", shape, "int8", "max")


def _integers_spec(spec: LeafSpec) -> LeafSpec:
    return LeafSpec(spec.path, spec.shape, "int8", "widened")


@jax.jit
def _exponents(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    return list(map(_quantise.exponents_of, leaves))


@jax.jit
def _integers(leaves: Sequence[jax.Array], exponents: Sequence[Any]) -> list[jax.Array]:
    return list(map(_quantise.integers_of, leaves, exponents))


# Into the memory of the last means: in a step, `apply` reads the integers and makes no means at all.
@functools.partial(jax.jit, donate_argnums=0, static_argnums=3, keep_unused=True)
def _scaled(
    old: Sequence[jax.Array], totals: Sequence[Any], exponents: Sequence[Any], shards: int
) -> list[jax.Array]:
    return [
        _quantise.mean_of(total, exponent, shards, into.dtype)
        for into, total, exponent in zip(old, totals, exponents, strict=True)
    ]


def _python_lane() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(_compiled, "library", functools.cache(lambda: None))


def _move(socks: Sequence[socket.socket], out: np.ndarray, into: Sequence[np.ndarray]) -> None:
    """Send `out` to all members and receive as much from each, in one thread."""
    sending = {sock.fileno(): out.data for sock in socks}
    receiving = {sock.fileno(): room.data for sock, room in zip(socks, into, strict=True)}
    by_fd = {sock.fileno(): sock for sock in socks}
    poller = select.poll()
    for fd in by_fd:
        poller.register(fd, select.POLLIN | select.POLLOUT)
    while sending or receiving:
        for fd, event in poller.poll(1000 * TIMEOUT_S):
            if event & select.POLLIN and fd in receiving:
                receiving[fd] = receiving[fd][by_fd[fd].recv_into(receiving[fd][:CHUNK_BYTES]) :]
                if not receiving[fd]:
                    del receiving[fd]
                    poller.modify(fd, select.POLLOUT if fd in sending else 0)
            if event & select.POLLOUT and fd in sending:
                sending[fd] = sending[fd][by_fd[fd].send(sending[fd][:CHUNK_BYTES]) :]
                if not sending[fd]:
                    del sending[fd]
                    poller.modify(fd, select.POLLIN if fd in receiving else 0)


if __name__ == "__main__":
    serve(Member())
