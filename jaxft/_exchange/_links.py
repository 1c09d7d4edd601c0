"""The connections of one quorum, or of a row or column of a large one: a full mesh among its members.

Connections of the quorum before are used again where no exchange is under way at either end (`_continuing.py`). After
a failed exchange they are not: bytes still in flight belong to an exchange that will not finish.
"""

import contextlib
import logging
import select
import socket
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxft._arrays._layout import Layout
from jaxft._exchange._continuing import Kept
from jaxft._exchange._frames import Stamp, tag
from jaxft._exchange._mesh import Peer, connect_mesh
from jaxft._exchange._patience import Patience
from jaxft._exchange._plan import Plan
from jaxft._exchange._sheet import Sheet
from jaxft._exchange._tree import Node
from jaxft._transport._listener import Abort, Connection, ConnectionRequest, Listener
from jaxft._transport._sockets import SEND_FLAGS

_log = logging.getLogger("jaxft")


class Links:
    """This member's connections to all others of a quorum, and the memory and plan reused across its exchanges."""

    def __init__(
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
            connection.sock.setblocking(False)

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

        Waits for none: one that takes no bytes is left out, and one that is lost is noticed when it is used.
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


def open_all(
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
        me: our group's name, one of the members.
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
    # `_mesh.py` fills in the group and incarnation to dial.
    request = ConnectionRequest(
        "exchange", job, me, members[number].incarnation, "", 0, quorum_id, lane=lane, strand=strand
    )
    listener.forget(quorum_id - 1)
    stamps = [Stamp(n, tag(job), quorum_id, 0, 0) for n in range(len(members))]
    try:
        connections = connect_mesh(
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
    ended = {n: one.exchanges for n, one in kept.items() if one.connection is connections[n]}
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
