"""What one rank of a group does in an operation: its part, and the lanes in which it meets other groups.

There are twelve lanes: a group of 1, 2, 3 or 4 ranks holds each of them whole in one rank, and what lies in one rank
in every member travels together, as a span.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxft_protocol.messages import QuorumId, Step
from jaxft_protocol.ranks import lanes
from jaxft_protocol.ranks.lanes import Span
from jaxft_protocol.ranks.messages import Verdict

from .truth import Violation

if TYPE_CHECKING:
    from .exchange import Attempt
    from .ranks import Crew

LANES = 12
OWN_LANES = "each lane meets itself"


def held(rank: int, size: int) -> range:
    """The lanes that lie in the memory of one rank of a group of this size."""
    each = LANES // size
    return range(each * rank, each * (rank + 1))


def reached(span: Span, name: str, size: int) -> int:
    """The rank of a group that is asked for the lanes of a span."""
    rank = lanes.rank_of(span.start, size, LANES)
    if not set(range(span.start, span.stop)) <= set(held(rank, size)):
        raise Violation(OWN_LANES, f"rank {rank} of {name} is asked for {span}, and holds {held(rank, size)}")
    return rank


class Part:
    """What one rank does alone in an operation: it ends once, by itself or because it is stopped."""

    def __init__(self, ends: Callable[[Verdict], None]) -> None:
        self._ends = ends
        self.lanes: list[Lane] = []
        self.holds_all: Callable[[], None] = lambda: None  # called once all lanes are done
        self.over = False

    def end(self, verdict: Verdict) -> None:
        if self.over:
            return
        self.over = True
        for lane in self.lanes:
            lane.leave()
        self._ends(verdict)

    def lane_done(self, lane: "Lane") -> None:
        lane.done = True
        if all(each.done for each in self.lanes):
            self.holds_all()
            self.end(Verdict())


class Lane:
    """One rank's part in the exchange of one span, as `Hub` sees a member."""

    def __init__(self, crew: "Crew", rank: int, span: Span, part: Part) -> None:
        self.crew = crew
        self.world = crew.world
        self.process = crew.process
        self.rank = rank
        self.span = span
        self.token = 0
        self.attempt: Attempt | None = None
        self.done = False
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.process, name)  # the same for all ranks of the group

    @property
    def history(self) -> list[QuorumId]:
        return self.crew.history_of(self.rank)

    @property
    def dead(self) -> bool:
        return self.crew.is_dead(self.rank)

    @property
    def progress(self) -> int:
        return self.crew.progress_of(self.rank)

    @progress.setter
    def progress(self, _value: int) -> None:
        self.crew.moved(self.rank)

    def run(self, token: int, act: Callable[..., None], *args: Any) -> None:
        if self.token == token and not self.dead:
            self.crew.thread(self.rank, lambda: self.token == token and act(*args))

    def leave(self) -> None:
        self.token += 1
        self.world.hub.leave(self)

    def exchanged(self, _quorum_id: QuorumId, _step: Step) -> None:
        self._part.lane_done(self)

    def exchange_broke(self, _quorum_id: QuorumId, _step: Step, accused: str) -> None:
        self._part.end(Verdict(f"{accused} went away", (accused,)))
