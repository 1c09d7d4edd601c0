"""Connects the members of a quorum, each with each, or with some in a large quorum.

Of two members, the first in the quorum's order dials, unless both go on with a connection of the quorum before
(`_continuing.py`). All that runs at once, and then connections from earlier members are taken: one unresponsive
member does not hide another, and is the only one blamed.
"""

import contextlib
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxft._errors import ExchangeFailed
from jaxft._exchange._continuing import Continuing, Kept, NotContinued
from jaxft._exchange._frames import Stamp
from jaxft._exchange._patience import Patience, Wait
from jaxft._transport._handshake import Dialling
from jaxft._transport._listener import Abort, Connection, ConnectionRequest, Listener
from jaxft._transport._sockets import Aborted, wait_any


@dataclass(frozen=True, slots=True)
class Peer:
    """A member of a quorum, or the one of its processes that holds what this one does.

    Args:
        group: its name.
        incarnation: its incarnation.
        address: of the process.
        shards: the member's shards of the step.
        rank: the process's number in its group.
        ranks: the number of processes of its group.
    """

    group: str
    incarnation: int
    address: str
    shards: tuple[int, ...]
    rank: int = 0
    ranks: int = 1

    @property
    def name(self) -> str:
        return f"group {self.group!r}" if self.ranks == 1 else f"rank {self.rank} of group {self.group!r}"


def connect_mesh(
    listener: Listener,
    request: ConnectionRequest,
    *,
    me: int,
    members: Sequence[Peer],
    wanted: Collection[int],
    kept: Mapping[int, Kept],
    stamps: Sequence[Stamp],
    abort: Abort,
    patience: Patience,
) -> dict[int, Connection]:
    """Connect to other members; return the connections by the members' numbers. Raises ExchangeFailed.

    Args:
        listener: where earlier members dial us.
        request: what is dialled with.
        me: our number.
        members: of the quorum.
        wanted: the numbers of those to connect to, who connect to this one too.
        kept: connections of an older quorum, by the members' numbers; owned.
        stamps: of the frame by which each member goes on with such a connection.
        abort: ends the wait.
        patience: the limit on a time without progress.
    """
    mesh = _Mesh(listener, request, me, members, sorted(wanted), abort, patience)
    try:
        mesh.begin(kept, stamps)
        while mesh.waiting:
            mesh.advance()
        mesh.take_lower()
    except BaseException:
        for connection in [*mesh.made.values(), *(one.connection for one in kept.values())]:
            connection.close()
        for unfinished in mesh.waiting.values():
            unfinished.sock.close()
        raise
    return mesh.made


@dataclass
class _Mesh:
    """The connections of one member, some of which are not made yet."""

    listener: Listener
    request: ConnectionRequest
    me: int
    members: Sequence[Peer]
    wanted: Sequence[int]
    abort: Abort
    patience: Patience
    made: dict[int, Connection] = field(default_factory=dict[int, Connection])
    waiting: dict[int, Dialling | Continuing] = field(default_factory=dict[int, Dialling | Continuing])

    def begin(self, kept: Mapping[int, Kept], stamps: Sequence[Stamp]) -> None:
        """Dial later members, and offer all with whom there is a connection to go on with it."""
        for number, one in kept.items():
            mine, theirs = (stamps[end].header_to_continue(one.exchanges) for end in (self.me, number))
            with contextlib.suppress(NotContinued):
                self.waiting[number] = Continuing(one.connection, mine, theirs, one.progress)
        self._dial(number for number in self.wanted if number not in self.waiting)

    def advance(self) -> None:
        """Wait for any of them to progress."""
        sources = {one.sock.fileno(): one.events for one in self.waiting.values()}
        waited_for = [self.members[number] for number in self.waiting]
        what = f"{_names(waited_for)} to connect for quorum {self.request.number}"
        try:
            ready = self.patience.until(
                lambda deadline_s: wait_any(sources, deadline_s=deadline_s, what=what, abort=self.abort),
                lambda: self._mention(waited_for),
            )
        except TimeoutError as error:
            why = f"Timed out after {self.patience.still_s:.1f} s waiting for {what}."
            raise _failed(self.request, why, waited_for) from error
        except Aborted as error:
            raise _failed(self.request, str(error), []) from error
        failures: dict[int, ConnectionError] = {}
        refused: list[int] = []
        for number, one in list(self.waiting.items()):
            if one.sock.fileno() not in ready:
                continue
            try:
                connection = one.advance()
            except NotContinued:
                del self.waiting[number]
                self.patience.moved()  # the peer has said so, or closed: it lives, and needs time to connect again
                refused.append(number)
            except ConnectionError as error:
                failures[number] = error
            else:
                self._moved(number, connection)
        if failures:
            text = " ".join(map(str, failures.values()))
            raise _failed(self.request, text, [self.members[number] for number in failures])
        self._dial(refused)

    def take_lower(self) -> None:
        """Wait for earlier members to dial us."""
        late: list[Peer] = []
        for number in self.wanted:
            peer = self.members[number]
            if number > self.me or number in self.made:
                continue
            take = functools.partial(
                self.listener.take,
                quorum_id=self.request.number,
                group=peer.group,
                incarnation=peer.incarnation,
                lane=self.request.lane,
                strand=self.request.strand,
                abort=self.abort,
            )
            try:
                self.made[number] = self.patience.until(
                    lambda deadline_s, take=take: take(deadline_s=deadline_s),
                    lambda peer=peer: self._mention([peer]),
                )
                if not late:
                    self.patience.moved()
            except TimeoutError:
                late.append(peer)  # later members may have connected already
            except ConnectionError as error:
                raise _failed(
                    self.request, str(error), []
                ) from error  # this group is leaving: no peer to blame
        if late:
            raise _failed(self.request, f"{_names(late)} did not connect to this group in time.", late)

    def _dial(self, numbers: Iterable[int]) -> None:
        """Dial the later ones of these members; the earlier ones dial us."""
        for number in numbers:
            if number > self.me:
                self._dial_one(number)

    def _dial_one(self, number: int) -> None:
        peer = self.members[number]
        try:
            to_peer = replace(
                self.request, to_group=peer.group, to_incarnation=peer.incarnation, rank=peer.rank
            )
            self.waiting[number] = Dialling(peer.address, to_peer, self.listener.key)
        except ConnectionError as error:
            raise _failed(self.request, str(error), [peer]) from error

    def _mention(self, peers: Sequence[Peer]) -> None:
        """Say it once if it takes long until these connect."""
        if not self.patience.is_long:
            return
        self.patience.mention(
            [Wait(peer.name, peer.address, self.patience.begun_s) for peer in peers],
            "The exchange of group %r in quorum %d is still waiting to connect to %s after %.0f s.",
            *(self.request.group, self.request.number),
        )

    def _moved(self, number: int, connection: Connection | None) -> None:
        if connection is None:
            return
        self.made[number] = connection
        del self.waiting[number]
        self.patience.moved()


def _failed(request: ConnectionRequest, why: str, peers: Sequence[Peer]) -> ExchangeFailed:
    return ExchangeFailed(
        f"Group {request.group!r} could not connect to all members of quorum {request.number}. {why}",
        tuple(peer.group for peer in peers),
    )


def _names(peers: Iterable[Peer]) -> str:
    return ", ".join(f"{peer.name} at {peer.address}" for peer in peers)
