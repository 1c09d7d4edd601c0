"""The connections of one quorum, or of a row or column of a large one: a full mesh among its members.

Connections of the quorum before are used again where no exchange is under way at either end (`_continuing.py`). After
a failed exchange they are not: bytes still in flight belong to an exchange that will not finish.

Of two members, the first in the quorum's order dials, unless both go on with a connection of the quorum before. All
that runs at once, and then connections from earlier members are taken: one unresponsive member does not hide another,
and is the only one blamed.
"""

import contextlib
import functools
import logging
import select
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxft._arrays._layout import Layout
from jaxft._errors import ExchangeFailed
from jaxft._exchange._continuing import Continuing, Kept, NotContinued
from jaxft._exchange._frames import Stamp, tag
from jaxft._exchange._patience import Patience, Wait
from jaxft._exchange._plan import Plan
from jaxft._exchange._sheet import Sheet
from jaxft._exchange._tree import Node
from jaxft._transport._handshake import Dialling
from jaxft._transport._listener import Abort, Connection, ConnectionRequest, Listener
from jaxft._transport._sockets import SEND_FLAGS, Aborted, wait_any

_log = logging.getLogger("jaxft")


@dataclass(frozen=True, slots=True)
class Peer:
    """A member of a quorum, or its process with the same lanes as this process."""

    group: str
    incarnation: int
    address: str
    shards: tuple[int, ...]
    rank: int = 0
    ranks: int = 1

    @property
    def name(self) -> str:
        return f"group {self.group!r}" if self.ranks == 1 else f"rank {self.rank} of group {self.group!r}"


class Links:
    """This member's connections to all others of a quorum, and the memory and plan reused across its exchanges."""

    def __init__(  # noqa: PLR0913 (by name: a quorum, and one of its members)
        self,
        *,
        job: str,
        quorum_id: int,
        me: int,
        members: Sequence[Peer],
        connections: Mapping[int, Connection],
        abort: Abort,
        listener: Listener | None = None,
        ended: Mapping[int, int] | None = None,
        strand: int = 0,
    ) -> None:
        """Take ownership of connections, keyed by the member's number. See `open_all`."""
        assert set(connections) == set(range(len(members))) - {me}
        self.job = job
        self.quorum_id = quorum_id
        self.me = me
        self.members = tuple(members)
        self.connections = dict(connections)
        self.abort = abort
        self.strand = strand
        self.closed = False
        # How many exchanges have ended over each connection, in this quorum and those before.
        self._ended = dict.fromkeys(connections, 0) | dict(ended or {})
        # Receive buffers for peers' chunks, by slot and node.
        self.scratch: dict[tuple[int, Node], np.ndarray] = {}
        self._plans: dict[tuple[str, int, int], Plan] = {}
        self._sheets: dict[tuple[int, str], Sheet] = {}  # by the plan, which a sheet keeps, and the layout
        self._listener = listener
        for connection in self.connections.values():
            connection.sock.settimeout(0.0)

    def plan(self, layout: Layout, total_shards: int, strands: int = 1) -> Plan:
        """The plan of this strand of an exchange, cached: a step has one for each of its exchanges."""
        key = (layout.digest, total_shards, strands)
        if key not in self._plans:
            shards = [peer.shards for peer in self.members]
            self._plans[key] = Plan.of(layout, shards, total_shards, self.strand, strands)
        return self._plans[key]

    def sheet(self, plan: Plan, layout: Layout, total_shards: int) -> Sheet:
        """A plan for the compiled lane, cached as long as these links."""
        key = (id(plan), layout.digest)
        if key not in self._sheets:
            stamps = self.stamps(layout, 0)
            self._sheets[key] = Sheet(
                plan, layout, stamps, me=self.me, shards=total_shards, scratch=self.scratch
            )
        return self._sheets[key]

    def stamps(self, layout: Layout, step: int) -> list[Stamp]:
        """For each member, what its frames of one exchange share."""
        job, layout_tag = tag(self.job), tag(layout.digest)
        return [Stamp(n, job, self.quorum_id, step, layout_tag) for n in range(len(self.members))]

    def all_connections(self) -> list[Connection]:
        return list(self.connections.values())

    def tell(self, numbers: Iterable[int]) -> None:
        """Say to some members that bytes of a round move, where no exchange is about to send to them.

        Waits for none: a connection that takes no bytes is left out, and a lost connection is noticed in use.
        """
        header = self._progress_header(self.me)
        poller = select.poll()
        by_fd = {self.connections[number].sock.fileno(): self.connections[number] for number in numbers}
        for fd in by_fd:
            poller.register(fd, select.POLLOUT)
        for fd, event in poller.poll(0):
            if event != select.POLLOUT:
                continue
            connection = by_fd[fd]
            frame = header + connection.outgoing.tag(header, b"")
            try:
                sent = connection.sock.send(frame, SEND_FLAGS)
            except OSError:
                sent = 0
            if sent < len(frame):  # the peer could not make sense of another frame
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _progress_header(self, number: int) -> bytes:
        return Stamp(number, tag(self.job), self.quorum_id, 0, 0).progress_header()

    def exchange_ended(self) -> None:
        """Note that an exchange has ended here with all that belongs to it sent and received."""
        for number in self._ended:
            self._ended[number] += 1

    def give_up(self, members: Sequence[Peer]) -> dict[int, Kept]:
        """Return the connections to processes that are members of the next quorum too, by their numbers there.

        All others are closed, and so are these links.
        """
        if self.closed:
            return {}
        mine = {_process(peer): number for number, peer in enumerate(self.members)}
        pairs = [(number, mine.get(_process(peer))) for number, peer in enumerate(members)]
        given = {
            number: Kept(self.connections.pop(old), self._ended[old], self._progress_header(old))
            for number, old in pairs
            if old in self.connections
        }
        self.close()
        return given

    def close(self) -> None:
        """Close every connection; peers in an exchange notice at once. Idempotent.

        Do not call this while another thread runs an exchange: set the abort flag, and the exchange closes them.
        """
        self.closed = True
        for connection in self.connections.values():
            connection.close()
        self.scratch.clear()
        self._sheets.clear()
        if self._listener is not None:
            self._listener.forget(self.quorum_id)


def open_all(  # noqa: PLR0913 (by name: a quorum, and one of its members)
    listener: Listener,
    parts: Sequence[Sequence[int]],
    *,
    job: str,
    quorum_id: int,
    me: str,
    members: Sequence[Peer],
    abort: Abort,
    patience: Patience,
    lane: int,
    strand: int,
    before: Sequence[Links],
) -> list[Links]:
    """Connect to several parts of a quorum at once, each of which this member belongs to: links for each of them.

    Ends all older quorums at this listener.

    Args:
        listener: where members before us in the order dial us.
        parts: the numbers of the members of each part. No other member is in two of them.
        job: the job's name.
        quorum_id: the quorum; each of its members opens it, with the same members in the same order.
        me: our group's name, among the members.
        members: all members, in the quorum's order.
        abort: a flag that ends the wait; the exchanges over these links watch it too.
        patience: the limit on a time without progress.
        lane: the first of the lanes that are exchanged over these links.
        strand: the strand of their exchanges that travels over these links.
        before: older links for the same lanes and strand. Their connections are used again or closed.

    Raises:
        ExchangeFailed: names the members that could not be reached; none, if the abort flag was set.
        JaxftError: the listener failed.
    """
    number = [peer.group for peer in members].index(me)
    wanted = {each for part in parts for each in part} - {number}
    listener.check(len(wanted))
    kept: dict[int, Kept] = {}
    for links in before:
        kept |= links.give_up(members)
    for other in kept.keys() - wanted:
        kept.pop(other).connection.close()
    # `_Mesh` fills in the group and incarnation to dial.
    request = ConnectionRequest(
        "exchange", job, me, members[number].incarnation, "", 0, quorum_id, lane=lane, strand=strand
    )
    listener.forget(quorum_id - 1)
    stamps = [Stamp(n, tag(job), quorum_id, 0, 0) for n in range(len(members))]
    try:
        connections = _connected(
            listener,
            request,
            me=number,
            members=members,
            wanted=wanted,
            kept=kept,
            stamps=stamps,
            abort=abort,
            patience=patience,
        )
    except BaseException:
        listener.forget(quorum_id)  # wake members that still wait for us
        raise
    ended = {n: old.exchanges for n, old in kept.items() if old.connection is connections[n]}
    _log.debug("quorum %d: %d of %d connections kept", quorum_id, len(ended), len(connections))
    made: list[Links] = []
    for part in parts:
        numbers = list(part)
        made.append(
            Links(
                job=job,
                quorum_id=quorum_id,
                me=numbers.index(number),
                members=[members[each] for each in numbers],
                connections={at: connections[each] for at, each in enumerate(numbers) if each != number},
                abort=abort,
                listener=listener,
                ended={at: ended[each] for at, each in enumerate(numbers) if each in ended},
                strand=strand,
            )
        )
    return made


def _process(peer: Peer) -> tuple[str, int, int, str]:
    """One life of one process. Its shards may change from quorum to quorum."""
    return peer.group, peer.incarnation, peer.rank, peer.address


def _connected(  # noqa: PLR0913 (by name: a quorum, and one of its members)
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
    """Connect to other members; return the connections by the members' numbers. Raises ExchangeFailed."""
    mesh = _Mesh(listener, request, me, members, sorted(wanted), abort, patience)
    try:
        mesh.begin(kept, stamps)
        while mesh.waiting:
            mesh.advance()
        mesh.take_lower()
    except BaseException:
        for connection in [*mesh.made.values(), *(old.connection for old in kept.values())]:
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
        """Dial later members, and offer to continue with the connections that there are."""
        for number, old in kept.items():
            mine, theirs = (stamps[end].header_to_continue(old.exchanges) for end in (self.me, number))
            with contextlib.suppress(NotContinued):
                self.waiting[number] = Continuing(old.connection, mine, theirs, old.progress)
        self._dial(number for number in self.wanted if number not in self.waiting)

    def advance(self) -> None:
        """Wait for any of them to progress."""
        sources = {dialled.sock.fileno(): dialled.events for dialled in self.waiting.values()}
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
        for number, dialled in list(self.waiting.items()):
            if dialled.sock.fileno() not in ready:
                continue
            try:
                connection = dialled.advance()
            except NotContinued:
                del self.waiting[number]
                self.patience.moved()  # the peer has refused, or closed: it lives, and needs time to connect again
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
