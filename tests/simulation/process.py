"""One incarnation of a group: its real core, and a model of its session with the coordinator."""

from collections import deque
from typing import TYPE_CHECKING

from jaxft_protocol.messages import GroupName, Incarnation, Join, Pinned, Welcome
from jaxft_protocol.replica import machine as core
from jaxft_protocol.replica import state as r

from .clock import Clock
from .stream import Stream
from .trainer import Trainer
from .truth import Violation

if TYPE_CHECKING:
    from .world import World

SIGKILLED = -9
_TAKES_PART = (r.Phase.WORKING, r.Phase.VOTED, r.Phase.APPLYING)


class Process(Trainer):
    def __init__(self, world: "World", name: str, incarnation: int) -> None:
        clock = Clock(world)
        identity = r.Identity(
            "job", GroupName(name), Incarnation(incarnation), f"{name}:1", ",".join(world.hosts)
        )
        now_s = clock.now_s
        replica = r.Replica(identity, world.setting.failure_timeout_s, since_s=now_s, offline_since_s=now_s)
        super().__init__(world, name, incarnation, replica, clock)
        self.crash_after: int | None = None  # effects
        self.stream: Stream | None = None
        self._stopped_until_s = 0.0
        self._answers = False  # pings, while the session's thread stands still
        # How many steps had been committed when an operator heard that this group is drained.
        self.drains_since: int | None = None
        self.put_out = False  # by an operator
        self._term = 0  # the highest that it received
        self._welcomed = False
        self._away_since_s = world.now_s  # until a coordinator has welcomed it
        self._away_s = 0.0  # how long it was last
        self._inbox: deque[tuple[Stream | None, r.Event]] = deque()

    def start(self) -> None:
        if self.world.tracing:
            self._note("starts")
        self.world.after(self.world.random() * 0.01, self._connect, self.world.leader_host)
        self._tick()
        self.crew.start()
        self.world.after(self.world.random() * 0.2, self._run, self._prepare)

    def would_keep_the_job(self, other: "Process") -> bool:
        """Whether the job's state is safe with this process if `other` dies now, whatever is still under way.

        It must hold the frontier and take part; and if `other` has voted ok on the next step, so must it have.
        """
        now_s, replica = self.world.now_s, self.replica
        if (
            self.dead
            or self.leaving
            or self.stream is None
            or self.stream.broken
            or self.stuck_at is not None
        ):
            return False
        if now_s < self._stopped_until_s or now_s < self._stands_until_s or self.crash_after is not None:
            return False
        if now_s < self.away_until_s or self.drains:
            return False
        if replica.phase not in _TAKES_PART or replica.vote != other.replica.vote:
            return False
        return len(self.history) + (replica.phase is r.Phase.APPLYING) >= len(self.world.truth.line)

    @property
    def drains(self) -> bool:
        """Whether it is to end, or has begun to."""
        leader = self.world.leader
        asked = leader is not None and leader.drains(
            (self.replica.identity.group, self.replica.identity.incarnation)
        )
        return asked or self.replica.drains or self.replica.drained or self.drains_since is not None

    def told_to_drain(self) -> None:
        """The operator who asked for its drain hears that it is decided."""
        if self.drains_since is None and not self.dead:
            self.drains_since = self.world.truth.commits

    # ---- faults ----

    def kill(self, *, others_later: bool = False) -> None:
        """End the group's ranks; with `others_later`, rank 0 alone, and the others once they notice."""
        if self.dead:
            return
        self.dead = True
        self.exit_status = SIGKILLED
        self.crew.die(later=others_later)
        self.token += 1
        if self.world.tracing:
            self._note("dies")
        self.world.hub.leave(self)
        if self.stream is not None:
            self.stream.break_off(group=False, coordinator=True)
        if self._fetches is not None:
            self.world.sometimes.note("joiner died mid-heal")
        if self.pins and any(self._is_donor_of(other) for other in self.world.processes.values()):
            self.world.sometimes.note("donor died mid-heal")

    @property
    def is_stopped(self) -> bool:
        return self.world.now_s < self._stopped_until_s and not self._answers

    def stop(self, seconds: float) -> None:
        """SIGSTOP: the whole process stands still; its mail waits."""
        self.hang(seconds)
        self.deafen(seconds, answers=False)

    def deafen(self, seconds: float, *, answers: bool) -> None:
        """The session's thread stands still; with `answers`, its process lives, and gRPC answers pings."""
        self._answers = answers
        until_s = self.world.now_s + seconds
        if until_s > self._stopped_until_s:
            self._stopped_until_s = until_s
            if seconds < float("inf"):
                self.world.at(until_s, self._wake)

    def recover(self) -> None:
        """Calm begins."""
        self.crew.recover()
        self.crash_after = None
        self.sticks_next = self.raises_next = self.ends_next = False
        self.pauses_s = 0.0
        self.away_until_s = min(self.away_until_s, self.world.now_s)
        if self.stuck_at is None:
            self._stands_until_s = min(self._stands_until_s, self.world.now_s)
        if self.world.now_s < self._stopped_until_s < float("inf"):
            self._stopped_until_s = self.world.now_s
            self._wake()

    # ---- the session's thread ----

    def from_stream(self, stream: Stream, event: r.Event) -> None:
        if self.dead:
            return
        if self._inbox or self.world.now_s < self._stopped_until_s:
            self._inbox.append((stream, event))
        else:
            self._read(stream, event)

    def post(self, event: r.Event) -> None:
        if self.dead:
            return
        if self._inbox or self.world.now_s < self._stopped_until_s:
            self._inbox.append((None, event))
        else:
            self._step(event)

    def _wake(self) -> None:
        if self.world.now_s < self._stopped_until_s:
            return
        while self._inbox and not self.dead:
            stream, event = self._inbox.popleft()
            if stream is None:
                self._step(event)
            else:
                self._read(stream, event)

    def _read(self, stream: Stream, event: r.Event) -> None:
        if self.stream is not stream:
            return
        if type(event) is r.Received and type(event.message) is Welcome and event.message.term >= self._term:
            self._term = event.message.term
            self._welcomed = True
            self._away_s = self.world.now_s - self._away_since_s
        if type(event) is r.Disconnected:
            self.stream = None
            if self._welcomed:
                silent_since_s = stream.silent_since_s
                self._away_since_s = self.world.now_s if silent_since_s is None else silent_since_s
                self._welcomed = False
            event = r.Disconnected(event.reason, busy=not self._waits)
        self._step(event)

    def _step(self, event: r.Event) -> None:
        if self.dead:
            return
        before = self.replica
        self.replica, effects = core.step(before, event, self.clock.now_s)
        replica = self.replica
        if replica is before and not effects:
            return
        if before.last_quorum_id > replica.last_quorum_id:
            raise Violation("quorum ids grow", f"{self.name}: {replica.last_quorum_id}")
        for effect in effects:
            if self.crash_after is not None and type(effect) is not r.Log:
                if not self.crash_after:
                    self.kill()
                    return
                self.crash_after -= 1
            self._do(effect)
        if replica.phase is not before.phase:
            self._note_phase(before, replica)
        elif (
            replica.quorum is before.quorum
            and replica.heal is before.heal
            and replica.frontier_step == before.frontier_step
            and replica.failure is before.failure
            and core.directive(replica) == core.directive(before)
        ):
            return
        if replica.phase is before.phase is r.Phase.FOLLOWING and replica.heal is not before.heal:
            self.world.sometimes.note("new donors")
        self._look_soon()

    def _do(self, effect: r.Effect) -> None:  # noqa: C901 (a case for each effect)
        match effect:
            case r.Send(message):
                if self.stream is not None:
                    if type(message) is Join and self.stream.life.job.term < self._term:
                        raise Violation(
                            "no group follows a replaced coordinator", f"{self.name} in {self._term}"
                        )
                    if type(message) is Pinned:
                        self.world.truth.tells_digest(message.heal_id)
                    self.stream.up(message)
            case r.Dial(delay_s, address):
                delay_s = self.clock.real(delay_s) + self.world.random() * 0.01
                self.world.after(delay_s, self._connect, address)
            case r.Close(reason):
                self._hang_up(reason)
            case r.PinState(heal_id, number, _, stripe):
                held = len(self.history) + self._applying
                if number < held:  # the state to keep, or to log, is gone
                    raise Violation("a pin comes before the commit", f"{self.name} at {held}: pin {number}")
                self.pins[heal_id] = number
                self.stripes[heal_id] = stripe
                self.crew.pin(heal_id, number)
            case r.ReleasePin(heal_id):
                self._release(heal_id)
            case r.Log(text):
                if self.world.tracing:
                    self._note(f"logs: {text}")

    def _note_phase(self, before: r.Replica, after: r.Replica) -> None:
        if self.world.tracing:
            self._note(f"is {after.phase.value} at {after.step}")
        note = self.world.sometimes.note
        if before.phase is r.Phase.GREETING and after.phase is r.Phase.APPLYING and not before.commit_heard:
            note("welcome commits")
        elif after.phase is r.Phase.FOLLOWING and after.heal is not None and after.heal.log_only:
            note("stands by")
        elif before.phase is r.Phase.FOLLOWING and after.phase is r.Phase.JOINING:
            note("heal failed half-way")

    def _connect(self, address: str) -> None:
        world = self.world
        if self.dead or self.replica.phase is not r.Phase.OFFLINE:
            return
        life = world.hosts.get(address)
        if (
            life is None
            or life.dead
            or world.cables.is_cut(self.name)
            or world.cables.is_blocked(self.name, address)
        ):
            self.post(r.Connected())
            seconds = 0.3 if world.cables.is_cut(self.name) else 0.002
            world.after(seconds, self._unreachable)
            return
        self.stream = Stream(world, self, life)
        self.post(r.Connected())

    def _unreachable(self) -> None:
        if self.stream is None:
            self.post(r.Disconnected("unreachable", busy=not self._waits))

    def _hang_up(self, reason: str) -> None:
        stream = self.stream
        if stream is not None:
            if reason.startswith("a coordinator of term"):
                self.world.sometimes.note("lower term refused")
            stream.hang_up()
            self.world.after(0.0, self.from_stream, stream, r.Disconnected(reason))

    def _tick(self) -> None:
        if self.dead:
            return
        world = self.world
        world.after(self.clock.real(world.setting.heartbeat_timeout_s / 5), self._tick)
        if world.now_s >= self._stopped_until_s:
            if self.replica.busy and self._waits:
                self.post(r.Idle())
            self.post(r.Tick(self._computed, self.away, self.progress))

    def _release(self, heal_id: int) -> None:
        if self.stream is not None and self.stream.life.needs(
            heal_id, (self.replica.identity.group, self.replica.identity.incarnation)
        ):
            raise Violation("donors keep the pinned state", f"{self.name} lets go of heal {heal_id}")
        self.crew.release(heal_id)
        self.pins.pop(heal_id, None)
        oldest = min(self.pins.values(), default=None)
        self.log = {step: by for step, by in self.log.items() if oldest is not None and step >= oldest}

    def without_quorum_s(self) -> float:
        if self.stream is None or self.stream.broken or self.world.now_s < self._stopped_until_s:
            return 0.0
        identity = self.replica.identity
        return self.stream.life.without_quorum_s((identity.group, identity.incarnation))

    # ---- the end ----

    def ends(self) -> None:
        self.crew.break_off()
        self.crew.direct(None)  # until then the other ranks have served their parts to joiners
        self.dead = self.over = True
        if self.world.tracing:
            self._note("exits")
        self.world.hub.leave(self)
        if self.stream is not None:
            self.stream.break_off(group=True, coordinator=True)
        self.world.ended()

    def fails(self, failure: r.Failure) -> None:
        """An exception of the user ends the process; some exceptions should never be seen."""
        world = self.world
        if self.world.tracing:
            self._note(f"fails: {failure.kind.value}: {failure.text}")
        # Its name is taken: by a process that still runs, or whose death the coordinator has not noticed.
        second = failure.kind is r.FailureKind.EVICTED and "takes its place" in failure.text
        second = second and any(p.name == self.name and p is not self for p in world.incarnations.values())
        other_program = self.edits_otherwise and "the same edit" in failure.text
        # It learned that peers hold the state, so it brought none; then they all died.
        too_fresh = failure.kind is r.FailureKind.CANNOT_HEAL and self._has_fresh_state()
        # The job was founded again while its holders were away, and the coordinator's disk did not know of them.
        too_late = world.disk.is_new and self._away_s > 0.85 * world.setting.founding_wait_s
        unknown = world.setting.brings or world.disk.has_lied or too_late
        foreign = failure.kind is r.FailureKind.JOIN_REFUSED and unknown and "another history" in failure.text
        stopped = failure.kind is r.FailureKind.JOB_HALTED and "coordinator failed" in failure.text
        second = second or (self.put_out and "an operator evicted it" in failure.text)
        if not (second or other_program or too_fresh or foreign or stopped):
            raise Violation("no group is turned away", f"{self.name}: {failure.kind.value}: {failure.text}")
        if foreign:
            others = self.replica.history
            world.checkpoints = [
                checkpoint for checkpoint in world.checkpoints if checkpoint.history != others
            ]
        status = 78 if failure.kind is r.FailureKind.JOIN_REFUSED else 75
        self.kill()
        self.exit_status = status
        if world.processes[self.name] is self:
            world.launch(self.name)

    def _has_fresh_state(self) -> bool:
        """No group may take its state: it is none of this job's, the first of a founding undone, or distrusted."""
        if not self.replica.history:
            return True
        return self.replica.counts_as_fresh and (not self.replica.step or self.is_distrusted())

    def is_distrusted(self) -> bool:
        """Whether the job takes no state of this group: it was not the majority's, or was fed by such a one."""
        leader = self.world.leader
        return leader is not None and (self.name, self.incarnation) in leader.job.distrusted

    def _is_donor_of(self, other: "Process") -> bool:
        heal = other._fetches
        return heal is not None and any(donor.incarnation == self.incarnation for donor in heal.donors)

    def _note(self, text: str) -> None:
        self.world.note(f"{self.name}#{self.incarnation} {text}")
