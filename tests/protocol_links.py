"""What lies between the parts of `protocol_world.py`: streams to the coordinator, and exchanges among groups."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxft_coordinator.core.job import GroupSaid, SessionClosed, SessionId
from jaxft_coordinator.core.messages import CoordinatorMessage, GroupMessage, NewQuorum, QuorumId, Step

from jaxft._replica import _types as r

if TYPE_CHECKING:
    from protocol_process import Process
    from protocol_world import World

EXCHANGE_TIMEOUT_S = 1.5
KEEPALIVE_S = 2.0  # after this a group finds that its stream is dead, though nobody told it


class Gate:
    """Lets acts through in the order in which they come; while it is shut they wait."""

    def __init__(self, world: "World") -> None:
        self.shut_until_s = 0.0
        self._world = world
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def is_shut(self) -> bool:
        return self._world.now_s < self.shut_until_s

    def shut(self, seconds: float) -> None:
        self.shut_until_s = max(self.shut_until_s, self._world.now_s + seconds)

    def let(self, act: Callable[[], None]) -> None:
        self._waiting.append(act)
        if len(self._waiting) == 1:
            self._open()

    def _open(self) -> None:
        while self._waiting:
            if self.is_shut:
                self._world.at(self.shut_until_s, self._open)
                return
            self._waiting[0]()
            self._waiting.popleft()


class Stream:
    """One stream, two ordered directions. A break cuts each of them at a moment of its own."""

    def __init__(self, world: "World", process: "Process") -> None:
        self.world = world
        self.process = process
        self.id = SessionId(len(world.coordinator.streams) + 1)
        self._last_up_s = self._last_down_s = world.now_s
        self._up_ends_s = self._down_ends_s = float("inf")
        self.broken = False
        world.coordinator.streams[self.id] = self

    def up(self, message: GroupMessage) -> None:
        coordinator = self.world.coordinator
        self._last_up_s = self._carry(
            self._last_up_s,
            lambda: self._up_ends_s,
            lambda: coordinator.gate.let(lambda: coordinator.handle(GroupSaid(self.id, message))),
        )

    def down(self, message: CoordinatorMessage) -> None:
        self._last_down_s = self._carry(
            self._last_down_s,
            lambda: self._down_ends_s,
            lambda: self.process.from_stream(self, r.Heard(message)),
        )

    def end_down(self) -> None:
        """The coordinator ends the stream after what it has said."""
        self._last_down_s = self._carry(
            self._last_down_s,
            lambda: self._down_ends_s,
            lambda: self._group_sees("the coordinator ended the session"),
        )

    def break_off(self, told: str) -> None:
        """Cut both directions; "both" ends notice at once, or only the "group", or only the "coordinator"."""
        if self.broken:
            return
        self.broken = True
        self._up_ends_s = self.world.now_s + self.world.rng.uniform(0.0, 0.004)
        self._down_ends_s = self.world.now_s + self.world.rng.uniform(0.0, 0.004)
        if told in ("both", "coordinator"):
            self.world.at(self._up_ends_s, self._coordinator_sees)
        late_s = 0.0 if told in ("both", "group") else KEEPALIVE_S
        self.world.at(self._down_ends_s + late_s, lambda: self._group_sees("connection reset"))

    def _coordinator_sees(self) -> None:
        coordinator = self.world.coordinator
        closed = SessionClosed(self.id, "its connection closed")
        coordinator.gate.let(lambda: coordinator.handle(closed))

    def _group_sees(self, reason: str) -> None:
        self.broken = True
        self._up_ends_s = self.world.now_s
        self.process.from_stream(self, r.Disconnected(reason))

    def _carry(self, last_s: float, ends_s: Callable[[], float], deliver: Callable[[], None]) -> float:
        arrives_s = max(last_s, self.world.now_s + self.world.rng.uniform(0.0002, 0.003))

        def arrive() -> None:
            if arrives_s <= ends_s():
                deliver()

        self.world.at(arrives_s, arrive)
        return arrives_s


@dataclass
class Attempt:
    quorum: NewQuorum
    step: Step
    present: dict[str, "Process"] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    broken_by: str = ""
    tainted: frozenset[str] = frozenset()  # who had computed from a state with a flipped bit

    @property
    def complete(self) -> bool:
        return len(self.present) == len(self.quorum.members)


class Hub:
    """Where the members of a quorum meet to exchange. All must come; one that goes breaks it for who is not done."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.attempts: dict[tuple[QuorumId, Step], Attempt] = {}

    def arrive(self, process: "Process", quorum: NewQuorum, step: Step) -> None:
        attempt = self.attempts.setdefault((quorum.quorum_id, step), Attempt(quorum, step))
        assert attempt.quorum == quorum
        attempt.present[process.name] = process
        gone = [member.group for member in quorum.members if self._is_gone(member.group, member.incarnation)]
        if attempt.broken_by or gone:
            self._fail(attempt, process, attempt.broken_by or gone[0])
            return
        if attempt.complete:
            attempt.tainted = frozenset(name for name, each in attempt.present.items() if each.flipped)
            for each in attempt.present.values():
                self.world.soon(each.bound(lambda each=each: self._finish(attempt, each)), 0.006)
            if not self.world.calm and self.world.rng.random() < 0.08:
                self.world.soon(lambda: self._cut_a_link(attempt))
            return
        token = process.token
        self.world.after(EXCHANGE_TIMEOUT_S, lambda: self._time_out(attempt, process, token))

    def leave(self, process: "Process") -> None:
        """`process` closes its links, or the kernel does so for it."""
        for attempt in self.attempts.values():
            if attempt.present.get(process.name) is process and process.name not in attempt.finished:
                self._break(attempt, process.name)

    def _break(self, attempt: Attempt, name: str) -> None:
        if attempt.broken_by:
            return
        attempt.broken_by = name
        for other in list(attempt.present.values()):
            if other.name != name and other.name not in attempt.finished:
                # It may have received all it needs already.
                if not attempt.complete or self.world.rng.random() < 0.5:
                    self._fail(attempt, other, name)

    def _cut_a_link(self, attempt: Attempt) -> None:
        unfinished = [p for name, p in sorted(attempt.present.items()) if name not in attempt.finished]
        if len(unfinished) >= 2:
            one, two = self.world.rng.sample(unfinished, 2)
            self.world.note(f"chaos: the link between {one.name} and {two.name} is cut")
            self.world.happened["cut"] += 1
            self._fail(attempt, one, two.name)

    def _finish(self, attempt: Attempt, process: "Process") -> None:
        if process.name in attempt.finished:
            return
        attempt.finished.add(process.name)
        self._check_the_sum(attempt)
        process.exchanged(attempt.quorum.quorum_id, attempt.step)

    def _fail(self, attempt: Attempt, process: "Process", accused: str) -> None:
        def fail() -> None:
            if process.name not in attempt.finished:
                attempt.finished.add(process.name)
                self._break(attempt, process.name)
                process.exchange_broke(attempt.quorum.quorum_id, attempt.step, accused)

        self.world.soon(process.bound(fail))

    def _time_out(self, attempt: Attempt, process: "Process", token: int) -> None:
        if process.token == token and not attempt.complete and process.name not in attempt.finished:
            missing = [
                member.group for member in attempt.quorum.members if member.group not in attempt.present
            ]
            self._fail(attempt, process, missing[0])

    def _is_gone(self, name: str, incarnation: int) -> bool:
        process = self.world.processes[name]
        return process.dead or process.incarnation != incarnation

    def _check_the_sum(self, attempt: Attempt) -> None:
        """Each shard comes from its one owner, who has computed it."""
        assert attempt.complete
        given: list[int] = []
        for member in attempt.quorum.members:
            process = attempt.present[member.group]
            assert process.incarnation == member.incarnation
            assert set(member.shards) <= process.computed[attempt.step]
            given += member.shards
        assert sorted(given) == list(range(attempt.quorum.total_shards))
