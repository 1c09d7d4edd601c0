"""A whole job in one thread: the coordinator's machine and a replica core for each group, on a virtual clock.

Messages travel over ordered streams of random delay. A model of the training thread does what the core directs:
it computes shards, exchanges them with whoever has come to the same attempt, applies, heals from its peers' logs.
Chaos kills, hangs, stops, disconnects and sends home. Whatever may not happen is asserted where it would happen.

A group's state is its history: for each step the quorum whose sum it applied.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable

from jaxft_coordinator.core import machine
from jaxft_coordinator.core.job import (
    Close,
    Event,
    Frontier,
    GroupSaid,
    Job,
    Options,
    Phase,
    Report,
    Send,
    SessionId,
    Tick,
)
from jaxft_coordinator.core.messages import Halted, Hello, NewQuorum, QuorumId, Step
from protocol_links import Gate, Hub, Stream
from protocol_process import Checkpoint, Process

SHARDS = 6
TICK_S = 0.1
HEARTBEAT_TIMEOUT_S = 1.0
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
        spares: int = 0,
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
        self.spares = frozenset(self.names[groups - spares :])
        self.flips = 0  # bits that have flipped, in any state
        self.checkpoints: list[Checkpoint] = []
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
            if self.coordinator.halted:
                return
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
            "flip": victim.flip,
            "wipe": self._kill_all,
        }
        weights = [6, 1, 4, 2, 2, 1, self._may_flip(victim), 0.3 if self.checkpoints else 0]
        harm = self.rng.choices(list(harms), weights=weights)[0]
        self.note(f"chaos: {harm} {victim.name}")
        self.happened[harm] += 1
        harms[harm]()

    def _may_flip(self, victim: "Process") -> bool:
        """Only one at a time, and where a majority is sound."""
        quorum = self.coordinator.job.quorum
        if quorum is None or len(quorum.members) < 3 or victim.spare:
            return False
        return not any(process.is_flipped for process in self.processes.values())

    def _kill_all(self) -> None:
        for process in self.processes.values():
            process.kill()
            self.after(self.rng.uniform(0.01, 1.0), lambda name=process.name: self.launch(name))

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
        for name in self.names:
            self.after(1.1, lambda name=name: self.launch(name))
        self.after(1.2, self._set_target)

    def _set_target(self) -> None:
        """Once everybody takes part again, let them train a little and finish."""
        quorum = self.coordinator.job.quorum
        regular = len(self.names) - len(self.spares)
        all_in = quorum is not None and len(quorum.members) == regular
        processes = self.processes.values()
        alike = len({process.flipped for process in processes}) == 1
        ready = alike and not any(p.stands_still or p.flips_next for p in processes)
        standing = [g for g in self.coordinator.job.groups.values() if g.phase in (Phase.MEMBER, Phase.READY)]
        if all_in and ready and len(standing) == len(self.names):
            self.target = len(self.decided) + 3
            self.note(f"target {self.target}")
        else:
            self.after(0.1, self._set_target)


class Coordinator:
    def __init__(self, world: World, min_replicas: int) -> None:
        self.world = world
        self.job = Job("job", Options(min_replicas, 1.0, HEARTBEAT_TIMEOUT_S))
        self.streams: dict[SessionId, Stream] = {}
        self.gate = Gate(world)
        self.halted = False

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
                    self.halted |= isinstance(message, Halted)
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
            if new.founding and (new.step, new.digest) != (old.step, old.digest):
                self._check_resume(old, new)
                return
            assert old.step <= new.step <= old.step + 1
            if new.step > old.step:
                assert len(self.world.decided) == old.step, "a step was decided twice"
                assert before.quorum is not None
                self._check_sound(before.quorum, old.step)
                self.world.decided.append(new.quorum_id)
                self.world.note(f"step {old.step} counts, by quorum {new.quorum_id}")

    def _check_sound(self, quorum: NewQuorum, step: Step) -> None:
        """No contribution of one that lives came from a state with a flipped bit."""
        attempt = self.world.hub.attempts[quorum.quorum_id, step]
        if 2 * len(attempt.tainted) >= len(attempt.present):
            return  # it was alone for a while, and the others healed from it
        for name in attempt.tainted:
            process = self.world.processes[name]
            assert (
                process.dead or process.leaving or process.incarnation != attempt.present[name].incarnation
            ), f"{name} is flipped"

    def _check_resume(self, old: Frontier, new: Frontier) -> None:
        """The frontier goes back only if nobody is present who holds it, and only to what was decided once."""
        holders = {group.holder for group in self.job.groups.values()} & old.holders
        assert not holders or new.step == old.step
        for name, incarnation in new.holders:
            process = self.world.processes[name]
            if process.incarnation == incarnation:  # else it has died meanwhile
                if self.world.happened["resume"]:  # it may have slept since before an earlier one
                    self.world.decided = list(process.history)
                assert process.history == self.world.decided[: new.step]
        del self.world.decided[new.step :]
        self.world.happened["resume"] += 1
