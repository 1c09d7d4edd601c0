"""Whole exchanges in one thread: lanes take turns, and the test carries each byte from one to another."""

import itertools
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from jaxft._arrays._layout import Layout
from jaxft._arrays._memory import result_regions
from jaxft._exchange import _compiled, _plan, _reducer
from jaxft._exchange._compiled_lane import CompiledLane
from jaxft._exchange._links import Links
from jaxft._exchange._partials import Partials
from jaxft._exchange._plan import Lane, Task, Turn
from jaxft._exchange._python_lane import PythonLane
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import Abort

from .lanes import loaded
from .members import partials_of, peers_of

STEP = 11
# More turns than any exchange of a test takes, even byte by byte.
MANY_TURNS = 1_000_000

Make = Callable[[Links, Task], Lane]


def compiled_lane(library: _compiled.Library) -> Make:
    return lambda links, task: CompiledLane(library, links, task)


def task_of(partials: Partials, strands: int = 1) -> Task:
    return Task(partials.layout, STEP, partials, result_regions(partials.layout), strands)


def made_by(by: str) -> Make:
    """ "python", "compiled", or "compiled" for one instruction set by its name."""
    if by == "python":
        return PythonLane
    return compiled_lane(loaded(None if by == "compiled" else by))


@contextmanager
def cut_into(chunk_bytes: int, window: int, *, one_trip: bool = False) -> Iterator[None]:
    """Plans of small chunks, and a small window."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plan, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(_plan, "_SMALL_CHUNK_BYTES", chunk_bytes)
        patch.setattr(_plan, "ONE_TRIP_BYTES", 1 << 30 if one_trip else 0)
        patch.setattr(_reducer, "WINDOW", window)
        yield


@dataclass
class Wire:
    """One direction between two members. Keeps everything that it carried."""

    source: socket.socket
    target: socket.socket
    pieces: Iterator[int]  # how many bytes to carry next
    carried: bytearray = field(default_factory=bytearray)
    waiting: deque[bytes] = field(default_factory=deque)

    def carry(self) -> None:
        """Carry one piece, if there are bytes and room."""
        if not self.waiting:
            try:
                self.waiting.append(self.source.recv(next(self.pieces)))
            except BlockingIOError:
                return
        try:
            sent = self.target.send(self.waiting[0])
        except BlockingIOError:
            return
        piece = self.waiting.popleft()
        self.carried += piece[:sent]
        if sent < len(piece):
            self.waiting.append(piece[sent:])


def _keys(one: int, other: int) -> bytes:
    return bytes([one, other]) * 16


@contextmanager
def wired(
    shards: Sequence[Sequence[int]], *, sealed: bool, pieces: Callable[[], Iterator[int]], strand: int = 0
) -> Iterator[tuple[list[Links], dict[tuple[int, int], Wire]]]:
    """The links of every member, and the wires between them by (from, to). Sealed: with a MAC on every frame."""
    ends: list[dict[int, Connection]] = [{} for _ in shards]
    outer: dict[tuple[int, int], socket.socket] = {}
    for me, peer in itertools.permutations(range(len(shards)), 2):
        mine, outer[me, peer] = socket.socketpair()
        ends[me][peer] = (
            Connection.sealed(mine, outgoing=_keys(me, peer), incoming=_keys(peer, me))
            if sealed
            else Connection.plain(mine)
        )
    for sock in outer.values():
        sock.settimeout(0.0)
    links = [
        Links(
            job="job",
            quorum_id=4,
            me=me,
            members=peers_of(shards),
            connections=connections,
            abort=Abort(),
            strand=strand,
        )
        for me, connections in enumerate(ends)
    ]
    wires = {
        (me, peer): Wire(outer[me, peer], outer[peer, me], pieces())
        for me, peer in itertools.permutations(range(len(shards)), 2)
    }
    try:
        yield links, wires
    finally:
        for each in links:
            each.close()
        for sock in outer.values():
            sock.close()


def run(lanes: Sequence[Lane], wires: Sequence[Wire]) -> None:
    """Until all lanes are done."""
    open_lanes = list(lanes)
    for _ in range(MANY_TURNS):
        open_lanes = [lane for lane in open_lanes if lane.turn(0.0) is not Turn.DONE]
        if not open_lanes:
            return
        for wire in wires:
            wire.carry()
    raise AssertionError("the lanes do not come to an end")


def recorded(
    layout: Layout, shards: Sequence[Sequence[int]], *, sealed: bool, by: str
) -> dict[tuple[int, int], bytes]:
    """What members with this lane send each other."""
    total = sum(map(len, shards))
    make = made_by(by)
    with wired(shards, sealed=sealed, pieces=lambda: itertools.repeat(1 << 20)) as (links, wires):
        lanes = [
            make(each, task_of(partials_of(layout, total, mine)))
            for each, mine in zip(links, shards, strict=True)
        ]
        run(lanes, list(wires.values()))
        for lane in lanes:
            lane.close()
        return {pair: bytes(wire.carried) for pair, wire in wires.items()}


def fed(lane: Lane, peer: socket.socket, stream: bytes, pieces: Iterator[int], *, closes: bool) -> object:
    """A lane's result of a stream, or where it stands. Raises PeerLost."""
    at = 0
    while at < len(stream):
        at += peer.send(stream[at : at + next(pieces)])
        while (turn := lane.turn(0.0)) is Turn.MOVED:
            pass
        if turn is Turn.DONE:
            break
    if closes:
        peer.close()
    while (turn := lane.turn(0.0)) is Turn.MOVED:
        pass
    if turn is Turn.DONE:
        return [region.tobytes() for region in lane.task.result]
    return turn, lane.owing(), lane.unfinished()
