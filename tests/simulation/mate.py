"""A rank of a group other than 0: the real core, its own training thread, and its own part of the state."""

from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxft_protocol.messages import NewQuorum, QuorumId, Step
from jaxft_protocol.ranks import follower, leader
from jaxft_protocol.ranks.messages import Decided, Directed, Judged, Order, StopWork, Verdict
from jaxft_protocol.replica import state as r

from .lane import Part
from .truth import Violation

if TYPE_CHECKING:
    from .ranks import Crew

_BEAT_S = 0.3
_ONE_STATE = "the ranks of a group hold one state"


@dataclass(frozen=True, slots=True)
class Take:
    """Wait for rank 0's next order."""

    kind: type[Directed] | type[Decided] | type[Judged]
    about: str = ""


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Together:
    """Enter a collective; go on when all ranks have."""

    what: object
    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """Do this rank's part of an operation; go on with its verdict."""

    start: Callable[[Part], None]


Request: TypeAlias = Take | Sleep | Together | Work
Program: TypeAlias = Generator[Request, Any, Any]


class Mate:
    """A rank other than 0."""

    def __init__(self, crew: "Crew", rank: int) -> None:
        self.crew = crew
        self.world = crew.world
        self.process = crew.process
        self.rank = rank
        self.name = f"{crew.process.name}.{rank}"
        self.core = follower.Follower(rank)
        self.dead = False
        self.root = crew.process.root
        self.history: list[QuorumId] = []
        self.computed: defaultdict[int, set[int]] = defaultdict(set)
        self.sums: set[tuple[QuorumId, Step]] = set()
        self.pins: dict[int, Step] = {}
        self.log: dict[int, QuorumId] = {}
        self.fetched: tuple[int, list[QuorumId]] = (0, [])  # the root, and the steps applied to it
        self.found = QuorumId(0)
        self.progress = 0
        self.stands_until_s = 0.0
        self.part: Part | None = None
        self._takes: Take | None = None
        self._program: Program = self._run()

    def start(self) -> None:
        self._resume(None)
        self._beat()

    # ---- its links ----

    def hears(self, message: Order | StopWork) -> None:
        """The thread that receives."""
        if not self.dead:
            self._happened(follower.Heard(message))
            self._look()

    def pin(self, heal_id: int, number: Step) -> None:
        if self.dead:
            return
        if number < len(self.history):
            raise Violation(
                "a pin comes before the commit", f"{self.name} at {len(self.history)}: pin {number}"
            )
        self.pins[heal_id] = number

    def release(self, heal_id: int) -> None:
        self.pins.pop(heal_id, None)
        oldest = min(self.pins.values(), default=None)
        self.log = {step: by for step, by in self.log.items() if oldest is not None and step >= oldest}

    def die(self) -> None:
        if not self.dead:
            self.dead = True
            if self.part is not None:
                for lane in self.part.lanes:
                    lane.leave()

    def _beat(self) -> None:
        if not self.dead:
            self.crew.to_leader(leader.Moved(self.rank, self.progress))
            self.world.after(_BEAT_S, self._beat)

    def _happened(self, event: follower.Event) -> None:
        self.core, effects = follower.step(self.core, event)
        for effect in effects:
            match effect:
                case follower.Report(outcome):
                    self.crew.to_leader(leader.Reported(self.rank, outcome))
                case follower.Interrupt() if self.part is not None:
                    self.part.end(Verdict("rank 0 stopped it"))
                case follower.Interrupt():
                    pass

    # ---- its training thread ----

    def _resume(self, value: Any) -> None:
        try:
            request = self._program.send(value)
        except StopIteration:
            self.dead = True
            return
        match request:
            case Take():
                self._takes = request
                self._look()
            case Sleep(seconds):
                self.world.after(seconds, self.crew.thread, self.rank, lambda: self._resume(None))
            case Together(what, seconds):
                self.world.after(seconds, self.crew.thread, self.rank, lambda: self._meet(what))
            case Work(start):
                self.part = Part(self._part_ended)
                start(self.part)

    def _meet(self, what: object) -> None:
        self.crew.meet(self.rank, what, lambda: self._resume(None))

    def _part_ended(self, verdict: Verdict) -> None:
        self.part = None
        self.world.after(0.0, self.crew.thread, self.rank, lambda: self._resume(verdict))

    def _look(self) -> None:
        if self._takes is not None:
            self.crew.thread(self.rank, self._take)

    def _take(self) -> None:
        takes = self._takes
        if takes is None:
            return
        self.core, order = follower.take(self.core, takes.kind, takes.about)
        if order is not None:
            self._takes = None
            self._resume(order)

    def _run(self) -> Program:
        while True:
            order = yield Take(Directed)
            match order.directive:
                case None:
                    self._check_alike()
                    return
                case r.Attempt(quorum, step):
                    yield from self._attempt(quorum, step)
                case r.Apply(quorum_id, step):
                    self._check_may_apply(quorum_id, step)
                    yield Sleep(self.crew.apply_s())
                    self._apply(quorum_id)
                case r.HealFrom(heal):
                    verdict = yield from self._operation(
                        "heal", lambda part: self.crew.seek_state(self.rank, heal, part)
                    )
                    if verdict.ok:
                        yield Sleep(self.crew.apply_s())
                        self.root, self.history = self.fetched
                case r.Replay(heal, step):
                    verdict = yield from self._operation(
                        "replay", lambda part, step=step: self.crew.seek_means(self.rank, heal, step, part)
                    )
                    if verdict.ok:
                        yield Sleep(self.crew.apply_s())
                        self._apply(self.found)
                case _:
                    pass  # TakeDigest

    def _attempt(self, quorum: NewQuorum, step: Step) -> Program:
        self._check_alike(step)
        for shard in self.crew.shards_in(quorum):
            if shard not in self.computed[step]:
                if not (yield Take(Decided, "go on")).value:
                    return
                yield Together(("compute", step, shard), self.crew.compute_s())
                self.computed[step].add(shard)
        if not (yield Take(Decided, "exchange")).value:
            return
        yield from self._operation(
            "exchange", lambda part: self.crew.exchange_lanes(self.rank, quorum, step, part)
        )

    def _operation(self, what: str, start: Callable[[Part], None]) -> Program:
        verdict = yield Work(lambda part: self._begin(what, start, part))
        self._happened(follower.Done(verdict))
        judged = yield Take(Judged, self.core.what)
        self._happened(follower.Leaves())
        return judged.verdict

    def _begin(self, what: str, start: Callable[[Part], None], part: Part) -> None:
        self._happened(follower.Begins(what))
        if part.over:
            self.world.sometimes.note("stopped before it began")
        else:
            start(part)

    def _check_may_apply(self, quorum_id: QuorumId, step: Step) -> None:
        if step != len(self.history):
            raise Violation(
                "nothing is applied twice", f"{self.name} at {len(self.history)} is to apply {step}"
            )
        if (quorum_id, step) not in self.sums:
            raise Violation("commit only what all who live hold", f"{self.name}: step {step} of {quorum_id}")

    def _apply(self, quorum_id: QuorumId) -> None:
        self.world.truth.check_line(self.name, self.history, quorum_id)
        if self.pins:
            self.log[len(self.history)] = quorum_id
        self.history.append(quorum_id)

    def _check_alike(self, step: int | None = None) -> None:
        ours = self.crew.process.history[:step]
        if (self.history, self.root) != (ours, self.crew.process.root):
            raise Violation(_ONE_STATE, f"{self.name} holds {self.history}, rank 0 {ours}")
