"""Members of an exchange in separate processes that take orders over a pipe and are killed."""

import functools
import hashlib
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np

from jaxft._arrays._layout import Layout
from jaxft._arrays._pieces import Pieces
from jaxft._errors import ExchangeFailed
from jaxft._exchange import _compiled, _grid_links, _patience, _plan
from jaxft._exchange._grid_links import AnyLinks, open_links
from jaxft._exchange._links import Peer
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import Patience
from jaxft._exchange._spans import Contribution, SpanLinks
from jaxft._transport._listener import Abort, Listener
from tests import patience
from tests.forks import Actor

from .members import BIG, contribution, regions_of


class _Trap:
    """Stops the process forever when bytes have moved for the n-th time."""

    def __init__(self, pipe: Connection, moves: int) -> None:
        self._pipe = pipe
        self._moves = moves

    def moved(self) -> None:
        self._moves -= 1
        if self._moves == 0:
            self._pipe.send("in the trap")
            self._pipe.recv()


class _Process:
    """What runs in a member's process: its methods are called by name from the test."""

    def __init__(
        self, pipe: Connection, number: int, total: int, lane: str, strands: int, large: int
    ) -> None:
        if lane == "python":
            _compiled.library = functools.cache(lambda: None)
        assert (_compiled.library() is None) == (lane == "python")
        self.pipe = pipe
        self.listener = Listener(
            host="127.0.0.1", job="job", group=f"group-{number}", incarnation=1, on_heal=None
        )
        self.layout = Layout.of(BIG)
        self.partials = Partials(self.layout, total)
        self.strands = strands
        _grid_links.LEAST_MEMBERS = large
        _plan.STRAND_BYTES = self.layout.size_bytes // strands
        self.links: SpanLinks | None = None

    def port(self) -> int:
        return self.listener.port

    def add(self, shards: Sequence[int]) -> None:
        for shard in shards:
            self.partials.add(shard, contribution(self.layout.specs, shard))

    def open(self, quorum_id: int, me: str, members: Sequence[Peer]) -> None:
        def connected(_: Any, strand: int, abort: Abort, before: AnyLinks | None) -> AnyLinks:
            links = open_links(
                self.listener,
                job="job",
                quorum_id=quorum_id,
                me=me,
                members=members,
                abort=abort,
                patience=Patience(patience.FAR_S),
                strand=strand,
                before=before,
            )
            for connection in links.all_connections():
                # So that an exchange takes many moves, however fast the others are.
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
            return links

        self.links = SpanLinks(quorum_id, [None], Abort(), connected, self.links, self.strands)

    def exchange(self, trap: int | None, progress_timeout_s: float) -> Any:
        """Returns a digest of the means, or of a failure: whose it is, its text, and when it was."""
        assert self.links is not None
        if trap is not None:
            _patience.LOOK_S = 0.0  # so that each move is reported at once
        moved = _Trap(self.pipe, trap or 0).moved
        given = Contribution(self.partials, cast(Pieces, None), lambda _: self.layout)
        try:
            means = self.links.exchange(
                given,
                step=11,
                total_shards=self.partials.shards,
                patience=lambda later_s: Patience(progress_timeout_s + later_s, moved=moved),
            )
        except ExchangeFailed as error:
            self.links.close()  # as an attempt does
            self.links = None
            return error.peers, str(error), time.monotonic()
        return digest(means)

    def held(self) -> str:
        """A digest of this member's contribution."""
        return digest([buffer for node in self.partials.nodes for buffer in regions_of(self.partials, node)])


def digest(arrays: Sequence[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


class Member(Actor):
    def __init__(
        self, number: int, total: int, lane: str, strands: int = 1, large: int = _grid_links.LEAST_MEMBERS
    ) -> None:
        super().__init__(_Process, number, total, lane, strands, large)
        self.group = f"group-{number}"


@contextmanager
def started(
    shards: Sequence[Sequence[int]],
    total: int,
    lane: str,
    strands: int = 1,
    large: int = _grid_links.LEAST_MEMBERS,
) -> Iterator[list[Member]]:
    """Processes that hold these shards, and exchange with this lane, in some strands.

    A quorum of at least `large` members exchanges in rows and columns.
    """
    members = [Member(number, total, lane, strands, large) for number in range(len(shards))]
    try:
        for member, held in zip(members, shards, strict=True):
            member.tell("add", held)
        for member in members:
            member.answer()
        yield members
    finally:
        for member in members:
            member.end()


def join(quorum_id: int, members: Sequence[Member], shards: Sequence[Sequence[int]]) -> None:
    """Form a quorum of these processes, with these shards."""
    peers = [
        Peer(member.group, 1, f"127.0.0.1:{member.ask('port')}", tuple(held))
        for member, held in zip(members, shards, strict=True)
    ]
    for member in members:
        member.tell("open", quorum_id, member.group, peers)
    for member in members:
        assert member.answer() is None
