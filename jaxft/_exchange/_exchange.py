"""The exchange: an all-reduce over a quorum. It ends for every member with the means and sums, or with an error.

In a large quorum an exchange is a part of three rounds, over a row or a column (`_grid.py`).

Theory of operation. The exchange is a reduce-scatter and an all-gather, overlapped chunk by chunk. The plan
(`_plan.py`) makes each member the reducer of one slice of every region. For each chunk of its slice, a reducer
receives the other members' partial sums, combines all nodes in the order of the tree, and sends the result to all.
While it sums one chunk, the kernel sends and receives others. One thread does all this around one poll, or one for
each strand of a large exchange (`_spans.py`); sockets never block; payloads go from the memory of the partial sums
straight into the receiver's scratch memory or result.

    partial sums of slice j   --->  reducer j: combine chunk by chunk  --->  results of slice j, to all

A sender never delays partial sums, and a receiver always has a buffer for results. A receiver may pause a peer that
runs ahead (scratch memory holds a small window of chunks); it then waits for a peer that is behind, which is not
paused. So members cannot deadlock.

What moves the bytes and sums them is a *lane*: in C where that was built (`_compiled_lane.py`), in Python where not
(`_python_lane.py`). The frames and the bits are the same. This module decides: it watches the abort flag and the
time, and names who is to blame.

Invariants:
- Contributions are only read.
- A frame is accepted only if its header is the expected one (`_frames.py`).
- On any error all connections of the quorum are closed, so every member's exchange ends too. A finished exchange
  shows nothing about the other members: the vote decides whether the step counts. They may not have read
  all of it, so connections are only used in the next quorum where as many have ended at both ends.

Who is blamed. An end of file does not show who died, since the others close in a cascade; all peers that are seen
failing at that moment are named. When no bytes move, the peers that owe partial sums are named, since they could send
them without help; if there are none, all peers that owe anything. A peer that owes partial sums and exchanges no
bytes with us is named even while bytes move to and from others.

The exchange as a whole has no deadline: `_patience.py` tells when time counts.
"""

import logging
import select
import time
from collections.abc import Callable, Iterable

from jaxft._errors import ExchangeFailed
from jaxft._exchange import _compiled
from jaxft._exchange._compiled_lane import CompiledLane
from jaxft._exchange._links import Links
from jaxft._exchange._patience import LOOK_S, Patience, Wait
from jaxft._exchange._plan import Lane, PeerLost, Task, Turn
from jaxft._exchange._python_lane import PythonLane
from jaxft._exchange._reduce import usual_floats

_log = logging.getLogger("jaxft")


def exchange_into(
    links: Links,
    task: Task,
    total_shards: int,
    patience: Patience,
    tell: Callable[[Lane], None] = lambda _: None,
) -> None:
    """Carry out a task: average or sum the contributions of all members of a quorum.

    The bits of the result do not depend on the members.

    Args:
        links: the quorum's connections for this strand. Closed if this raises.
        task: the exchange, or one strand of it.
        total_shards: the number of all shards of the step.
        patience: the limit on a time without progress.
        tell: called now and then while bytes move.

    Raises:
        ExchangeFailed: names the peers that were seen to fail; none, if the abort flag was set.
    """
    plan, partials = task.plan or links.plan(task.layout, total_shards, task.strands), task.partials
    if partials.nodes != plan.nodes[links.me] or partials.shards != total_shards:
        raise ValueError(
            f"Group {links.members[links.me].group!r} holds the nodes {partials.nodes} of {partials.shards} shards, "
            f"but its shards in quorum {links.quorum_id} are the nodes {plan.nodes[links.me]} of {total_shards}."
        )
    if len(links.members) == 1:
        partials.mean_into(task.result)
        return
    if links.closed:
        raise ExchangeFailed(
            f"The connections of quorum {links.quorum_id} are closed. The step needs a new quorum."
        )
    try:
        with usual_floats():
            _carry_out(links, task, patience, tell)
    except BaseException:
        links.close()
        raise
    links.exchange_ended()


def _carry_out(links: Links, task: Task, patience: Patience, tell: Callable[[Lane], None]) -> None:
    library = _compiled.library()
    lane: Lane = PythonLane(links, task) if library is None else CompiledLane(library, links, task)
    try:
        _Run(links, lane, task.step, patience, tell).until_done()
    finally:
        lane.close()


class _Run:
    """One exchange, from the first byte to the last: looks after the abort flag, the time, and who is to blame."""

    def __init__(
        self, links: Links, lane: Lane, step: int, patience: Patience, tell: Callable[[Lane], None]
    ) -> None:
        self._links = links
        self._lane = lane
        self._step = step
        self._patience = patience
        self._tell = tell
        self._begun_s = time.monotonic()
        self._checks_s = self._begun_s

    def until_done(self) -> None:
        while True:
            try:
                turn = self._lane.turn(self._patience.look_s)
            except PeerLost as lost:
                raise self._lost(lost.number, lost.why) from lost.__cause__
            if turn is Turn.DONE:
                return
            if self._links.abort.is_set:
                raise self._failed((), f"was aborted: {self._links.abort.reason}")
            if turn is Turn.MOVED:
                self._patience.moved()
                self._tell(self._lane)
            self._check_time()

    def _check_time(self) -> None:
        late = self._owing() if self._patience.is_over else self._silent()
        if late:
            still_s = max(self._patience.still_s, self._patience.timeout_s)
            raise self._failed(late, f"made no progress for {still_s:.1f} s, waiting for {self._names(late)}")
        if self._patience.is_long:
            self._mention()

    def _mention(self) -> None:
        """Say which peers have exchanged no bytes with us for long, or that the exchange is slow but moves."""
        owing = self._owing()
        waits = [(self._links.members[number], self._lane.moved_s(number)) for number in owing]
        self._patience.mention(
            [Wait(peer.name, peer.address, moved_s) for peer, moved_s in waits],
            "The exchange of step %d in quorum %d is still waiting for %s after %.0f s.",
            *(self._step, self._links.quorum_id),
        )
        self._patience.mention_slow(
            "The exchange of step %d in quorum %d takes long: %.0f s so far.",
            *(self._step, self._links.quorum_id),
            names=lambda: self._names(owing),
        )

    def _silent(self) -> list[int]:
        """Peers that could send partial sums and do not, while bytes move to and from others."""
        now_s = time.monotonic()
        if now_s < self._checks_s:
            return []
        self._checks_s = now_s + LOOK_S
        least_s = now_s - self._patience.timeout_s
        if self._patience.since_s > least_s:
            return []
        return [number for number in self._lane.owing() if self._lane.moved_s(number) <= least_s]

    def _owing(self) -> list[int]:
        """The peers this member waits for: those that need no help to continue, or else all that are unfinished."""
        return self._lane.owing() or self._lane.unfinished()

    def _lost(self, number: int, why: str) -> ExchangeFailed:
        """One connection failed. Any other peer that is failing at this moment may be the cause as well."""
        reasons = {number: why}
        poller = select.poll()
        by_fd = {self._links.connections[peer].sock.fileno(): peer for peer in self._lane.unfinished()}
        for fd in by_fd:
            poller.register(fd, select.POLLRDHUP)
        for fd, _ in poller.poll(0):
            reasons.setdefault(by_fd[fd], "closed the connection")
        text = "; ".join(f"{self._names([number])} {why}" for number, why in reasons.items())
        return self._failed(reasons, f"lost a peer: {text}")

    def _failed(self, numbers: Iterable[int], why: str) -> ExchangeFailed:
        elapsed_s = time.monotonic() - self._begun_s
        peers = tuple(self._links.members[number].group for number in numbers)
        return ExchangeFailed(
            f"The exchange of step {self._step} in quorum {self._links.quorum_id} {why} ({elapsed_s:.3f} s after "
            "it began). Contributions are kept, and the step is retried under the next quorum.",
            peers,
        )

    def _names(self, numbers: Iterable[int]) -> str:
        peers = (self._links.members[number] for number in numbers)
        return ", ".join(f"{peer.name} ({peer.address})" for peer in peers)
