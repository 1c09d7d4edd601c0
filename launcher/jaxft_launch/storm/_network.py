"""A fault-injecting network: a proxy for the connections among groups, and between groups and coordinator.

Theory of operation. Each group has two ports at this proxy: one on which the other groups dial it, and one on which
it dials the coordinator. The proxy knows both ends of every connection, because a dialler sends its name in the
request, before anything else. Bytes from `a` to `b` travel on the link (a, b), those back on (b, a), and each link
has its own rules:

    cut        nothing arrives, neither bytes nor the end of a connection, and neither end is notified, as with a cut
               cable. Data that was sent meanwhile arrives after the repair, as if resent by TCP.
    capped     a limit in bytes per second.
    damaged    some bits of the next large piece of a heal (or of an exchange) arrive flipped.

`reset` ends the existing connections in both directions with an RST; new ones may be opened.

All sockets belong to one asyncio loop in a separate thread; the methods may be called from any other thread. A
network error on a connection closes both of its ends, and affects no other; an error in this code is raised by the
next method call.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from jaxft._transport._handshake import BadRequest, decode, missing_bytes
from jaxft_launch.storm._faults import COORDINATOR

HOST = "127.0.0.1"
PIECE_BYTES = 1 << 18
# A piece of this size is payload; requests, headers and manifests are smaller.
LEAST_DAMAGED_BYTES = 4096
# A group sends its request as soon as it is connected.
HELLO_TIMEOUT_S = 30.0
# A call of the loop takes microseconds; this long only if the machine stalls.
CALL_TIMEOUT_S = 60.0
# Close with an RST instead of a FIN.
_LINGER_NOT = struct.pack("ii", 1, 0)

Pair = tuple[str, str]
_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class _Link:
    """One direction between two ends."""

    clear: asyncio.Event = field(default_factory=asyncio.Event)
    bytes_per_s: float | None = None
    damage_kind: str = ""  # "": no damage

    def __post_init__(self) -> None:
        self.clear.set()


@dataclass(eq=False, slots=True)
class _Connection:
    """A connection from `dialler` to `listener`, of a kind: "exchange", "heal" or "control"."""

    dialler: str
    listener: str
    kind: str
    ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter]


class Network:
    """Carries the connections of a job's groups on this machine, for the length of its `with` block."""

    def __init__(self, groups: Sequence[str], where: Callable[[str], int | None]) -> None:
        """Carry the connections of these groups.

        `where` returns the local port on which a group, or "coordinator", listens now; None if it does not listen
        yet. It is called in the proxy's thread for each new connection.
        """
        self._groups = tuple(groups)
        self._where = where
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-network", daemon=True)
        self._servers: list[asyncio.Server] = []
        self._ports: dict[Pair, int] = {}
        self._links: dict[Pair, _Link] = {}
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = (
            None  # an error that ended a connection, other than of the network
        )
        self._to_damage = 0
        self.damaged = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CALL_TIMEOUT_S)
            self._loop.close()

    # ---- where to dial ----

    def host_of(self, group: str) -> str:
        """Return the host:port that a group should announce as its own."""
        return f"{HOST}:{self._ports['', group]}"

    def coordinator_of(self, group: str) -> str:
        """Return the host:port at which a group reaches the coordinator."""
        return f"{HOST}:{self._ports[group, COORDINATOR]}"

    # ---- faults ----

    def cut(self, pairs: Iterable[Pair]) -> None:
        """Let nothing through on these links, without notifying either end."""
        self._call(self._set_cut(tuple(pairs), cut=True))

    def repair(self, pairs: Iterable[Pair]) -> None:
        """Let everything through again, starting with the data that was held back."""
        self._call(self._set_cut(tuple(pairs), cut=False))

    def reset(self, a: str, b: str) -> int:
        """Reset all connections between two ends with an RST; return how many there were."""
        return self._call(self._reset(a, b))

    def cap(self, pairs: Iterable[Pair], bytes_per_s: float | None) -> None:
        """Limit each of these links to this many bytes per second; None removes the limit."""
        self._call(self._cap(tuple(pairs), bytes_per_s))

    def damage(self, pairs: Iterable[Pair], *, times: int = 1, kind: str = "heal") -> None:
        """Flip bits in the next large piece of a heal (or "exchange") on these links, on at most `times` of them.

        `damaged` counts how often that has happened.
        """
        self._call(self._damage(tuple(pairs), times, kind))

    def spare(self) -> None:
        """Cancel damage that has not happened yet."""
        self._call(self._damage(tuple(self._links), 0, ""))

    def around(self, group: str, *, into: bool = True, out: bool = True) -> tuple[Pair, ...]:
        """Return all links from and to a group, including those with the coordinator."""
        others = [name for name in (*self._groups, COORDINATOR) if name != group]
        return (
            *((other, group) for other in others if into),
            *((group, other) for other in others if out),
        )

    # ---- in the loop ----

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        result = asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_TIMEOUT_S)
        if self._broken is not None:
            raise RuntimeError(f"the network failed on a connection: {self._broken!r}") from self._broken
        return result

    async def _open(self) -> None:
        for group in self._groups:
            for pair in (("", group), (group, COORDINATOR)):
                server = await asyncio.start_server(self._accepter(*pair), HOST, 0, limit=PIECE_BYTES)
                self._servers.append(server)
                self._ports[pair] = server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _set_cut(self, pairs: Sequence[Pair], *, cut: bool) -> None:
        for pair in pairs:
            clear = self._link(pair).clear
            if cut:
                clear.clear()
            else:
                clear.set()

    async def _reset(self, a: str, b: str) -> int:
        hit = [c for c in self._connections if {c.dialler, c.listener} == {a, b}]
        for connection in hit:
            _abort(*connection.ends)
        return len(hit)

    async def _cap(self, pairs: Sequence[Pair], bytes_per_s: float | None) -> None:
        for pair in pairs:
            self._link(pair).bytes_per_s = bytes_per_s

    async def _damage(self, pairs: Sequence[Pair], times: int, kind: str) -> None:
        self._to_damage = times
        for pair in pairs:
            self._link(pair).damage_kind = kind

    def _link(self, pair: Pair) -> _Link:
        return self._links.setdefault(pair, _Link())

    def _accepter(
        self, dialler: str, listener: str
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(self._carry(dialler, listener, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._carried)

        return accept

    def _carried(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = self._broken or error

    async def _carry(
        self, dialler: str, listener: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        ends = [writer]
        connection: _Connection | None = None
        try:
            kind, head = "control", b""
            if listener != COORDINATOR:
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    dialler, kind, head = await _read_request(reader)
            await self._link((dialler, listener)).clear.wait()
            port = self._where(listener)
            if (
                port is None or port in self._ports.values()
            ):  # no listener yet, or this proxy: an endless loop
                return
            far_reader, far_writer = await asyncio.open_connection(HOST, port, limit=PIECE_BYTES)
            ends.append(far_writer)
            far_writer.write(head)
            connection = _Connection(dialler, listener, kind, (writer, far_writer))
            self._connections.add(connection)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, far_writer, (dialler, listener), kind))
                pumps.create_task(self._pump(far_reader, writer, (listener, dialler), kind))
            for end in ends:
                end.close()  # both ends have closed it, and the last data is still being sent
            ends.clear()
        except* (OSError, BadRequest, asyncio.IncompleteReadError):
            pass  # the other end is closed below
        finally:
            if connection is not None:
                self._connections.discard(connection)
            _abort(*ends)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pair: Pair, kind: str
    ) -> None:
        link = self._link(pair)
        try:
            while piece := await reader.read(PIECE_BYTES):
                await link.clear.wait()
                if link.bytes_per_s is not None:
                    await asyncio.sleep(len(piece) / link.bytes_per_s)
                if link.damage_kind == kind and self._to_damage and len(piece) >= LEAST_DAMAGED_BYTES:
                    link.damage_kind = ""
                    self._to_damage -= 1
                    self.damaged += 1
                    piece = _with_a_flipped_burst(piece)
                writer.write(piece)
                await writer.drain()
        except OSError:
            await link.clear.wait()  # a cut link does not carry an RST either
            raise
        await link.clear.wait()
        await writer.drain()
        writer.write_eof()


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """Return the dialler's group, the kind of connection, and the bytes of its request."""
    head = b""
    while missing := missing_bytes(head):
        head += await reader.readexactly(missing)
    request = decode(head)
    return request.group, request.kind, head


def _with_a_flipped_burst(piece: bytes) -> bytes:
    """Flip one bit in each of four bytes: in any 32-bit float, at least the exponent changes."""
    at = len(piece) // 2
    burst = bytes(byte ^ 0x10 for byte in piece[at : at + 4])
    return piece[:at] + burst + piece[at + 4 :]


def _abort(*ends: asyncio.StreamWriter) -> None:
    for end in ends:
        raw = end.get_extra_info("socket")
        if raw is not None and not end.transport.is_closing():
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        end.transport.abort()
