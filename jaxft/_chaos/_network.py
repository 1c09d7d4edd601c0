"""A network that can be broken: what groups say to each other and to their coordinator goes through here.

Theory of operation. Each group has two front doors of its own at this proxy: one at which the others dial it, and one
at which it dials the coordinator. So both ends of every connection are known: whoever dials a group says its name in
the hello, before anything else. Bytes from `a` to `b` travel on the link (a, b), those back on (b, a), and each link
has rules of its own:

    cut        nothing arrives, neither bytes nor the end of a connection, and nobody is told: as with a cut cable.
               What was sent meanwhile arrives when the link is mended, as TCP would send it again.
    capped     so many bytes a second.
    damaged    a burst of bits of the next large piece of a heal (or of an exchange) arrives flipped.

`reset` ends the connections that are there, in both directions, with an RST; new ones are let through.

All sockets belong to one asyncio loop in a thread of its own; the methods may be called from any other thread. An
error on one connection ends that connection, at both ends, and nothing else; an error of this code is raised by the
next call of a method.
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

from jaxft._chaos._faults import COORDINATOR
from jaxft._transport._handshake import BadHello, decode, missing_bytes

HOST = "127.0.0.1"
PIECE_BYTES = 1 << 18
# A piece of this size is payload; hellos, headers and manifests come in smaller ones.
LEAST_DAMAGED_BYTES = 4096
# One of our groups sends its hello as soon as it is connected.
HELLO_TIMEOUT_S = 30.0
# Whatever is asked of the loop takes microseconds; it is this late only if the machine stands still.
CALL_TIMEOUT_S = 60.0
# Close with an RST instead of a FIN.
_LINGER_NOT = struct.pack("ii", 1, 0)

Pair = tuple[str, str]
_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class _Link:
    """One direction between two."""

    clear: asyncio.Event = field(default_factory=asyncio.Event)
    bytes_per_s: float | None = None
    damage_kind: str = ""  # "": none

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
    """Carries the connections of a job's groups on this machine, until its `with` block is left."""

    def __init__(self, groups: Sequence[str], where: Callable[[str], int | None]) -> None:
        """Carry for these groups. `where` says at which local port a group, or "coordinator", listens now.

        It is called in the thread of the proxy, for each new connection, and may answer None: not yet.
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
        self._broken: BaseException | None = None  # what ended a connection, and was not of the network
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
        """Return the host:port that a group should name as its own."""
        return f"{HOST}:{self._ports['', group]}"

    def coordinator_of(self, group: str) -> str:
        """Return the host:port at which a group reaches the coordinator."""
        return f"{HOST}:{self._ports[group, COORDINATOR]}"

    # ---- what can be done to it ----

    def cut(self, pairs: Iterable[Pair]) -> None:
        """Let nothing through on these links, and tell nobody."""
        self._call(self._set_cut(tuple(pairs), cut=True))

    def mend(self, pairs: Iterable[Pair]) -> None:
        """Let everything through again, what was held back first."""
        self._call(self._set_cut(tuple(pairs), cut=False))

    def reset(self, a: str, b: str) -> int:
        """End all connections between two with an RST; return how many there were."""
        return self._call(self._reset(a, b))

    def cap(self, pairs: Iterable[Pair], bytes_per_s: float | None) -> None:
        """Let only so many bytes a second through on each of these links; None lifts it."""
        self._call(self._cap(tuple(pairs), bytes_per_s))

    def damage(self, pairs: Iterable[Pair], *, times: int = 1, kind: str = "heal") -> None:
        """Flip bits in the next large piece of a heal (or "exchange") on these links, on `times` of them at most.

        `damaged` says how often that has happened so far.
        """
        self._call(self._damage(tuple(pairs), times, kind))

    def spare(self) -> None:
        """Damage nothing that has not been damaged yet."""
        self._call(self._damage(tuple(self._links), 0, ""))

    def around(self, group: str, *, into: bool = True, out: bool = True) -> tuple[Pair, ...]:
        """Return the links from and to a group: those with all others, the coordinator included."""
        others = [name for name in (*self._groups, COORDINATOR) if name != group]
        return (
            *((other, group) for other in others if into),
            *((group, other) for other in others if out),
        )

    # ---- in the loop ----

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        result = asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_TIMEOUT_S)
        if self._broken is not None:
            raise RuntimeError(f"the network has failed on a connection: {self._broken!r}") from self._broken
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
            kind, said = "control", b""
            if listener != COORDINATOR:
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    dialler, kind, said = await _hear_hello(reader)
            await self._link((dialler, listener)).clear.wait()
            port = self._where(listener)
            if port is None or port in self._ports.values():  # nobody, or ourselves without end
                return
            far_reader, far_writer = await asyncio.open_connection(HOST, port, limit=PIECE_BYTES)
            ends.append(far_writer)
            far_writer.write(said)
            connection = _Connection(dialler, listener, kind, (writer, far_writer))
            self._connections.add(connection)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, far_writer, (dialler, listener), kind))
                pumps.create_task(self._pump(far_reader, writer, (listener, dialler), kind))
            for end in ends:
                end.close()  # both have ended it, and what was said last is still on its way
            ends.clear()
        except* (OSError, BadHello, asyncio.IncompleteReadError):
            pass  # whoever is at the other end learns it below
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
            await link.clear.wait()  # an RST does not get through a cut link either
            raise
        await link.clear.wait()
        await writer.drain()
        writer.write_eof()


async def _hear_hello(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """Return the dialler's group, what it wants, and its hello as it said it."""
    said = b""
    while missing := missing_bytes(said):
        said += await reader.readexactly(missing)
    hello = decode(said)
    return hello.group, hello.kind, said


def _with_a_flipped_burst(piece: bytes) -> bytes:
    """Flip one bit in each of four bytes: in any number of 32 bits, at least the exponent changes."""
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
