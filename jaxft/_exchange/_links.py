"""The connections of one quorum: a full mesh among its members.

Each quorum gets connections of its own, and after a failure they are never used again: what may still be in
flight on one belongs to an exchange that nobody finishes.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxft._arrays._layout import Layout
from jaxft._exchange._mesh import Peer, connect_mesh
from jaxft._exchange._patience import Patience
from jaxft._exchange._plan import Plan
from jaxft._exchange._tree import Node
from jaxft._transport._listener import Abort, Connection, Hello, Listener


class Links:
    """This member's connections to all others of a quorum, and what is kept from one exchange to the next."""

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
    ) -> None:
        """Take over connections, given by the number of the member at the other end. See `open`."""
        assert set(connections) == set(range(len(members))) - {me}
        self.job = job
        self.quorum_id = quorum_id
        self.me = me
        self.members = tuple(members)
        self.connections = dict(connections)
        self.abort = abort
        self.closed = False
        # Where peers' chunks are received, by slot and node.
        self.scratch: dict[tuple[int, Node], np.ndarray] = {}
        self._plans: dict[tuple[str, int], Plan] = {}
        self._listener = listener
        for connection in self.connections.values():
            connection.sock.setblocking(False)

    @staticmethod
    def open(
        listener: Listener,
        *,
        job: str,
        quorum_id: int,
        me: str,
        members: Sequence[Peer],
        abort: Abort,
        patience: Patience,
    ) -> "Links":
        """Connect to every other member. Ends all older quorums at this listener.

        Args:
            listener: where lower members dial us.
            job: the job's name.
            quorum_id: the quorum; each of its members opens it, with the same members in the same order.
            me: our group's name, one of the members.
            members: all members, in the quorum's order.
            abort: a flag that ends the wait; the exchanges over these links watch it too.
            patience: when to give up.

        Raises:
            ExchangeFailed: names those that could not be reached; nobody, if the abort flag was set.
            JaxftError: the listener has ended with an error.
        """
        listener.check(len(members))
        number = [peer.group for peer in members].index(me)
        hello = Hello(
            "exchange", job, me, members[number].incarnation, "", 0, quorum_id
        )  # `_mesh.py` says to whom
        listener.forget(quorum_id - 1)
        try:
            connections = connect_mesh(
                listener, hello, me=number, members=members, abort=abort, patience=patience
            )
        except BaseException:
            listener.forget(quorum_id)  # members that still wait for us learn it at once
            raise
        return Links(
            job=job,
            quorum_id=quorum_id,
            me=number,
            members=members,
            connections=connections,
            abort=abort,
            listener=listener,
        )

    def plan(self, layout: Layout, total_shards: int) -> Plan:
        """The plan of an exchange over these links, made once for a layout."""
        key = (layout.digest, total_shards)
        if key not in self._plans:
            self._plans = {key: Plan.of(layout, [peer.shards for peer in self.members], total_shards)}
        return self._plans[key]

    def close(self) -> None:
        """Close every connection; peers in an exchange see it at once. Idempotent.

        Not for another thread while an exchange runs here: set the abort flag, and the exchange closes them.
        """
        self.closed = True
        for connection in self.connections.values():
            connection.close()
        self.scratch.clear()
        if self._listener is not None:
            self._listener.forget(self.quorum_id)
