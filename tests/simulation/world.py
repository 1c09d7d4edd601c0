"""A whole job in one thread: the machine of the coordinator and a core for each group, on a virtual clock.

Real: `machine.step`, `durable.fold` and `restored`, the replica's `step` and `directive`. Modelled:
streams and links that delay, cut and break; clocks that drift; the coordinators' shell with its disk, where effects
wait behind a record until it is durable; a training thread that computes, exchanges, applies, heals and replays as it
is ordered. A group's state is its history: for each step the quorum whose sum it applied.

First a storm: the faults of the seed's setting, at their times. Then calm: cables are repaired, processes are started
again, and before `CALM_LIMIT_S` have passed all must take part again, train a little, and finish.
"""

import heapq
import random
from collections.abc import Callable
from typing import Any

from jaxft_coordinator.shell import limits
from jaxft_protocol.coordinator import bounds
from jaxft_protocol.coordinator.job import Holder, PauseAsked
from jaxft_protocol.replica.state import Phase

from .classes import draw
from .coordinator import Life
from .disk import Disk
from .exchange import Hub
from .faults import inflict
from .guests import Guest
from .process import Process
from .saving import COMMON_ROOT, OLD_ROOT, Checkpoint
from .setting import MOST_SHARDS, QUICK_S, Fault, Setting
from .sometimes import Sometimes
from .stream import Cables
from .supervisor import Supervisor
from .trainer import Trainer
from .truth import Truth, Violation

CALM_LIMIT_S = 90.0
# Losses are final this long after the calm's beginning: no group is dialling, compiling or joining any more.
LOST_AFTER_S = 20.0
HOSTS = ("c0", "c1")
STEPS_IN_CALM = 2
JOINING = Phase.JOINING
# How many times as long a shard takes at a slow group. One shard takes less than two heartbeat timeouts.
SLOW = 10.0


class World:
    """One seed. `without` holds the numbers of faults that are left out; with `tracing`, `trace` is written."""

    def __init__(
        self,
        seed: int,
        *,
        without: frozenset[int] = frozenset(),
        tracing: bool = False,
        setting: Setting | None = None,
    ) -> None:
        self.seed = seed
        self.setting = draw(seed) if setting is None else setting
        self.tracing = tracing
        self.trace: list[str] = []
        self.now_s = 0.0
        self.events = 0
        self.calm = False
        self.over = False
        self.halted = False
        self.evicted_in_calm = False
        self.target: int | None = None
        self.random = random.Random(seed + (1 << 40)).random
        self.sometimes = Sometimes()
        self.truth = Truth(self)
        self.disk = Disk(self)
        self.cables = Cables(self)
        self.hub = Hub(self)
        self.checkpoints: list[Checkpoint] = []
        self.found: Exception | None = None  # by a coordinator's announcement
        self.guests: list[Guest] = []
        self.last_saver: Trainer | None = None  # which saves the last state while others wait
        self.begun: Checkpoint | None = None  # with which the job began, which a fresh group can make again
        self.raises_in = 1 + int(150 * random.Random(seed + (1 << 42)).random())  # events of the job
        self.flips = 0  # bits that have flipped, in any state
        self.supervisor = Supervisor(self) if self.setting.supervised else None
        self.hosts: dict[str, Life | None] = dict.fromkeys(HOSTS)
        self.processes: dict[str, Process] = {}  # the newest of each name
        self.incarnations: dict[int, Process] = {}
        self._calm_since_s = 0.0
        self._one_has_finished = False
        self._without = without
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def run(self) -> None:
        """Run to the good end; see `_run`."""
        usual = bounds.MAX_GONE_BYTES, limits.MAX_JOBS
        # A job that the coordinator has stopped counts as idle: to make room, it is forgotten with its ids.
        stops = self.setting.refuses or self.setting.raises
        bounds.MAX_GONE_BYTES = self.setting.keeps_bytes
        limits.MAX_JOBS = limits.MAX_JOBS if stops else 3 * self.setting.guests + 3
        try:
            self._run()
        finally:
            bounds.MAX_GONE_BYTES, limits.MAX_JOBS = usual

    def _run(self) -> None:  # noqa: C901 (a case for each ending)
        """Run to the good end.

        Raises:
            Violation: an invariant does not hold, or the end was not reached in time.
            AssertionError: a core found itself in a state that it believed impossible.
        """
        setting = self.setting
        if setting.leaves_early:
            self.after(0.02, self._leave_early)
        if setting.brings:
            self.checkpoints.append(Checkpoint.from_before(setting.brings))
        if self.supervisor is not None:
            self.supervisor.start()
        else:
            self.lead(HOSTS[0])
            for name in setting.names:
                self.after(self.between(0.0, setting.starts_s), self.launch, name)
        self.guests = [Guest(self, number) for number in range(setting.guests)]
        for fault in setting.faults:
            if fault.index not in self._without:
                self.at(fault.at_s, self._strike, fault)
        self.at(setting.storm_s, self._begin_calm)
        queue, limit_s = self._queue, setting.storm_s + CALM_LIMIT_S
        while not self.over:
            self.now_s, _, act, args = heapq.heappop(queue)
            act(*args)
            if self.found is not None:
                raise self.found
            if self.now_s > limit_s:
                self._stuck()
        if not self.halted and self.target is not None:
            self._check_end(self.target)

    # ---- time ----

    def at(self, time_s: float, act: Callable[..., None], *args: Any) -> None:
        self.events += 1
        heapq.heappush(self._queue, (time_s, self.events, act, args))

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        self.events += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self.events, act, args))

    def between(self, least: float, most: float) -> float:
        return least + (most - least) * self.random()

    @property
    def calm_for_s(self) -> float:
        return self.now_s - self._calm_since_s if self.calm else 0.0

    @property
    def slowness(self) -> float:
        """How much longer a shard takes than in the storm: so that a calm without an end costs few steps.

        But a group that computes all of them is still in time for groups that wait for it in the exchange.
        """
        if not self.calm:
            return 1.0
        shards = max(MOST_SHARDS, self.setting.shards or 0)
        most = self.setting.exchange_timeout_s / (shards * self.setting.shard_s)
        return max(1.0, min(most, self.now_s - self._calm_since_s - 1.0))

    def shard_s(self, name: str) -> float:
        """How long a group takes for one shard, at most."""
        slow = SLOW if name == self.setting.slow and not self.calm else 1.0
        return self.setting.shard_s * self.slowness * slow

    @property
    def exchange_s(self) -> float:
        """How long an exchange takes, at most."""
        quick = self.calm or self.now_s < self.setting.slow_from_s
        return QUICK_S if quick else self.setting.exchange_s

    def note(self, text: str) -> None:
        """Write a line into the trace. Callers ask `tracing` first, so that no text is made for nothing."""
        self.trace.append(f"{self.now_s:9.4f} {text}")

    # ---- who is there ----

    @property
    def leader(self) -> Life | None:
        """The coordinator of the newest term, if it runs."""
        for life in self.hosts.values():
            if life is not None and not life.dead and life.number == self.disk.life:
                return life
        return None

    def leads(self, term: int) -> bool:
        """Whether the coordinator of this term is the newest."""
        return self.leader is not None and self.leader.term == term

    @property
    def leader_host(self) -> str:
        """Where a new process looks first."""
        return HOSTS[0]

    def lead(self, host: str) -> None:
        """Start a coordinator, unless one runs there already."""
        life = self.hosts[host]
        if life is None or life.dead:
            self.hosts[host] = Life(self, host)

    def lead_if_none(self, host: str) -> None:
        """Start a coordinator at `host` once the doomed one is dead, if nothing else does."""
        if self.supervisor is not None:
            return
        leader = self.leader
        if leader is None:
            self.lead(host)
        elif leader.crash_after is not None:
            self.after(0.2, self.lead_if_none, host)

    def launch(self, name: str) -> None:
        """Start a group, as soon as no process of it runs any more, if nothing else does."""
        if self.supervisor is not None:
            return
        before = self.processes.get(name)
        if before is not None and before.over and self.target is not None:
            return
        if before is not None and not before.dead:
            if before.leaving and not self.calm:  # in the calm all are launched again and again
                self.after(0.1, self.launch, name)
            return
        self.start(name)

    def start(self, name: str) -> Process:
        incarnation = len(self.incarnations) + 1
        process = Process(self, name, incarnation)
        self.processes[name] = self.incarnations[incarnation] = process
        process.start()
        return process

    # ---- storm and calm ----

    def _strike(self, fault: Fault) -> None:
        if self.calm:
            return
        what = inflict(self, fault)
        if not what:
            return
        self.sometimes.note(f"fault: {fault.kind}")
        if self.tracing:
            self.note(f"FAULT {fault.index}: {fault.kind} {what}")

    def _begin_calm(self) -> None:
        self.calm = True
        if self.tracing:
            self.note("calm")
        self.cables.repair()
        for process in self.incarnations.values():
            if self.processes[process.name] is not process:
                process.kill()  # of two of one name the older one is ended at last
            process.recover()
        for life in self.hosts.values():
            if life is not None:
                life.recover()
        if self.supervisor is not None:
            self.supervisor.recovers()
        self._calm_since_s = self.now_s
        self._set_target()

    def _set_target(self) -> None:
        """Once all groups take part again, let them train a little and finish."""
        if self.leader is None and self.supervisor is None:
            self.lead(next(host for host, life in self.hosts.items() if life is None or life.dead))
        for name in self.setting.names:
            self.launch(name)
        if self.leader is not None:
            self.leader.ask(PauseAsked(paused=False))
        if self.now_s - self._calm_since_s > LOST_AFTER_S and self._is_lost():
            self._end_lost()
            return
        if self._all_take_part():
            self.target = len(self.truth.line) + STEPS_IN_CALM + max(self.setting.early, default=0)
            if self.tracing:
                self.note(f"target: {self.target}")
            return
        self._relaunch_the_stuck()
        self.after(0.1, self._set_target)

    def _all_take_part(self) -> bool:
        leader = self.leader
        if leader is None or leader.job.quorum is None:
            return False
        processes = self.processes.values()
        if len(processes) < len(self.setting.names):
            return False
        if any(p.dead or p.flips_next or p.leaving or p.drains or p.stuck_at is not None for p in processes):
            return False
        # A spare that only stands by is not compared, until it is called up.
        if len({p.flipped for p in processes if p.name not in self.setting.spares}) > 1:
            return False
        frontier = leader.job.frontier
        if frontier is None or frontier.step != len(self.truth.line):
            return False
        return leader.has_all({process.incarnation for process in processes}, self.setting.spares)

    def _relaunch_the_stuck(self) -> None:
        """A thread that hangs forever is restarted in the end, but only once the others go on without it.

        Where they cannot, because it alone holds the job's state, every group is needed, or the code of the groups
        that could go on raises in this step, a person must do it.
        """
        stuck = [p for p in self.processes.values() if p.stuck_at is not None and not p.dead]
        if not stuck or self.supervisor is not None:
            return
        leader = self.leader
        frontier = None if leader is None else leader.job.frontier
        known = frozenset[Holder]() if frontier is None else frontier.holders
        able = [p for p in self.processes.values() if p not in stuck and (p.name, p.incarnation) in known]
        alone = len(able) < max(1, self.setting.min_replicas) or all(p.spare for p in able)
        alone = alone or len(self.truth.line) == self.setting.unreadable
        for process in stuck:
            went_on = process.stuck_at is not None and len(self.truth.line) > process.stuck_at + 1
            if went_on or (alone and self.now_s - self._calm_since_s > 10.0):
                process.kill()
                self.launch(process.name)

    def end_of(self, name: str) -> int | None:
        """After how many steps a group's loop ends, once that is known."""
        return None if self.target is None else self.target - self.setting.early_by(name)

    def is_odd(self, name: str) -> bool:
        """Whether a group begins with another state than the others, which share one."""
        regular = [each for each in self.setting.names if each not in self.setting.spares]
        return self.setting.one_differs and name == regular[-1]

    def _leave_early(self) -> None:
        """A founder of several leaves as finished before the first quorum, and comes again."""
        if self.calm or self.truth.quorums:
            return
        leader = self.leader
        founders = [] if leader is None else leader.founders_without_quorum()
        process = self.processes.get(founders[-1]) if len(founders) > 1 else None
        if process is None or process.dead or process.replica.phase is not JOINING:
            self.after(0.02, self._leave_early)
            return
        self.sometimes.note("founder left early")
        process.leave(finished=True)
        self.after(0.3, self.launch, process.name)

    def one_has_finished(self, name: str) -> None:
        """A group leaves at the end of its loop: the first time, others may die while they end theirs."""
        if not self.setting.die_at_end or self._one_has_finished:
            return
        self._one_has_finished = True
        for other in self.setting.names:
            if other != name and self.random() < 0.8:
                self.after(self.between(0.0, 0.1), self._die_at_end, other)

    def _die_at_end(self, name: str) -> None:
        process = self.processes[name]
        if process.dead or process.over:
            return
        self.sometimes.note("died at the end")
        process.kill()
        self.after(self.between(0.0, 0.5), self.launch, name)

    def ended(self) -> None:
        """A process has come to its end."""
        if self.calm and all(process.over for process in self.processes.values()):
            self.over = True

    def _is_lost(self) -> bool:
        """Whether something was committed, and nothing is left of it."""
        # No group takes a corrupt state. (A group that counts as fresh ends the wait of the group that holds it.)
        holders = [
            p
            for p in self.incarnations.values()
            if not p.dead and p.replica.history and p.replica.failure is None and not p.flipped
        ]
        of_another = self.truth.root != OLD_ROOT
        checkpoints = [each for each in self.checkpoints if not (each.old and of_another)]
        # (The line may be empty all the same: the job had gone back to its first state, and lost that as well.)
        begins_again = not self.checkpoints and self.begun is not None and self.begun.root == COMMON_ROOT
        return bool(self.truth.ever) and not holders and not checkpoints and not begins_again

    def _end_lost(self) -> None:
        self.sometimes.note("lost for good")
        self.target, self.over = None, True

    def _stuck(self) -> None:
        target = self.target
        finished = target is not None and any(len(p.history) == target for p in self.incarnations.values())
        if self._is_lost() and not finished:  # a finished state is not lost
            self._end_lost()
            return
        raise Violation("no group waits forever", self.standing())

    def standing(self) -> str:
        groups = ", ".join(
            f"{p.name}#{p.incarnation} {'dead' if p.dead else p.replica.phase.value} at {len(p.history)}"
            for p in self.processes.values()
        )
        leader = self.leader
        waiting = "no coordinator" if leader is None else f"waiting: {leader.job.waiting!r}"
        launcher = "" if self.supervisor is None else f"; {self.supervisor.standing()}"
        return f"{groups}; the job at {len(self.truth.line)}, {waiting}{launcher}"

    def _check_end(self, target: int) -> None:
        saved = self.disk.saved
        if saved is not None and saved.finished is not None and saved.finished < target:
            self._check_early(saved.finished)
            target = saved.finished
        # A group that stood still before the calm may be evicted for it while its farewell, the last, is on its way.
        unheard = saved is not None and saved.finished is None and self.evicted_in_calm
        ended = saved is not None and (saved.finished == target or unheard)
        if not ended or len(self.truth.line) != target:
            raise Violation("all end well", f"{self.standing()}; target {target}, {saved}")
        if self.setting.saves_last and not any(len(each.state) == target for each in self.checkpoints):
            raise Violation(
                "the last state is saved", f"step {target}, after {len(self.checkpoints)} checkpoints"
            )
        finishers = [p for p in self.processes.values() if len(p.history) == target]
        if not finishers:
            raise Violation("all end well", f"no group holds state {target}: {self.standing()}")
        for process in self.processes.values():
            # A group that was away when the others finished comes too late, and receives that.
            late = process.replica.finished == target
            if late and not process.replica.history:
                continue  # it has never taken part
            own = late or len(process.history) == self.end_of(process.name)
            self.truth.check_state(process, len(process.history) if own else target)
        if self.truth.went_back and not self.truth.same_bits:
            # Who finished before the job went back holds the job's state of then: `check_state` has compared that.
            finishers = [p for p in finishers if p.history == self.truth.line]
        if not finishers:
            raise Violation("all end well", f"no group holds the last line: {self.standing()}")
        self.truth.check_alike(finishers)

    def _check_early(self, end: int) -> None:
        """A job ends before the longest loop does only if too few groups are left that go on."""
        longer = [name for name in self.setting.names if (self.end_of(name) or 0) > end]
        regular = [name for name in longer if name not in self.setting.spares]
        enough = len(regular) >= max(1, self.setting.min_replicas)
        if enough or end not in {self.end_of(name) for name in self.setting.names}:
            raise Violation(
                "a job continues while enough groups do", f"ends at {end}, {longer} have longer loops"
            )
