"""Where the members of a quorum meet to exchange. All must come; a member that goes breaks it for all that are not
done."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxft_protocol.messages import NewQuorum, QuorumId, Step
from jaxft_protocol.ranks.lanes import Span

from .lane import LANES, Lane, reached
from .setting import QUICK_S
from .truth import Violation

if TYPE_CHECKING:
    from .trainer import Trainer
    from .world import World

# How often a slow exchange is seen to move, and a stalled one looks whether time counts.
MOVES_EVERY_S = 0.1
# The lanes of a group of one process among others of one.
_ALL = Span(0, LANES)


@dataclass(eq=False, slots=True)
class Attempt:
    quorum: NewQuorum
    step: Step
    span: Span
    present: dict[str, "Trainer | Lane"] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    broken_by: str = ""
    tainted: frozenset[str] = frozenset()  # who had computed from a state with a flipped bit
    wrong: Violation | None = None  # of its sum when all had come

    @property
    def complete(self) -> bool:
        return len(self.present) == len(self.quorum.members)


class Hub:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.attempts: dict[tuple[QuorumId, Step], dict[Span, Attempt]] = {}

    def arrive(self, process: "Trainer | Lane", quorum: NewQuorum, step: Step, span: Span = _ALL) -> None:
        """`process` has computed its shards."""
        spans = self.attempts.setdefault((quorum.quorum_id, step), {})
        attempt = spans.get(span)
        if attempt is None or (attempt.quorum is not quorum and attempt.quorum != quorum):
            # A quorum whose id was given out again after all memory of it was lost is another one.
            attempt = spans[span] = Attempt(quorum, step, span)
        attempt.present[process.name] = process
        process.attempt = attempt
        gone = attempt.broken_by or self._gone(attempt)
        if gone:
            self._fail(attempt, process, gone)
        elif attempt.complete:
            self._exchange(attempt)
        else:
            self.waits(attempt, process)

    def waits(self, attempt: Attempt, process: "Trainer | Lane") -> None:
        """Others still compute: no time counts, and the coordinator finds out if a member hangs."""
        self._wait(attempt, process, process.token)

    def _wait(self, attempt: Attempt, process: "Trainer | Lane", token: int) -> None:
        if process.token != token or attempt.complete or process.name in attempt.finished:
            return
        if process.replica.all_computed == (attempt.quorum.quorum_id, attempt.step):
            timeout_s = process.clock.real(self.world.setting.exchange_timeout_s)
            self.world.after(timeout_s, self.time_out, attempt, process, token)
        else:
            self._check_goes_on(process)
            self.world.after(MOVES_EVERY_S, self._wait, attempt, process, token)

    def _check_goes_on(self, process: "Trainer | Lane") -> None:
        """The process learns when the quorum has ended, as it may be needed elsewhere."""
        setting = self.world.setting
        if setting.prompt and process.without_quorum_s() > 1.0 + setting.disk_s * 10:
            raise Violation(
                "no group waits forever", f"{process.name}, in the exchange of a quorum that is no more"
            )

    def leave(self, process: "Trainer | Lane") -> None:
        """`process` closes its links, or the kernel does so for it."""
        attempt, process.attempt = process.attempt, None
        if attempt is not None and process.name not in attempt.finished:
            if attempt.present.get(process.name) is process:
                self._break(attempt, process.name)

    def _exchange(self, attempt: Attempt) -> None:
        world, cables = self.world, self.world.cables
        present = attempt.present
        attempt.tainted = frozenset(name for name, each in present.items() if each.flipped)
        attempt.wrong = self._problem(attempt)
        for name, each in present.items():
            deaf_to = [source for source in present if cables.between and cables.link_is_cut(source, name)]
            if deaf_to:
                # The cable may have been cut without a word.
                if world.random() < 0.5:
                    self._stall(attempt, each, each.token, deaf_to[0])
                else:
                    self._fail(attempt, each, deaf_to[0])
            else:
                self._move(attempt, each, each.token, world.now_s + world.exchange_s * world.random())
        if world.setting.flaky and not world.calm and world.random() < world.setting.flaky:
            world.after(world.random() * QUICK_S, self._hiccup, attempt)

    def _move(self, attempt: Attempt, process: "Trainer | Lane", token: int, until_s: float) -> None:
        """Bytes move, for as long as the link needs."""
        process.progress += 1
        left_s = until_s - self.world.now_s
        if left_s <= MOVES_EVERY_S:
            self.world.after(max(0.0, left_s), process.run, token, self._finish, attempt, process)
        else:
            self.world.after(MOVES_EVERY_S, process.run, token, self._move, attempt, process, token, until_s)

    def _stall(self, attempt: Attempt, process: "Trainer | Lane", token: int, deaf_to: str) -> None:
        """Nothing comes from one peer. Time counts from when all are known to have computed."""
        if process.token != token or process.name in attempt.finished:
            return
        if process.replica.all_computed == (attempt.quorum.quorum_id, attempt.step):
            stall_s = process.clock.real(self.world.setting.exchange_timeout_s)
            self.world.after(stall_s, self._fail, attempt, process, deaf_to)
        else:
            self.world.after(MOVES_EVERY_S, self._stall, attempt, process, token, deaf_to)

    def _break(self, attempt: Attempt, name: str) -> None:
        if attempt.broken_by:
            return
        attempt.broken_by = name
        for other in list(attempt.present.values()):
            if other.name == name or other.name in attempt.finished:
                continue
            # It may have received all it needs already.
            if not attempt.complete or self.world.random() < 0.5:
                self._fail(attempt, other, name)

    def _hiccup(self, attempt: Attempt) -> None:
        """One member finds that its connection to another is broken."""
        unfinished = [p for name, p in attempt.present.items() if name not in attempt.finished]
        if len(unfinished) >= 2:
            one = unfinished.pop(int(self.world.random() * len(unfinished)))
            two = unfinished[int(self.world.random() * len(unfinished))]
            if self.world.tracing:
                self.world.note(f"{one.name} loses its connection to {two.name}")
            self._fail(attempt, one, two.name)

    def _finish(self, attempt: Attempt, process: "Trainer | Lane") -> None:
        if process.name in attempt.finished:
            return
        if attempt.wrong is not None:
            raise attempt.wrong
        attempt.finished.add(process.name)
        process.exchanged(attempt.quorum.quorum_id, attempt.step)

    def _fail(self, attempt: Attempt, process: "Trainer | Lane", accused: str) -> None:
        delay_s = self.world.random() * 0.004
        self.world.after(delay_s, process.run, process.token, self._failed, attempt, process, accused)

    def _failed(self, attempt: Attempt, process: "Trainer | Lane", accused: str) -> None:
        if process.name not in attempt.finished:
            attempt.finished.add(process.name)
            self._break(attempt, process.name)
            process.exchange_broke(attempt.quorum.quorum_id, attempt.step, accused)

    def time_out(self, attempt: Attempt, process: "Trainer | Lane", token: int) -> None:
        """Its patience with those who have not come is over."""
        if process.token != token or attempt.complete or process.name in attempt.finished:
            return
        missing = [member.group for member in attempt.quorum.members if member.group not in attempt.present]
        self._fail(attempt, process, missing[0])

    def _gone(self, attempt: Attempt) -> str:
        for member in attempt.quorum.members:
            crew = self.world.incarnations[member.incarnation].crew
            if crew.is_dead(reached(attempt.span, member.group, crew.size)):
                return member.group
        return ""

    def tainted(self, quorum_id: QuorumId, step: Step) -> frozenset[str]:
        """Who had computed from a state with a flipped bit."""
        spans = self.attempts.get((quorum_id, step), {})
        return frozenset[str]().union(*(attempt.tainted for attempt in spans.values()))

    def _problem(self, attempt: Attempt) -> Violation | None:
        """The fault of a sum, if it has one. When one group has it, others may have moved on."""
        try:
            self._check_the_sum(attempt)
        except Violation as violation:
            return violation
        return None

    def _check_the_sum(self, attempt: Attempt) -> None:
        """Each shard comes from its one owner, who has computed it from the job's state."""
        self.world.truth.check_alike(attempt.present.values())
        given: list[int] = []
        for member in attempt.quorum.members:
            process = attempt.present[member.group]
            if process.incarnation != member.incarnation:
                raise Violation("each shard counted once", f"{member.group} is another process")
            self.world.truth.check_state(process, attempt.step)
            contributed = process.contributes(attempt.step, member.shards)
            if set(contributed) != set(member.shards):
                text = f"{member.group} gives {contributed} for {member.shards}"
                raise Violation("each shard counted once", text)
            given += contributed
        if sorted(given) != list(range(attempt.quorum.total_shards)):
            raise Violation("each shard counted once", f"{given}")
