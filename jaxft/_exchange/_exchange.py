"""The exchange: an all-reduce over a quorum. It ends for every member with the means and sums, or with an error.

Theory of operation. The exchange is a reduce-scatter and an all-gather, overlapped chunk by chunk. The plan
(`_plan.py`) makes each member the reducer of one slice of every region. For each chunk of its slice, a reducer
receives the other members' partial sums, combines all nodes in the order of the tree, and sends the result to all.
While it sums one chunk, the kernel sends and receives others. One thread does all this around one poll; sockets never
block; payloads go from the memory of the partial sums straight into the receiver's scratch memory or result.

    partial sums of slice j   --->  reducer j: combine chunk by chunk  --->  results of slice j, to all

A sender never delays partial sums, and a receiver always has a buffer for results. A receiver may pause a peer that
runs ahead (scratch memory holds a small window of chunks); it then waits for a peer that is behind, which is not
paused. So members cannot deadlock.

Invariants:
- Contributions are only read.
- A frame is accepted only if its header is the expected one (`_frames.py`).
- On any error all connections of the quorum are closed, so every member's exchange ends too. A finished exchange
  says nothing about the other members: the vote decides whether the step counts.

Who is blamed. An end of file does not show who died, since the others close in a cascade; all peers that are seen
failing at that moment are named. When no bytes move, the peers that owe partial sums are named, since they could send
them without help; if there are none, all peers that owe anything. A peer that owes partial sums and exchanges no
bytes with us is named even while bytes move to and from others.

The exchange as a whole has no deadline: `_patience.py` says when time counts.
"""

import logging
import math
import select
import time
from collections.abc import Iterable, Iterator

import numpy as np

from jaxft._arrays._layout import Layout
from jaxft._arrays._memory import leaves_of
from jaxft._errors import ExchangeFailed
from jaxft._exchange._channel import Channel, Frame
from jaxft._exchange._frames import Stamp, tag
from jaxft._exchange._links import Links
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import LOOK_S, Patience
from jaxft._exchange._plan import Planned, partials_to, results_from
from jaxft._exchange._reducer import Reducer
from jaxft._transport._sockets import SLOW_WAIT_S

_log = logging.getLogger("jaxft")

_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def exchange(
    links: Links,
    *,
    layout: Layout,
    step: int,
    partials: Partials,
    total_shards: int,
    patience: Patience,
) -> list[np.ndarray]:
    """Average or sum the contributions of all members of a quorum.

    Args:
        links: the quorum's connections. Closed if this raises.
        layout: the layout of the leaves, the same at every member.
        step: the step that the contributions are for.
        partials: what this member contributes: exactly its shards of the quorum. Only read.
        total_shards: the number of all shards of the step.
        patience: the limit on a time without progress.

    Returns:
        The means and sums, in the order of the leaves, in fresh memory. The bits do not depend on the members.

    Raises:
        ExchangeFailed: names the peers that were seen to fail; none, if the abort flag was set.
    """
    plan = links.plan(layout, total_shards)
    if partials.nodes != plan.nodes[links.me] or partials.shards != total_shards:
        raise ValueError(
            f"Group {links.members[links.me].group!r} holds the nodes {partials.nodes} of {partials.shards} shards, "
            f"but its shards in quorum {links.quorum_id} are the nodes {plan.nodes[links.me]} of {total_shards}."
        )
    if len(links.members) == 1:
        return partials.mean_alone()
    if links.closed:
        raise ExchangeFailed(
            f"The connections of quorum {links.quorum_id} are closed. The step needs a new quorum."
        )
    try:
        run = _Run(links, layout, step, partials, patience)
        run.until_done()
    except BaseException:
        links.close()
        raise
    return leaves_of(layout, run.reducer.result)


class _Run:
    """One exchange, from the first byte to the last."""

    def __init__(
        self, links: Links, layout: Layout, step: int, partials: Partials, patience: Patience
    ) -> None:
        plan = links.plan(layout, partials.shards)
        job, layout_tag = tag(links.job), tag(layout.digest)
        stamps = [
            Stamp(number, job, links.quorum_id, step, layout_tag) for number in range(len(links.members))
        ]
        self.reducer = Reducer(plan, me=links.me, layout=layout, partials=partials, scratch=links.scratch)
        self._links = links
        self._step = step
        self._results = results_from(stamp=stamps[links.me], plan=plan, layout=layout)
        self._channels = {
            number: Channel(
                connection,
                outgoing=self._outgoing(
                    partials_to(number, stamp=stamps[links.me], plan=plan, layout=layout)
                ),
                partials=partials_to(links.me, stamp=stamps[number], plan=plan, layout=layout),
                results=results_from(stamp=stamps[number], plan=plan, layout=layout),
                buffer_for=self.reducer.buffer_for,
                arrived=self.reducer.arrived,
            )
            for number, connection in links.connections.items()
        }
        self._by_fd = {channel.sock.fileno(): number for number, channel in self._channels.items()}
        self._poller = select.poll()
        self._poller.register(links.abort, select.POLLIN)
        self._watched: dict[int, int] = {}  # poll events by descriptor, where there are any
        self._patience = patience
        self._begun_s = time.monotonic()
        self._moved_s = dict.fromkeys(self._channels, self._begun_s)  # when bytes last moved, by peer
        self._checks_s = self._begun_s
        self._slow_s = SLOW_WAIT_S

    def until_done(self) -> None:
        while True:
            if self.reducer.can_combine:
                self._combine()
            self._watch()
            if self.reducer.done and not self._watched:
                return
            timeout_s = 0.0 if self.reducer.can_combine else min(self._patience.look_s, self._slow_s)
            events = self._poller.poll(1000 * timeout_s)
            if self._links.abort.is_set:
                raise self._failed((), f"was aborted: {self._links.abort.reason}")
            if sum(self._serve(self._by_fd[fd], event) for fd, event in events):
                self._patience.moved()
            self._check_time()

    def _outgoing(self, planned: Iterable[Planned]) -> Iterator[Frame]:
        for frame in planned:
            assert frame.node is not None
            payload = self.reducer.partial_bytes(frame.chunk, frame.node)
            assert payload.nbytes == frame.length_bytes
            yield frame.header, payload

    def _combine(self) -> None:
        number = self.reducer.combine()
        for peer, channel in self._channels.items():
            if channel.paused:
                channel.resume()
                self._moved_s[peer] = time.monotonic()  # we paused it, so it is not late
            if self._results:
                frame = self._results[number]
                channel.push((frame.header, self.reducer.result_bytes(frame.chunk)))

    def _watch(self) -> None:
        """Poll each connection for what its channel can do next, and stop polling it when it is done."""
        for channel in self._channels.values():
            events = select.POLLOUT if channel.sending else 0
            if channel.paused:
                events |= select.POLLRDHUP  # no buffer for its bytes, but notice a disconnect
            elif channel.receiving:
                events |= select.POLLIN
            fd = channel.sock.fileno()
            if events == self._watched.get(fd, 0):
                continue
            if events:
                self._poller.register(fd, events)
                self._watched[fd] = events
            else:
                self._poller.unregister(fd)
                del self._watched[fd]

    def _serve(self, number: int, event: int) -> int:
        channel = self._channels[number]
        moved_bytes = 0
        try:
            if channel.receiving and event & ~select.POLLOUT:
                moved_bytes += channel.receive()
            if channel.sending and event & ~select.POLLIN:
                moved_bytes += channel.send()
        except OSError as error:
            raise self._lost(number, error.strerror or str(error)) from error
        if moved_bytes:
            self._moved_s[number] = time.monotonic()
        return moved_bytes

    def _check_time(self) -> None:
        still_s = self._patience.still_s
        late = self._owing() if self._patience.is_over else self._silent()
        if late:
            still_s = max(still_s, self._patience.timeout_s)
            raise self._failed(late, f"made no progress for {still_s:.1f} s, waiting for {self._names(late)}")
        if still_s < min(self._slow_s, SLOW_WAIT_S):
            self._slow_s = SLOW_WAIT_S
        elif still_s >= self._slow_s:
            self._slow_s = math.inf
            _log.warning(
                "The exchange of step %d in quorum %d is still waiting for %s after %.0f s.",
                self._step,
                self._links.quorum_id,
                self._names(self._owing()),
                still_s,
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
        return [
            number
            for number, channel in self._channels.items()
            if channel.owes_partials and self._moved_s[number] <= least_s
        ]

    def _owing(self) -> list[int]:
        """The peers this member waits for: those that need no help to go on, or else all that are unfinished."""
        owing = [number for number, channel in self._channels.items() if channel.owes_partials]
        return owing or [number for fd, number in self._by_fd.items() if fd in self._watched]

    def _lost(self, number: int, why: str) -> ExchangeFailed:
        """One connection failed. Any other peer that is failing at this moment may be the cause as well."""
        reasons = {number: why}
        poller = select.poll()
        for fd in self._watched:
            poller.register(fd, select.POLLRDHUP)
        for fd, _ in poller.poll(0):
            reasons.setdefault(self._by_fd[fd], "closed the connection")
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
        return ", ".join(f"group {peer.group!r} ({peer.address})" for peer in peers)
