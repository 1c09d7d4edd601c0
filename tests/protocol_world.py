"""A whole job in one thread: the coordinator's machine and a replica core for each group, on a virtual clock.

Messages travel over ordered streams of random delay. A model of the training thread does what the core directs:
it computes shards, exchanges them with whoever has come to the same attempt, applies, heals from its peers' logs.
Chaos kills, hangs, stops, disconnects and sends home. Whatever may not happen is asserted where it would happen.

A group's state is its history: for each step the quorum whose sum it applied.
"""

import heapq
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxft_coordinator.core import machine
from jaxft_coordinator.core.job import (
    Close,
    Event,
    GroupSaid,
    Job,
    Options,
    Report,
    Send,
    SessionClosed,
    SessionId,
    Tick,
)
from jaxft_coordinator.core.messages import (
    CoordinatorMessage,
    GroupMessage,
    GroupName,
    Heal,
    HealId,
    Hello,
    Incarnation,
    NewQuorum,
    QuorumId,
    Step,
)

from jaxft._replica import _core as replica_core
from jaxft._replica import _types as r

SHARDS = 6
TICK_S = 0.1
HEARTBEAT_TIMEOUT_S = 1.0
EXCHANGE_TIMEOUT_S = 1.5
FETCH_TIMEOUT_S = 1.0
KEEPALIVE_S = 2.0  # after this a group finds that its stream is dead, though nobody told it
CALM_LIMIT_S = 60.0


class World:
    def __init__(
        self,
        seed: int,
        *,
        groups: int = 4,
        chaos_s: float = 3.0,
        min_replicas: int = 1,
        shards: str = str(SHARDS),
    ) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.trace: list[str] = []
        self.calm = False
        self.target: int | None = None
        self.settings = {"shards": shards}
        self.decided: list[QuorumId] = []  # by step: the quorum whose commit counts
        self.quorums: dict[QuorumId, NewQuorum] = {}
        self.happened: Counter[str] = Counter()
        self.names = [f"group-{i}" for i in range(groups)]
        self.incarnations = 0
        self.hub = Hub(self)
        self.coordinator = Coordinator(self, min_replicas)
        self.processes: dict[str, Process] = {}
        self._chaos_s = chaos_s
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def run(self) -> None:
        """Start all groups, let chaos reign for a while, and then come to a good end."""
        for name in self.names:
            self.after(self.rng.uniform(0.0, 0.2), lambda name=name: self.launch(name))
        self.after(0.0, self.coordinator.tick)
        self.after(0.3, self._chaos)
        self.after(self._chaos_s, self._calm)
        while self._queue:
            time_s, _, act = heapq.heappop(self._queue)
            assert time_s >= self.now_s
            self.now_s = time_s
            act()
            assert self.now_s < self._chaos_s + CALM_LIMIT_S, f"stuck: {self.standing()}"
            if self.calm and all(process.over for process in self.processes.values()):
                return

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, act)

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._queue, (time_s, self._scheduled, act))

    def soon(self, act: Callable[[], None], most_s: float = 0.004) -> None:
        self.after(self.rng.uniform(0.0, most_s), act)

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now_s:8.4f} {text}")

    def launch(self, name: str) -> None:
        """Start a group, as soon as no process of it runs any more."""
        if name in self.processes and not self.processes[name].dead:
            if self.processes[name].leaving:
                self.after(0.1, lambda: self.launch(name))
            return
        self.incarnations += 1
        self.processes[name] = Process(self, name, self.incarnations)

    def standing(self) -> str:
        groups = ", ".join(
            f"{p.name}#{p.incarnation} {'dead' if p.dead else p.replica.phase.value} at {len(p.history)}"
            for p in self.processes.values()
        )
        return f"{groups}; the job at {len(self.decided)}, waiting: {self.coordinator.job.waiting!r}"

    # ---- what goes wrong ----

    def _chaos(self) -> None:
        if self.calm:
            return
        self.after(self.rng.expovariate(1 / 0.12), self._chaos)
        victim = self.processes.get(self.rng.choice(self.names))
        if victim is None or victim.dead:
            return
        harms = {
            "kill": lambda: self._end(victim, lambda: victim.kill()),
            "leave": lambda: self._end(victim, lambda: victim.leave(finished=False)),
            "break": lambda: victim.break_stream(self.rng.choice(["both", "group", "coordinator"])),
            "hang": lambda: victim.hang(self.rng.uniform(0.1, 3.0)),
            "stop": lambda: victim.stop(self.rng.uniform(0.1, 2.5)),
            "stall": lambda: self.coordinator.gate.shut(self.rng.uniform(0.1, 1.5)),
        }
        harm = self.rng.choices(list(harms), weights=[6, 1, 4, 2, 2, 1])[0]
        self.note(f"chaos: {harm} {victim.name}")
        self.happened[harm] += 1
        harms[harm]()

    def _end(self, victim: "Process", how: Callable[[], None]) -> None:
        """End a process and start it anew, unless the job's state would be lost with it for good."""
        others = [process for process in self.processes.values() if process is not victim]
        if self.coordinator.job.frontier is not None and not any(
            p.would_keep_the_job(victim) for p in others
        ):
            self.note(f"spared {victim.name}")
            return
        how()
        self.after(self.rng.uniform(0.01, 1.0), lambda: self.launch(victim.name))

    def _calm(self) -> None:
        self.calm = True
        self.note("calm")
        self.after(1.1, lambda: [self.launch(name) for name in self.names])
        self.after(1.2, self._set_target)

    def _set_target(self) -> None:
        """Once everybody takes part again, let them train a little and finish."""
        quorum = self.coordinator.job.quorum
        all_in = quorum is not None and len(quorum.members) == len(self.names)
        if all_in and not any(process.stands_still for process in self.processes.values()):
            self.target = len(self.decided) + 3
            self.note(f"target {self.target}")
        else:
            self.after(0.1, self._set_target)


class Gate:
    """Lets acts through in the order in which they come; while it is shut they wait."""

    def __init__(self, world: World) -> None:
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


class Coordinator:
    def __init__(self, world: World, min_replicas: int) -> None:
        self.world = world
        self.job = Job("job", Options(min_replicas, 1.0, HEARTBEAT_TIMEOUT_S))
        self.streams: dict[SessionId, Stream] = {}
        self.gate = Gate(world)

    def tick(self) -> None:
        if not self.gate.is_shut:
            self.handle(Tick())
        self.world.after(TICK_S, self.tick)

    def handle(self, event: Event) -> None:
        if isinstance(event, GroupSaid) and (
            event.session not in self.job.sessions and not isinstance(event.message, Hello)
        ):
            return  # of a session that has been closed; its shell drops that
        before = self.job
        self.job, effects = machine.step(self.job, event, self.world.now_s)
        self._check(before)
        for effect in effects:
            match effect:
                case Send(session, message):
                    self.streams[session].down(message)
                case Close(session):
                    self.streams[session].end_down()
                case Report(text):
                    self.world.note(text)

    def _check(self, before: Job) -> None:
        old, new = before.frontier, self.job.frontier
        assert self.job.last_quorum_id >= before.last_quorum_id
        if self.job.quorum is not None and self.job.quorum is not before.quorum:
            assert self.job.quorum.quorum_id not in self.world.quorums
            self.world.quorums[self.job.quorum.quorum_id] = self.job.quorum
        if old is not None:
            assert new is not None
            assert old.step <= new.step <= old.step + 1
            if new.step > old.step:
                assert len(self.world.decided) == old.step, "a step was decided twice"
                self.world.decided.append(new.quorum_id)
                self.world.note(f"step {old.step} counts, by quorum {new.quorum_id}")


class Stream:
    """One stream, two ordered directions. A break cuts each of them at a moment of its own."""

    def __init__(self, world: World, process: "Process") -> None:
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

    @property
    def complete(self) -> bool:
        return len(self.present) == len(self.quorum.members)


class Hub:
    """Where the members of a quorum meet to exchange. All must come; one that goes breaks it for who is not done."""

    def __init__(self, world: World) -> None:
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


class Process:
    """One incarnation of a group: its core, and a model of its training thread."""

    def __init__(self, world: World, name: str, incarnation: int) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.history: list[QuorumId] = []
        self.computed: defaultdict[int, set[int]] = defaultdict(set)
        self.sums: set[tuple[QuorumId, Step]] = set()
        self.pins: dict[int, Step] = {}
        self.log: dict[int, QuorumId] = {}
        self.dead = self.over = False
        self.token = 0  # counts what the training thread has begun; a callback of something older is void
        self._key: object = None
        self._applying = False
        self._heal: Heal | None = None
        self.leaving = False
        self._gate = Gate(world)  # of the whole process
        self._thread_gate = Gate(world)  # of the training thread
        self._stream: Stream | None = None
        identity = r.Identity("job", GroupName(name), Incarnation(incarnation), f"{name}:1", "here")
        self.replica = r.Replica(identity, 30.0, since_s=world.now_s, offline_since_s=world.now_s)
        world.note(f"{name}#{incarnation} starts")
        self._dial(0.0)
        self._tick()
        world.soon(lambda: self.post(r.Prepared(Step(0), "init", world.settings)), 0.3)

    @property
    def stands_still(self) -> bool:
        return self._gate.is_shut or self._thread_gate.is_shut

    def would_keep_the_job(self, other: "Process") -> bool:
        """Whether the job's state is safe with this process if `other` dies now, whatever is still under way.

        It must hold the frontier and take part; and if `other` has said ok to what comes next, so must it have.
        """
        job, replica = self.world.coordinator.job, self.replica
        if self.dead or self.leaving or self._stream is None or self._stream.broken or job.frontier is None:
            return False
        if self.stands_still or job.quorum != replica.quorum:
            return False
        if (
            replica.phase not in (r.Phase.WORKING, r.Phase.VOTED, r.Phase.APPLYING)
            or replica.vote != other.replica.vote
        ):
            return False
        return len(self.history) + (replica.phase is r.Phase.APPLYING) >= job.frontier.step

    # ---- chaos ----

    def kill(self) -> None:
        self.dead = True
        self.token += 1
        self.world.hub.leave(self)
        if self._stream is not None:
            self._stream.break_off("both")

    def leave(self, *, finished: bool) -> None:
        self._begin(None)
        self.leaving = True
        self.post(r.LeaveNow(finished))

    def break_stream(self, told: str) -> None:
        if self._stream is not None:
            self._stream.break_off(told)

    def hang(self, seconds: float) -> None:
        """The training thread stands still; the session thread goes on."""
        self._thread_gate.shut(seconds)

    def stop(self, seconds: float) -> None:
        """SIGSTOP: the whole process stands still; what is sent to it waits."""
        self._gate.shut(seconds)
        self._thread_gate.shut(seconds)

    # ---- the session thread ----

    def from_stream(self, stream: Stream, event: r.Event) -> None:
        def read() -> None:
            if self._stream is stream:
                if isinstance(event, r.Disconnected):
                    self._stream = None
                self._step(event)

        self._gate.let(read)

    def post(self, event: r.Event) -> None:
        self._gate.let(lambda: self._step(event))

    def _step(self, event: r.Event) -> None:
        if self.dead:
            return
        before = self.replica
        self.replica, effects = replica_core.step(before, event, self.world.now_s)
        if before.quorum is not None and self.replica.quorum is not None:
            assert self.replica.quorum.quorum_id >= before.quorum.quorum_id
        for effect in effects:
            match effect:
                case r.Say(message):
                    if self._stream is not None:
                        self._stream.up(message)
                case r.Dial(delay_s):
                    self._dial(delay_s)
                case r.PinState(heal_id, step):
                    assert len(self.history) + self._applying <= step, (
                        "a pin came after the commit it should precede"
                    )
                    self.pins[heal_id] = step
                case r.ReleasePin(heal_id):
                    self._release(heal_id)
                case r.Note():
                    pass
        if self.replica.phase is not before.phase:
            self.world.note(f"{self.name}#{self.incarnation} is {self.replica.phase.value}")
        self.world.soon(self._look)

    def _dial(self, delay_s: float) -> None:
        def connect() -> None:
            if not self.dead and self.replica.phase is r.Phase.OFFLINE:
                self._stream = Stream(self.world, self)
                self.post(r.Connected())

        self.world.after(delay_s + self.world.rng.uniform(0.0, 0.01), connect)

    def _tick(self) -> None:
        if not self.dead:
            self.world.after(TICK_S, self._tick)
            if not self._gate.is_shut:
                self.post(r.Tick())

    def _release(self, heal_id: int) -> None:
        self.pins.pop(heal_id, None)
        oldest = min(self.pins.values(), default=None)
        self.log = {step: by for step, by in self.log.items() if oldest is not None and step >= oldest}

    # ---- the training thread ----

    def bound(self, act: Callable[[], None]) -> Callable[[], None]:
        """`act` of the training thread, void once that has been given something else to do."""
        token = self.token

        def run() -> None:
            if self.token == token and not self.dead:
                act()

        return lambda: self._thread_gate.let(run)

    def _look(self) -> None:
        """Read what is to be done, and do it if it is something else than before."""
        self._thread_gate.let(self._look_now)

    def _look_now(self) -> None:
        if self.dead or self._applying:
            return
        directive = replica_core.directive(self.replica)
        if self.replica.phase is r.Phase.LEFT:
            assert self.leaving or directive == r.Over(Step(self.world.target or -1))
            self._exit()
            return
        key = _key(directive)
        if key == self._key or self.leaving or self._has_done(directive):
            return
        self._begin(key)
        match directive:
            case r.Attempt() | r.Over() if self._is_done(directive):
                self.leave(finished=True)
            case r.Attempt(quorum, step):
                self._compute(quorum, step)
            case r.Apply(quorum_id, step):
                assert (quorum_id, step) in self.sums
                assert self.name in {member.group for member in self.world.quorums[quorum_id].members}
                self._advance(quorum_id, r.Applied(Step(step + 1)))
            case r.HealFrom(heal):
                self._fetch(heal, self.world.now_s + FETCH_TIMEOUT_S)
            case r.Replay(heal_id, step):
                self._replay(heal_id, step, self.world.now_s + FETCH_TIMEOUT_S)
            case r.Fail(failure):
                raise AssertionError(f"{self.name} fails: {failure.text}")
            case _:
                pass

    def _has_done(self, directive: r.Directive) -> bool:
        """Whether the core has not heard yet that this is done: then it still says so."""
        return isinstance(directive, r.Apply | r.Replay) and directive.step < len(self.history)

    def _begin(self, key: object) -> None:
        self.token += 1
        self._key = key
        self.world.hub.leave(self)

    def _is_done(self, directive: r.Attempt | r.Over) -> bool:
        if isinstance(directive, r.Over):
            assert self.world.target == directive.step
            return True
        return self.world.target is not None and len(self.history) >= self.world.target

    def _exit(self) -> None:
        self.dead = self.over = True
        self.world.hub.leave(self)
        if self._stream is not None:
            self._stream.break_off("both")

    def _compute(self, quorum: NewQuorum, step: Step) -> None:
        assert step == len(self.history)
        mine = next(member.shards for member in quorum.members if member.group == self.name)
        missing = [shard for shard in mine if shard not in self.computed[step]]
        if not missing:
            self.world.hub.arrive(self, quorum, step)
            return

        def done() -> None:
            assert missing[0] not in self.computed[step], "a shard was computed twice"
            self.computed[step].add(missing[0])
            self._compute(quorum, step)

        self.world.soon(self.bound(done), 0.008)

    def exchanged(self, quorum_id: QuorumId, step: Step) -> None:
        self.sums.add((quorum_id, step))
        self.post(r.Exchanged(quorum_id, step))

    def exchange_broke(self, quorum_id: QuorumId, step: Step, accused: str) -> None:
        self.post(r.ExchangeBroke(quorum_id, step, (GroupName(accused),), f"{accused} went away"))

    def _advance(self, quorum_id: QuorumId, then: r.Event) -> None:
        """Apply the means of the next step; nothing but death interrupts that."""
        self._applying = True

        def done() -> None:
            if self.dead:
                return
            self._applying = False
            step = len(self.history)
            assert self.world.decided[step] == quorum_id, "what was applied is not what was decided"
            if self.pins:
                self.log[step] = quorum_id
            self.history.append(quorum_id)
            self.post(then)

        self.world.soon(lambda: self._thread_gate.let(done), 0.008)

    def _fetch(self, heal: Heal, until_s: float) -> None:
        self._heal = heal
        donors = self._donors()
        keepers = [p for p in donors if p.pins.get(heal.heal_id) == heal.step and len(p.history) >= heal.step]
        if keepers:

            def fetched() -> None:
                self.history = self.world.rng.choice(keepers).history[: heal.step]
                assert self.history == self.world.decided[: heal.step]
                self.post(r.Healed(heal.heal_id, heal.step))

            self.world.soon(self.bound(fetched), 0.1)
        elif not donors or self.world.now_s > until_s:
            self.post(r.HealBroke(heal.heal_id, "no donor answers"))
        else:
            self.world.after(0.01, self.bound(lambda: self._fetch(heal, until_s)))

    def _replay(self, heal_id: HealId, step: Step, until_s: float) -> None:
        donors = self._donors()
        logs = [p.log[step] for p in donors if heal_id in p.pins and step in p.log]
        if logs:
            self._advance(logs[0], r.Replayed(heal_id, Step(step + 1)))
        elif not donors or self.world.now_s > until_s:
            self.post(r.HealBroke(heal_id, "no donor answers"))
        else:
            self.world.after(0.005, self.bound(lambda: self._replay(heal_id, step, until_s)))

    def _donors(self) -> list["Process"]:
        assert self._heal is not None
        found = [self._peer(donor.group, donor.incarnation) for donor in self._heal.donors]
        return [donor for donor in found if donor is not None]

    def _peer(self, name: str, incarnation: int) -> "Process | None":
        peer = self.world.processes[name]
        return None if peer.dead or peer.incarnation != incarnation else peer


def _key(directive: r.Directive) -> object:
    match directive:
        case r.Attempt(quorum, step):
            return ("attempt", quorum.quorum_id, step)
        case r.HealFrom(heal):
            return ("heal", heal.heal_id)
        case r.Replay(heal_id, step):
            return ("replay", heal_id, step)
        case r.Apply(quorum_id, step):
            return ("apply", quorum_id, step)
        case r.Over() | r.Fail():
            return ("end",)
        case r.Wait():
            return ("wait",)
