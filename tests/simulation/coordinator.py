"""One life of a coordinator: its machine, and a model of its shell.

The shell's rule is that of `Persist`: whatever follows a record waits until that is durable. A life may die before
any effect. Another one may lead meanwhile: then the next record cannot be written, nothing after it leaves, and this
one ends.
"""

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxft_protocol.coordinator import durable, machine
from jaxft_protocol.coordinator.job import (
    Close,
    DrainAsked,
    Effect,
    Event,
    GroupPhase,
    Holder,
    Job,
    Log,
    Options,
    PauseAsked,
    Persist,
    Received,
    Record,
    Send,
    SessionClosed,
    SessionId,
    Suspended,
    Tick,
)
from jaxft_protocol.messages import (
    Alive,
    Evicted,
    GroupMessage,
    Halted,
    HaltKind,
    Heal,
    HealId,
    Heartbeat,
    Hello,
    Pin,
    Vote,
)

from .clock import Clock
from .disk import JOB
from .stream import Stream
from .truth import Violation

if TYPE_CHECKING:
    from .process import Process
    from .world import World

TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Told:
    """An operator hears that this group is drained."""

    holder: Holder


class Life:
    def __init__(self, world: "World", host: str) -> None:
        self.world = world
        self.host = host
        self.clock = Clock(world)
        self.number, self.term, saved = world.disk.open()
        setting = world.setting
        stored = not setting.memoryless
        life = self.term if stored else int(world.random() * (1 << 31))
        self._options = Options(
            min(1, setting.min_replicas),
            setting.join_timeout_s,
            setting.heartbeat_timeout_s,
            self.term,
            durable=stored,
            heals_from=HealId(life << durable.HEALS_PER_LIFE_BITS),
            founding_wait_s=setting.founding_wait_s,
            gather_s_per_member=setting.gather_s_per_member,
        )
        self.job = durable.new(JOB, self._options)
        if saved is not None:
            self.job = durable.restored(saved, self._options, self.clock.now_s)
            world.sometimes.note("restored")
        self.dead = False
        self.crash_after: int | None = None  # so many effects
        self.crash_how = 0.0
        self.disk_held_s = 0.0  # the disk stands still until then
        self._streams: dict[SessionId, Stream] = {}
        self._closed: set[SessionId] = set()
        self._heard_s: dict[SessionId, float] = {}
        self._stopped_until_s = 0.0
        self._ran_s = self.clock.now_s
        self._inbox: deque[tuple[Stream, GroupMessage | None]] = deque()
        self._outbox: deque[Effect | Told] = deque()
        self._writing: Record | None = None
        self._writes_since_s = 0.0
        self._wrote = False  # the last thing done was to write a record
        self._without_s = 0.0  # since when there is no quorum
        if world.tracing:
            world.note(f"coordinator {host} leads in term {self.term}")
        self._tick()

    # ---- what comes in ----

    def accept(self, stream: Stream) -> SessionId:
        session = SessionId(len(self._streams) + 1)
        self._streams[session] = stream
        return session

    def receive(self, stream: Stream, message: GroupMessage | None) -> None:
        """What a stream has brought; None is its end."""
        if self.dead:
            return
        if self._inbox or self.world.now_s < self._stopped_until_s:
            self._inbox.append((stream, message))
        elif message is None:
            self._closed.add(stream.id)
            self._handle(SessionClosed(stream.id, "its connection closed"))
        elif stream.id not in self._closed:
            if type(message) is Heartbeat:
                stream.down(Alive())
            if type(message) is Vote and message.ok:
                self._check_compared(message)
            self._handle(Received(stream.id, message))

    def _check_compared(self, vote: Vote) -> None:
        """In the first step of a quorum all say from which state they have computed."""
        quorum = self.job.quorum
        if not self.world.setting.compares or quorum is None:
            return
        if (quorum.quorum_id, quorum.step) == (vote.quorum_id, vote.step) and vote.digest is None:
            raise Violation("the first step of a quorum is compared", f"{vote} has no fingerprint")

    def ask(self, event: DrainAsked | PauseAsked) -> None:
        """An operator asks for something. A coordinator that stands still does not hear it."""
        if not self.dead and self.world.now_s >= self._stopped_until_s:
            self._handle(event)
            if type(event) is DrainAsked and event.group in self.job.groups:
                self._outbox.append(Told(self.job.groups[event.group].holder))
                self._do()

    def drains(self, holder: Holder) -> bool:
        """Whether this group was asked to leave."""
        group = self.job.groups.get(holder[0])
        return group is not None and group.holder == holder and group.draining

    def _tick(self) -> None:
        if self.dead:
            return
        self.world.after(self.clock.real(TICK_S), self._tick)
        if self.world.now_s < self._stopped_until_s:
            return
        self._note_run()
        waits_s = 0.0 if self._writing is None else self.world.now_s - self._writes_since_s
        if waits_s > self._options.heartbeat_timeout_s / 5:
            return  # groups wait for a word from here: their silence says nothing
        if self.job.groups or not self.job.empty:
            self._handle(Tick(self._heard_s))

    def _note_run(self) -> None:
        """As `Jobs` does it."""
        before_s, self._ran_s = self._ran_s, self.clock.now_s
        if self._ran_s - before_s > self._options.heartbeat_timeout_s / 2:
            self.world.sometimes.note("suspended")
            self._handle(Suspended(self._ran_s - before_s))

    def _handle(self, event: Event) -> None:
        self._note_run()
        before = self.job
        if type(event) is Received and event.session not in before.sessions:
            if type(event.message) is not Hello:
                return  # of a session that the machine has closed; the shell learns that next
        if type(event) is Received:
            self._heard_s[event.session] = self.clock.now_s
        if self._fails():
            self._fail(event)
            return
        try:
            self.job, effects = machine.step(before, event, self.clock.now_s)
        except machine.IllegalEvent as error:
            raise Violation("groups keep to the protocol", f"{error} ({event})") from error
        if before.quorum is not None and self.job.quorum is None:
            self._without_s = self.world.now_s
        if self.job is not before:
            self.world.truth.check_turn(before, self.job, event)
            self._note_rare(before, event)
            if self.job.empty:
                self.job = durable.emptied(self.job)
        if self.world.setting.harmless and self.job.quorum is None:
            self._check_needed(effects)
        if effects:
            self._outbox.extend(effects)
            self._do()

    def _fails(self) -> bool:
        """Whether the coordinator has an error on this event: once in a seed, while the storm lasts.

        Later it could be the end of the job on which it fails, and those who have left do not come back.
        """
        if self.world.calm:
            return False
        self.world.raises_in -= self.world.setting.raises
        return self.world.raises_in == 0

    def _fail(self, event: Event) -> None:
        """As `Jobs` does it: the groups are notified, and the job waits for them as its last record has it."""
        self.world.sometimes.note("turn raised")
        self.world.raises_in = -1
        sessions = set(self.job.sessions)
        if type(event) is Received:
            sessions.add(event.session)
        self.job = durable.begun_again(self.job, self.clock.now_s)
        halted = Halted("the coordinator failed on this job", HaltKind.FAILED)
        for session in sorted(sessions):
            self._outbox += [Send(session, halted), Close(session)]
        self._do()

    # ---- what goes out ----

    def _do(self) -> None:
        """Do what is to be done, up to a record that must be durable first."""
        while self._outbox and self._writing is None and not self.dead:
            if self.world.now_s < self._stopped_until_s:
                return
            effect = self._outbox.popleft()
            if isinstance(effect, Told):
                if self.number == self.world.disk.life:
                    self.world.incarnations[effect.holder[1]].told_to_drain()
                continue
            if type(effect) is Log:
                if self.world.tracing:
                    self.world.note(f"{self.host}.{self.term}: {effect.text}")
                continue
            if type(effect) is Persist and self._options.durable:
                self._writing, self._writes_since_s = effect.record, self.world.now_s
            if self.crash_after is not None:
                if not self.crash_after:
                    self._outbox.appendleft(effect)
                    self.die()
                    return
                self.crash_after -= 1
            match effect:
                case Persist(record) if not self._options.durable:
                    self.world.disk.append(self.number, record)
                case Persist(record):
                    held_s = max(0.0, self.disk_held_s - self.world.now_s)
                    delay_s = held_s + self.world.random() * self.world.setting.disk_s
                    self.world.after(delay_s, self._written, record)
                case Send(session, message):
                    self._wrote = False
                    self.send(session, message)
                case Close(session):
                    self._end(session)

    def send(self, session: SessionId, message: object) -> None:
        self.world.truth.check_told(message)  # pyright: ignore[reportArgumentType]
        if type(message) is Halted and message.kind is not HaltKind.FAILED:
            self._halt(message)
        if type(message) is Pin:
            self.world.truth.asks_digest(message.heal_id)
        if type(message) is Heal:
            self.world.truth.check_heal(message, self._streams[session])
        if type(message) in (Evicted, Halted) and "the same edit" in message.reason:  # pyright: ignore
            self._check_edits(message.reason)  # pyright: ignore
            if type(message) is Halted:
                self.world.halted = self.world.over = True
        if type(message) is Evicted and self.world.setting.harmless:
            self._check_harmless(self._streams[session].process, message)
        if type(message) is Evicted and self.world.calm:
            self.world.evicted_in_calm = True
        if self.number != self.world.disk.life:
            self.world.sometimes.note("two coordinators")
        if session not in self._closed:
            self._streams[session].down(message)  # pyright: ignore[reportArgumentType]

    def _check_edits(self, reason: str) -> None:
        if not any(process.edits_otherwise for process in self.world.incarnations.values()):
            raise Violation("an edit is blamed only where one differs", reason)
        self.world.sometimes.note("edited otherwise")

    def _check_needed(self, effects: tuple[Effect, ...]) -> None:
        """A group that is away keeps its place where the job cannot go on without it."""
        for effect in effects:
            if type(effect) is Send and type(effect.message) is Evicted and effect.message.aside:
                raise Violation("no healthy group is evicted", f"needed: {effect.message.reason}")

    def _check_harmless(self, process: "Process", message: Evicted) -> None:
        """No group is evicted for taking its time; one that is away for long may be set aside."""
        if process.over or process.dead:
            return  # the next of its name was quicker than the end of its stream
        # What is known of it is one heartbeat old, and what is said to it is on its way.
        since_s = self.world.now_s - self._options.heartbeat_timeout_s
        if not message.aside or not (process.away or process.away_until_s > since_s):
            raise Violation("no healthy group is evicted", f"{process.name}: {message.reason}")
        self.world.sometimes.note("stood aside")

    def _halt(self, message: Halted) -> None:
        if message.kind is HaltKind.NONFINITE:
            # (One that was replaced may stand at an earlier step.)
            step = int(message.reason.split()[4])
            setting = self.world.setting
            if setting.nonfinite != "raise" or setting.bad_shard(step) is None:
                raise Violation("no halt without a reason", f"{message.reason}: {self.world.standing()}")
            self.world.sometimes.note("halt at means that are not finite")
            self.world.halted = self.world.over = True
            return
        if message.kind is HaltKind.RAISED:
            raised = {name for step, name in self.world.truth.raised if f"step {step} of" in message.reason}
            if len(raised) < 2:
                raise Violation("no halt without a reason", f"{message.reason}: {self.world.standing()}")
            self.world.sometimes.note("halt at a step that fails in every group")
            self.world.halted = self.world.over = True
            return
        # Those whose states differ may have died since they told of it.
        told = any(
            attempt.tainted and attempt.step >= len(self.world.truth.line) - 1
            for spans in self.world.hub.attempts.values()
            for attempt in spans.values()
        )
        living = [process for process in self.world.incarnations.values() if not process.dead]
        runs = {process.replica.history for process in living if process.replica.history}
        if self.world.setting.brings and len(runs) > 1:
            told = True  # one has brought the checkpoint of another run, of the same step as this one's state
        if self.world.disk.is_new and not self.world.truth.same_bits:
            told = (
                True  # a step that was decided before the memory was lost, and again after it, in other bits
            )
        if not told and not any(process.is_flipped for process in living):
            raise Violation("no halt without a flipped bit", self.world.standing())
        self.world.sometimes.note("halt")
        self.world.halted = self.world.over = True

    def _end(self, session: SessionId) -> None:
        if session in self._closed:
            return
        self._closed.add(session)
        self._streams[session].down(None)

    def _written(self, record: Record) -> None:
        """The disk has done with `record`."""
        if self.dead:
            return
        if not self.world.disk.append(self.number, record):
            self.fenced()
            return
        self._wrote = True
        self._writing = None
        if self.world.now_s >= self._stopped_until_s:
            self._do()

    # ---- faults ----

    def stop(self, seconds: float) -> None:
        """SIGSTOP, or a machine that is too busy: nothing is read, nothing is sent."""
        until_s = self.world.now_s + seconds
        if until_s > self._stopped_until_s:
            self._stopped_until_s = until_s
            self.world.at(until_s, self._wake)

    def _wake(self) -> None:
        if self.dead or self.world.now_s < self._stopped_until_s:
            return
        self._do()
        inbox, self._inbox = self._inbox, deque()
        while inbox and not self.dead:
            self.receive(*inbox.popleft())

    def die(self) -> None:
        """kill -9. Of a record that is being written all, a part, or nothing is found afterwards."""
        if self.dead:
            return
        self.dead = True
        note = self.world.sometimes.note
        if self._writing is not None and self.crash_how < 0.4:
            if self.world.disk.append(self.number, self._writing):
                note("crash after durable")
        elif self._writing is not None:
            note("crash before durable")
            if self.crash_how > 0.7:
                note("torn record")
        elif self._wrote and self._outbox:
            note("crash after durable")
        if self.world.tracing:
            self.world.note(f"coordinator {self.host}.{self.term} dies")
        for stream in self._streams.values():
            stream.break_off(group=self.crash_how < 0.9, coordinator=False)

    def fenced(self) -> None:
        """Another one leads. What was not told is never told."""
        if self.dead:
            return
        self.world.sometimes.note("fenced")
        self._writing = None
        self.crash_how = 0.0
        self.die()

    def tell_unwritten(self) -> None:
        """What no coordinator does: go on though the record was refused. For a planted bug."""
        self._writing = None
        self._do()

    def recover(self) -> None:
        """Calm begins: go on if this one leads."""
        self.crash_after = None
        self.disk_held_s = 0.0
        if self._stopped_until_s > self.world.now_s:
            self._stopped_until_s = self.world.now_s
            self._wake()
        if self.number != self.world.disk.life:
            self.world.after(self.world.between(0.0, 0.5), self.fenced)

    # ---- what the world asks ----

    @property
    def stands(self) -> bool:
        return self.world.now_s < self._stopped_until_s

    def needs(self, heal_id: int, donor: Holder) -> bool:
        """Whether a group still fetches from `donor` by this heal, as far as this coordinator knows."""
        groups = self.job.groups.values()
        return not self.dead and any(group.heal_id == heal_id and donor in group.donors for group in groups)

    def without_quorum_s(self, holder: Holder) -> float:
        """For how long this member has been without a quorum."""
        group = self.job.groups.get(holder[0])
        if self.dead or self.job.quorum is not None or group is None or group.holder != holder:
            return 0.0
        return self.world.now_s - self._without_s if group.phase is GroupPhase.MEMBER else 0.0

    def founders_without_quorum(self) -> list[str]:
        job = self.job
        if job.frontier is None or job.quorum is not None or job.last_quorum_id:
            return []
        return [group.name for group in job.groups.values() if group.phase is GroupPhase.MEMBER]

    def has_all(self, incarnations: set[int], spares: frozenset[str]) -> bool:
        """Whether all groups that can take part do so, and the others stand by."""
        job = self.job
        phases = (GroupPhase.MEMBER, GroupPhase.READY)
        there = {group.incarnation for group in job.groups.values() if group.phase in phases}
        if there != incarnations or job.quorum is None:
            return False
        return len(job.quorum.members) == len(incarnations) - len(spares) or bool(job.blamed)

    def _note_rare(self, before: Job, event: Event) -> None:
        """Count the rare paths that this turn has taken."""
        after, note = self.job, self.world.sometimes.note
        if after.term > max(before.term, self.term):
            note("term learned")
        if len(after.proven) < len(before.proven) and after.proven:
            note("forgotten")
        if after.quorum is not before.quorum:
            self._note_quorum(before, event)
        if after.ballot.told and not before.ballot.told:
            note("all computed")
        if after.blamed is not before.blamed and type(event) is Tick and before.quorum is not None:
            if before.ballot.deadline_s is None:
                note("evicted by progress")
        if type(event) is Tick:
            if after.frontier is not None and after.quorum is None and after.groups:
                note("below min_replicas")
            if len(after.groups) < len(before.groups) and self._is_silent(before):
                note("silent")
            for name, (times, _) in after.blamed.items():
                if times > 1 and name in after.groups and after.groups[name].phase is GroupPhase.READY:
                    note("held back")
        if len(after.distrusted) > len(before.distrusted) and not self.world.halted:
            note("odd one out")

    def _is_silent(self, before: Job) -> bool:
        now_s, timeout_s = self.clock.now_s, self._options.heartbeat_timeout_s
        gone = before.groups.keys() - self.job.groups.keys()
        return any(now_s - self._heard_s[before.groups[name].session] > timeout_s for name in gone)

    def _note_quorum(self, before: Job, event: Event) -> None:
        after, note = self.job, self.world.sometimes.note
        quorum, old = after.quorum, before.quorum
        spares = self.world.setting.spares
        if quorum is None:
            return
        frontier = after.frontier
        again = old is not None and old.step == quorum.step and before.frontier is frontier
        failures = before.ballot.failures
        if again and any(failure.accused for failure in failures):
            note("retry after accusations")
            blames = Counter((failure.voter, name) for failure in failures for name in failure.accused)
            if any((name, voter) in blames for voter, name in blames) and after.blamed is not before.blamed:
                note("mutual accusation")
        if again and type(event) is Tick and before.ballot.deadline_s is not None:
            note("grace ended by a tick")
        if any(member.group in spares for member in quorum.members):
            note("spare called up")
        for group in after.groups.values():
            was = before.groups.get(group.name)
            if (
                group.spare
                and was is not None
                and was.phase is GroupPhase.MEMBER
                and group.phase is GroupPhase.READY
            ):
                note("spare relieved")
            if (
                group.phase is GroupPhase.MEMBER
                and was is not None
                and was.phase is GroupPhase.READY
                and frontier is not None
                and group.step < frontier.step
            ):
                note("nearly there")
