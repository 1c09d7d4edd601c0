"""A job on a virtual clock: the real cores of the coordinator, the groups and their supervisors decide everything.

Modelled are machines that fail silently (a heartbeat timeout notices) and come back; a training thread that computes,
exchanges, heals and replays as its core directs; and streams without delay. In quiet times, up to the next failure or
return, many steps are simulated as one long step.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from jaxft_protocol import messages as m
from jaxft_protocol import wire
from jaxft_protocol.coordinator import durable
from jaxft_protocol.coordinator import job as c
from jaxft_protocol.coordinator import machine as coordinator
from jaxft_protocol.replica import machine as replica
from jaxft_protocol.replica import state as r

from jaxft_launch.plan.forecast import checkpoint_interval_s, exact_name
from jaxft_launch.plan.forms import DAY_S
from jaxft_launch.plan.job import DEVICES_PER_NODE, Job
from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.supervise.core import launch as supervisor
from jaxft_launch.supervise.core import values as v
from jaxft_launch.supervise.core.group import Group

NODES_PER_RACK = 8  # behind one switch or one feed, which fails as often as a node
LONG_S = 30.0  # in longer rounds, heartbeats report progress, so that no member seems to hang
HEARTBEAT_BYTES = 2  # without progress, and its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A simulation's result; `messages` and `bytes`: to and from the coordinator, for each second of the job."""

    goodput: float
    failures: int
    all_lost: int
    steps: int
    simulated_s: float
    messages: float
    bytes: float


def simulate(job: Job, spares: int, failures: int, seed: int, *, racks: bool = False) -> Simulated:
    """Simulate a job until this many groups have failed."""
    return _World(job, spares, Random(seed), racks=racks).run(failures)


@dataclass(eq=False)
class _Process:
    """A group's process: its core, and where its training thread stands."""

    name: str
    session: c.SessionId
    core: r.Replica
    spare: bool
    key: object = None
    dead: bool = False
    computed: set[int] = field(default_factory=set[int])
    base: m.NewQuorum | None = None  # the last quorum on its stream
    committed: int = 0


@dataclass(eq=False)
class _Meeting:
    """Where the members of an attempt meet to exchange. `steps`: the real steps that it stands for."""

    first: m.Step
    shards: dict[str, tuple[int, ...]]
    steps: int
    present: list[_Process] = field(default_factory=list["_Process"])


class _World:
    def __init__(self, job: Job, spares: int, rng: Random, *, racks: bool) -> None:
        self.planned, self.rng, self.now_s = job, rng, 0.0
        kinds = {"group": job.groups, "spare": spares}
        self.names = [f"{kind}-{number}" for kind, count in kinds.items() for number in range(count)]
        self.job = durable.new("planned", c.Options(heartbeat_timeout_s=job.detect_s))
        groups = (Group(name=name, spare=name.startswith("spare")) for name in self.names)
        # Each machine has its own launcher, and the coordinator is elsewhere.
        self.launches = {each.name: supervisor.Launch(groups=(each,), rules=each.rules) for each in groups}
        self.processes: dict[str, _Process] = {}
        self.sessions: dict[c.SessionId, _Process] = {}
        self.heard: dict[c.SessionId, float] = {}
        self.meetings: dict[tuple[m.QuorumId, m.Step], _Meeting] = {}
        self.mail: deque[tuple[c.SessionId, m.GroupMessage | None, m.CoordinatorMessage | None]] = deque()
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = self.failed = self.all_lost = self.steps = self.messages = self.bytes = 0
        self.weight, self.ticks, self.began_s = 1, False, math.inf
        self.encoded: tuple[object, object, int] = (None, None, 0)
        for name in self.names:
            self.supervise(name, v.Tick())
        if racks:
            size = max(1, NODES_PER_RACK * DEVICES_PER_NODE // job.devices_per_group)
            for start in range(0, len(self.names), size):
                self.after(self.rack_s(), self.fail_rack, self.names[start : start + size])

    def run(self, failures: int) -> Simulated:
        while self.failed < failures or not self.is_steady():
            self.now_s, _, act, args = heapq.heappop(self.queue)
            act(*args)
            self.deliver()
        lasted_s = self.now_s - self.began_s
        beats = 2 * m.HEARTBEATS_IN_TIMEOUT / self.job.options.heartbeat_timeout_s * len(self.names)
        return Simulated(
            goodput=self.steps * self.planned.round_s / lasted_s,
            failures=self.failed,
            all_lost=self.all_lost,
            steps=self.steps,
            simulated_s=lasted_s,
            messages=self.messages / lasted_s + beats,
            bytes=self.bytes / lasted_s + beats * HEARTBEAT_BYTES,
        )

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now_s + delay_s, self.count, act, args))

    def start(self, name: str) -> None:
        self.count += 1
        session, incarnation = c.SessionId(self.count), m.Incarnation(self.count)
        identity = r.Identity("planned", m.GroupName(name), incarnation, f"{name}:1", "coordinator:1")
        process = _Process(name, session, r.Replica(identity, 60.0), name.startswith("spare"))
        self.processes[name] = self.sessions[session] = process
        self.heard[session] = self.now_s
        total = self.planned.groups * self.planned.shards_per_group
        self.post(process, r.Connected())
        self.deliver()
        self.post(process, r.Prepared(m.Step(0), 1, total_shards=total, spare=process.spare))
        self.after(self.rng.expovariate(self.planned.group_failures), self.kill, process)
        self.tick_soon()

    def rack_s(self) -> float:
        return self.rng.expovariate(1.0 / (self.planned.mtbf_node_days * DAY_S))

    def fail_rack(self, names: list[str]) -> None:
        for name in names:
            self.kill(self.processes[name])
        self.after(self.rack_s(), self.fail_rack, names)

    def kill(self, process: _Process) -> None:
        if process.dead:
            return
        name, process.dead = process.name, True
        self.failed += 1
        core, done = process.core, process.committed
        sign = v.Signed(
            group=name, rank=0, phase="compute", step=core.step, members=core.last_members, committed=done
        )
        for event in (sign, v.Ended(name, 0, v.SIGKILLED), v.RestSeen(name, ())):
            self.supervise(name, event)
        wait_s = max(0.0, self.launches[name].group(name).until_s - self.now_s)
        self.after(wait_s, self.supervise, name, v.Tick())
        self.tick_soon()
        if all(each.dead for each in self.processes.values()):
            self.begin_again()

    def begin_again(self) -> None:
        """No group holds the state: all start again, from a checkpoint that is half an interval old."""
        self.all_lost += 1
        interval_s = checkpoint_interval_s(exact_name(len(self.names) - self.planned.groups), self.planned)
        lost = round(interval_s / 2 / (self.planned.round_s + self.planned.exchange_s))
        self.steps -= min(self.steps, lost)
        self.job = durable.new("planned", self.job.options)
        alive = [process for process in self.sessions.values() if not process.dead]
        self.sessions, self.heard, self.meetings = {}, {}, {}
        self.mail.clear()
        for process in alive:
            process.dead = True
            self.start(process.name)

    def supervise(self, name: str, event: v.Event) -> None:
        """Let the group's supervisor decide; it has the machine replaced, and starts the group there."""
        self.launches[name], effects = supervisor.step(self.launches[name], event, self.now_s)
        for effect in effects:
            if isinstance(effect, v.Start):
                started = v.Started(name, (1,))
                self.launches[name], _ = supervisor.step(self.launches[name], started, self.now_s)
                self.after(self.planned.return_s, self.start, name)
        if self.launches[name].over:
            raise LaunchError(
                f"{name} fails before it can start: plan a longer --mtbf-node-days, or no --simulate."
            )

    def tick_soon(self, delay_s: float = 0.0) -> None:
        if not self.ticks:
            self.ticks = True
            self.after(delay_s, self.tick)

    def tick(self) -> None:
        self.ticks = False
        for session, process in self.sessions.items():
            if not process.dead:
                self.heard[session] = self.now_s
                if self.planned.round_s > LONG_S and process.core.quorum is not None:
                    self.mail.append((session, m.Heartbeat(moves=True), None))
        self.decide(c.Tick(self.heard))
        self.deliver()
        orphaned_s = self.job.orphaned_s
        if orphaned_s is not None and self.now_s - orphaned_s > 2 * self.planned.detect_s:
            self.begin_again()
        if not self.is_steady():
            gathers_s = self.job.ballot.gather_until_s  # further losses; then it acts at the next message
            self.tick_soon(
                self.planned.detect_s / 5 if gathers_s is None else max(0.0, gathers_s - self.now_s)
            )

    def is_steady(self) -> bool:
        """Whether the coordinator has acted on all deaths, and no group is on its way into the quorum."""
        job, member, ready = self.job, c.GroupPhase.MEMBER, c.GroupPhase.READY
        if job.quorum is None or job.ballot.lost or any(process.dead for process in self.sessions.values()):
            return False
        return all(
            each.phase is member or (each.spare and each.phase is ready) for each in job.groups.values()
        )

    def decide(self, event: c.Event) -> None:
        self.job, effects = coordinator.step(self.job, event, self.now_s)
        for effect in effects:
            if isinstance(effect, c.Send):
                self.mail.append((effect.session, None, effect.message))
            elif isinstance(effect, c.Close):
                self.sessions.pop(effect.session, None)
                self.heard.pop(effect.session, None)

    def deliver(self) -> None:
        while self.mail:
            session, up, down = self.mail.popleft()
            process = self.sessions.get(session)
            if process is None or process.dead:
                continue
            if up is not None:
                self.measure(up, None)
                self.decide(c.Received(session, up))
            elif down is not None:
                self.measure(down, process.base)
                process.base = wire.quorum_of(down) or process.base
                if isinstance(down, m.Commit):
                    process.committed = down.step + 1
                self.post(process, r.Received(down))

    def measure(self, message: m.GroupMessage | m.CoordinatorMessage, base: m.NewQuorum | None) -> None:
        """Count a message and its bytes; a message to many is encoded once."""
        last, last_base, _ = self.encoded
        if message is not last or base is not last_base:
            down = isinstance(message, m.CoordinatorMessage)
            proto = wire.coordinator_to_proto(message, base) if down else wire.group_to_proto(message)
            self.encoded = (message, base, proto.ByteSize())
        if self.now_s >= self.began_s:
            self.messages += self.weight
            self.bytes += self.weight * self.encoded[2]

    def post(self, process: _Process, event: r.Event) -> None:
        if process.dead:
            return
        process.core, effects = replica.step(process.core, event, self.now_s)
        for effect in effects:
            if isinstance(effect, r.Send):
                self.mail.append((process.session, effect.message, None))
        self.look(process)

    def look(self, process: _Process) -> None:
        if process.core.phase is r.Phase.VOTED and not process.core.digests_due:
            return  # it waits; to say for whom takes long
        match replica.directive(process.core):
            case r.TakeDigest(step):
                self.post(process, r.Digested(step, step + 1))
            case r.Attempt(quorum, step) if process.key != (quorum.quorum_id, step):
                process.key = (quorum.quorum_id, step)
                self.attempt(process, quorum, step)
            case r.Apply(_, step) if process.key != ("apply", step):
                process.key = ("apply", step)
                process.computed.clear()
                self.post(process, r.Applied(m.Step(step + 1)))
            case r.HealFrom(heal) if process.key != heal.heal_id:
                process.key = heal.heal_id
                self.after(self.planned.heal_s, self.post, process, r.Healed(heal.heal_id, heal.step))
            case r.Replay(heal, step) if process.key != (heal.heal_id, step, "replay"):
                process.key = (heal.heal_id, step, "replay")
                self.post(process, r.Replayed(heal.heal_id, m.Step(step + 1)))
            case r.Fail(failure):
                raise RuntimeError(f"{process.name} gives up: {failure.text}")
            case _:
                pass

    def attempt(self, process: _Process, quorum: m.NewQuorum, step: m.Step) -> None:
        meeting = self.meetings.get((quorum.quorum_id, step)) or self.open(process, quorum, step)
        missing = sum(shard not in process.computed for shard in meeting.shards[process.name])
        process.computed.update(meeting.shards[process.name])
        compute_s = meeting.steps * missing * self.planned.round_s / self.planned.shards_per_group
        self.after(compute_s, self.arrive, process, process.key, meeting)

    def open(self, process: _Process, quorum: m.NewQuorum, step: m.Step) -> _Meeting:
        shards = {str(member.group): member.shards for member in quorum.members}
        steps = 1
        if math.isinf(self.began_s) and len(shards) == self.planned.groups:
            self.began_s, self.failed = self.now_s, 0
        if self.is_steady() and not process.computed and not self.ticks:
            most = max(map(len, shards.values()))
            step_s = most * self.planned.round_s / self.planned.shards_per_group + self.planned.exchange_s
            steps = max(1, math.floor((self.queue[0][0] - self.now_s) / step_s)) if self.queue else 1
        # A spare that was relieved begins one more attempt of the former quorum, before its release arrives.
        self.meetings = {key: other for key, other in self.meetings.items() if key[1] == step}
        return self.meetings.setdefault((quorum.quorum_id, step), _Meeting(quorum.step, shards, steps))

    def arrive(self, process: _Process, key: object, meeting: _Meeting) -> None:
        if process.dead or process.key != key:
            return
        meeting.present.append(process)
        if len(meeting.present) == len(meeting.shards):
            self.after(meeting.steps * self.planned.exchange_s, self.exchanged, key, meeting)

    def exchanged(self, key: tuple[m.QuorumId, m.Step], meeting: _Meeting) -> None:
        """All hold the sum, unless a member has died meanwhile."""
        if any(process.dead or process.key != key for process in meeting.present):
            return
        self.weight = meeting.steps
        frontier = self.job.frontier
        for process in meeting.present:
            due = key[1] == meeting.first or process.core.step in process.core.digests_due.values()
            self.post(process, r.Exchanged(*key, digest=key[1] + 1 if due else None))
        self.deliver()
        self.weight = 1
        if self.job.frontier is not frontier and self.now_s >= self.began_s:
            self.steps += meeting.steps
