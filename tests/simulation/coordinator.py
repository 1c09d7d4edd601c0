"""One life of a coordinator: its real jobs, and a model of what carries their messages and writes their records.

A life may die before any effect. Another one may lead meanwhile: then the next record cannot be written, nothing
after it leaves, and this one ends.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from jaxft_coordinator.shell._jobs import Jobs
from jaxft_protocol import messages as m
from jaxft_protocol.coordinator import durable, machine
from jaxft_protocol.coordinator import job as j

from .clock import Clock
from .disk import JOB
from .guests import Guest
from .journal import Journal
from .rare import note_rare
from .stream import Stream
from .truth import Violation

if TYPE_CHECKING:
    from .process import Process
    from .world import World

TICK_S = 0.1


FORGET_AFTER_S = 0.4
T = TypeVar("T")


class Clocks:
    """The clocks of the machine of a coordinator."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return self._clock.now_s

    def time(self) -> float:
        return 1e9 + self._clock.now_s


class Poison:
    """An event that no job can handle, as if the coordinator had a bug."""


class Life:
    def __init__(self, world: "World", host: str) -> None:
        self.world = world
        self.host = host
        self.clock = Clock(world)
        self.clocks = Clocks(self.clock)
        self.number, opened = world.disk.open()
        self.term = opened.term
        setting = world.setting
        stored = not setting.memoryless
        options = j.Options(
            min(1, setting.min_replicas),
            setting.join_timeout_s,
            setting.heartbeat_timeout_s,
            founding_wait_s=setting.founding_wait_s,
            gather_s_per_member=setting.gather_s_per_member,
        )
        life = None if stored else int(world.random() * (1 << 31))
        self.dead = False
        self.crash_after: int | None = None  # effects
        self.crash_how = 0.0
        self.disk_held_s = 0.0  # the disk stands still until then
        self._streams: dict[j.SessionId, Stream] = {}
        self._guests: dict[j.SessionId, Guest] = {}
        self._greeted: set[j.SessionId] = set()
        self._closed: set[j.SessionId] = set()
        self._heard_s: dict[j.SessionId, float] = {}
        self._stopped_until_s = 0.0
        self._inbox: deque[Callable[[], None]] = deque()
        self._ran_s = self._awake_since_s = self.clock.now_s
        self._without_s = 0.0  # since when there is no quorum
        self._journal = Journal(self, opened.jobs) if stored else None
        self._jobs = Jobs(options, self, forget_after_s=FORGET_AFTER_S, clocks=self.clocks)
        self._jobs.begin(opened, self._journal, life)  # pyright: ignore[reportArgumentType]
        self._options = replace(options, term=self.term, durable=stored)
        self._none = durable.new(JOB, self._options)
        if JOB in opened.jobs:
            world.sometimes.note("restored")
        if world.tracing:
            world.note(f"coordinator {host} leads in term {self.term}")
        self._tick()

    @property
    def job(self) -> j.Job:
        return self._jobs.get(JOB) or self._none

    # ---- what comes in ----

    def accept(self, stream: Stream) -> j.SessionId:
        session = j.SessionId(len(self._streams) + len(self._guests) + 1)
        self._streams[session] = stream
        return session

    def welcome_guest(self, guest: Guest) -> j.SessionId:
        session = j.SessionId(len(self._streams) + len(self._guests) + 1)
        self._guests[session] = guest
        return session

    def hang_up_guest(self, guest: Guest, session: j.SessionId) -> None:
        if not self.dead and session not in self._closed:
            self._closed.add(session)
            self._jobs.step(guest.job, j.SessionClosed(session, "its connection closed"))

    def hear_guest(self, guest: Guest, session: j.SessionId, message: m.GroupMessage) -> None:
        if self.dead or session in self._closed:
            return
        if self._inbox or self.stands:
            self._inbox.append(lambda: self.hear_guest(guest, session, message))
            return
        if type(message) is m.Hello:
            self._greeted.add(session)
        self._jobs.step(guest.job, j.Received(session, message))
        if type(message) is m.Heartbeat:
            guest.receive(session, m.Alive())

    def receive(self, stream: Stream, message: m.GroupMessage | None) -> None:
        """Mail of a stream; None is its end."""
        if self.dead:
            return
        if self._inbox or self.world.now_s < self._stopped_until_s:
            self._inbox.append(lambda: self.receive(stream, message))
        elif message is None:
            self._closed.add(stream.id)
            self._handle(j.SessionClosed(stream.id, "its connection closed"))
        elif stream.id not in self._closed:
            if type(message) is m.Hello:
                self._greeted.add(stream.id)
            if type(message) is m.Vote and message.ok:
                self._check_compared(message)
            self._heard_s[stream.id] = self.clock.now_s
            self._handle(j.Received(stream.id, message))
            if type(message) is m.Heartbeat and stream.id not in self._closed:
                stream.down(m.Alive())

    def _check_compared(self, vote: m.Vote) -> None:
        """In the first step of a quorum all say from which state they have computed."""
        quorum = self.job.quorum
        if not self.world.setting.compares or quorum is None:
            return
        if (quorum.quorum_id, quorum.step) == (vote.quorum_id, vote.step) and vote.digest is None:
            raise Violation("the first step of a quorum is compared", f"{vote} has no fingerprint")

    def ask(self, event: j.DrainAsked | j.PauseAsked) -> None:
        """An operator asks for something. A coordinator that stands still does not hear it."""
        if self.dead or self.world.now_s < self._stopped_until_s:
            return
        if type(event) is j.PauseAsked:
            self._watched(event, lambda: self._jobs.pause(JOB, paused=event.paused))
            return
        assert type(event) is j.DrainAsked
        group = self.job.groups.get(event.group)
        refused = self._watched(event, lambda: self._jobs.drain(JOB, event.group, event.reason))
        if group is not None and not refused:
            self._later(lambda: self.world.incarnations[group.incarnation].told_to_drain())

    def evict(self, name: m.GroupName) -> bool:
        """An operator evicts a group for good; return whether there is one."""
        group = self.job.groups.get(name)
        if self.dead or self.stands or group is None:
            return False
        event = j.SessionClosed(group.session, "an operator evicted it")
        return not self._watched(event, lambda: self._jobs.evict(JOB, name, event.reason))

    def _later(self, act: Callable[[], None]) -> None:
        """Act once all that was decided is durable, as long as this life leads."""
        if self._journal is None:
            act()
        else:
            self._journal.put(JOB, None, lambda: act() if self.number == self.world.disk.life else None)

    def drains(self, holder: j.Holder) -> bool:
        """Whether this group was asked to leave."""
        group = self.job.groups.get(holder[0])
        return group is not None and group.holder == holder and group.draining

    def _tick(self) -> None:
        if self.dead:
            return
        self.world.after(self.clock.real(TICK_S), self._tick)
        if self.world.now_s < self._stopped_until_s:
            return
        if self.clocks.monotonic() - self._ran_s > self._options.heartbeat_timeout_s / 2:
            self.world.sometimes.note("suspended")
        self._end_without_pings()
        self._watched(j.Tick(), self._jobs.tick)

    def _end_without_pings(self) -> None:
        """As gRPC does it: a stream ends that has brought nothing for long, and whose process answers no ping."""
        least_s = self.clock.now_s - self._options.heartbeat_timeout_s
        if self._awake_since_s > least_s:
            return  # answers may be unread
        for session in self.sessions_of(JOB):
            if self._heard_s[session] < least_s and not self._streams[session].answers():
                self.world.sometimes.note("silent")
                self.receive(self._streams[session], None)

    def _handle(self, event: j.Event) -> None:
        if self._fails(event):
            self.world.sometimes.note("turn raised")
            event = Poison()  # pyright: ignore[reportAssignmentType]
        self._watched(event, lambda: self._jobs.step(JOB, event))

    def _watched(self, event: j.Event, act: Callable[[], T]) -> T:
        """Let the jobs do something, and check what that was."""
        self._ran_s = self.clocks.monotonic()
        before = self.job
        self.world.truth.known = self.world.disk.saved
        try:
            done = act()
        except machine.IllegalEvent as error:
            raise Violation("groups keep to the protocol", f"{error} ({event})") from error
        after = self.job
        if before.quorum is not None and after.quorum is None:
            self._without_s = self.world.now_s
        if after is before or type(event) is Poison or self.dead:
            return done
        if after.settings is not None or after.groups:
            self.world.truth.check_turn(before, after, event)
            note_rare(self, before, event)
        stands = after.quorum is None and after.finished is None
        if self.world.setting.harmless and type(event) is j.Tick and stands:
            gone = [group for name, group in before.groups.items() if name not in after.groups]
            if needed := [group.name for group in gone if group.phase is not j.GroupPhase.LEAVING]:
                raise Violation("no healthy group is evicted", f"needed: {needed}")
        return done

    def _fails(self, event: j.Event) -> bool:
        """Whether the coordinator has an error on this event: once in a seed, while the storm lasts.

        Later it could be the end of the job on which it fails, and those who have left do not come back.
        """
        if self.world.calm or (type(event) is j.Received and type(event.message) is m.Hello):
            return False
        self.world.raises_in -= self.world.setting.raises
        return self.world.raises_in == 0

    def refused(self, job: str) -> None:
        self._jobs.refused(job, ValueError("the store refuses it"))

    # ---- what goes out ----

    def do(self, effects: Sequence[j.Effect]) -> None:
        """Run the effects of an event, as the jobs ask."""
        try:
            self._do(effects)
        except Exception as error:  # the jobs would take it for a stream that cannot be written
            self.world.found = error

    def sessions_of(self, job: str) -> Sequence[j.SessionId]:
        ours = self._streams if job == JOB else {s: g for s, g in self._guests.items() if g.job == job}
        return sorted(session for session in ours if session in self._greeted and session not in self._closed)

    def takes_an_effect(self) -> bool:
        """Whether this life dies before its next effect."""
        if self.crash_after is None:
            return False
        if not self.crash_after:
            self.die()
            return True
        self.crash_after -= 1
        return False

    def _do(self, effects: Sequence[j.Effect]) -> None:  # noqa: C901 (a case for each effect)
        for effect in effects:
            if self.dead:
                return
            if type(effect) is j.Log:
                if self.world.tracing:
                    self.world.note(f"{self.host}.{self.term}: {effect.text}")
                continue
            if type(effect) is j.Persist and self._journal is not None:
                continue
            if self.takes_an_effect():
                return
            match effect:
                case j.Persist(record):
                    self.world.disk.append(self.number, record)
                case j.Send(session, message) if session in self._guests:
                    self._guests[session].receive(session, message)
                case j.Send(session, message):
                    self.send(session, message)
                case j.Close(session):
                    self._end(session)

    def send(self, session: j.SessionId, message: object) -> None:  # noqa: C901 (a check for each message)
        self.world.truth.check_told(message)  # pyright: ignore[reportArgumentType]
        if type(message) is m.Halted and message.kind is not m.HaltKind.FAILED:
            self._halt(message)
        elif type(message) is m.Halted and "coordinator failed" in message.reason:
            if "Poison" not in message.reason and "the store refuses it" not in message.reason:
                raise Violation("the cores raise nothing", message.reason)
        if type(message) is m.Pin:
            self.world.truth.asks_digest(message.heal_id)
        if type(message) is m.Heal:
            self.world.truth.check_heal(message, self._streams[session])
        if type(message) in (m.Evicted, m.Halted) and "the same edit" in message.reason:  # pyright: ignore
            self._check_edits(message.reason)  # pyright: ignore
            if type(message) is m.Halted:
                self.world.halted = self.world.over = True
        if type(message) is m.Evicted and self.world.setting.harmless:
            self._check_harmless(self._streams[session].process, message)
        if type(message) is m.Evicted and self.world.calm:
            self.world.evicted_in_calm = True
        if self.number != self.world.disk.life:
            self.world.sometimes.note("two coordinators")
        if session not in self._closed:
            self._streams[session].down(message)  # pyright: ignore[reportArgumentType]

    def _check_edits(self, reason: str) -> None:
        if not any(process.edits_otherwise for process in self.world.incarnations.values()):
            raise Violation("an edit is blamed only where one differs", reason)
        self.world.sometimes.note("edited otherwise")

    def _check_harmless(self, process: "Process", message: m.Evicted) -> None:
        """No group is evicted for taking its time; a group that is away for long may be set aside."""
        if process.over or process.dead:
            return  # the next of its name was quicker than the end of its stream
        # The coordinator's knowledge is one heartbeat old, and its messages are on their way.
        since_s = self.world.now_s - self._options.heartbeat_timeout_s
        if not message.aside or not (process.away or process.away_until_s > since_s):
            raise Violation("no healthy group is evicted", f"{process.name}: {message.reason}")
        self.world.sometimes.note("stood aside")

    def _halt(self, message: m.Halted) -> None:
        if message.kind is m.HaltKind.NONFINITE:
            # (A replaced coordinator may stand at an earlier step.)
            step = int(message.reason.split()[4])
            setting = self.world.setting
            if setting.nonfinite != "raise" or setting.bad_shard(step) is None:
                raise Violation("no halt without a reason", f"{message.reason}: {self.world.standing()}")
            self.world.sometimes.note("halt at means that are not finite")
            self.world.halted = self.world.over = True
            return
        if message.kind is m.HaltKind.RAISED:
            raised = {name for step, name in self.world.truth.raised if f"step {step} of" in message.reason}
            if len(raised) < 2:
                raise Violation("no halt without a reason", f"{message.reason}: {self.world.standing()}")
            self.world.sometimes.note("halt at a step that fails in every group")
            self.world.halted = self.world.over = True
            return
        # Groups whose states differ may have died since they reported them.
        heard = any(
            attempt.tainted and attempt.step >= len(self.world.truth.line) - 1
            for spans in self.world.hub.attempts.values()
            for attempt in spans.values()
        )
        living = [process for process in self.world.incarnations.values() if not process.dead]
        runs = {process.replica.history for process in living if process.replica.history}
        if self.world.setting.brings and len(runs) > 1:
            heard = (
                True  # one has brought the checkpoint of another run, of the same step as this one's state
            )
        if self.world.disk.is_new and not self.world.truth.same_bits:
            heard = (
                True  # a step that was decided before the memory was lost, and again after it, in other bits
            )
        if not heard and not any(process.is_flipped for process in living):
            raise Violation("no halt without a flipped bit", self.world.standing())
        self.world.sometimes.note("halt")
        self.world.halted = self.world.over = True

    def _end(self, session: j.SessionId) -> None:
        if session in self._closed:
            return
        self._closed.add(session)
        if session in self._guests:
            self._guests[session].receive(session, None)
        else:
            self._streams[session].down(None)

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
        self._awake_since_s = self.clock.now_s
        if self._journal is not None:
            self._journal.go_on()
        inbox, self._inbox = self._inbox, deque()
        while inbox and not self.dead:
            inbox.popleft()()

    def die(self) -> None:
        """kill -9. Of a record that is being written all, a part, or nothing is found afterwards."""
        if self.dead:
            return
        self.dead = True
        self._jobs.stand_down()
        note, journal = self.world.sometimes.note, self._journal
        if journal is not None and journal.writing and self.crash_how < 0.4:
            if journal.append():
                note("crash after durable")
        elif journal is not None and journal.writing:
            note("crash before durable")
            if self.crash_how > 0.7:
                note("torn record")
        elif journal is not None and journal.wrote:
            note("crash after durable")
        if self.world.tracing:
            self.world.note(f"coordinator {self.host}.{self.term} dies")
        for stream in self._streams.values():
            stream.break_off(group=self.crash_how < 0.9, coordinator=False)

    def fenced(self) -> None:
        """Another coordinator leads. Unsent messages are never sent."""
        if self.dead:
            return
        self.world.sometimes.note("fenced")
        if self._journal is not None:
            self._journal.writing = []
        self.crash_how = 0.0
        self.die()

    def tell_unwritten(self) -> None:
        """What no coordinator does: go on though the record was refused. For a planted bug."""
        if self._journal is not None:
            self._journal.tell_unwritten()

    def recover(self) -> None:
        """Calm begins: go on if this one leads."""
        self.crash_after = None
        self.disk_held_s = 0.0
        if self._stopped_until_s > self.world.now_s:
            self._stopped_until_s = self.world.now_s
            self._wake()
        if self.number != self.world.disk.life:
            self.world.after(self.world.between(0.0, 0.5), self.fenced)

    # ---- questions of the world ----

    @property
    def stands(self) -> bool:
        return self.world.now_s < self._stopped_until_s

    def needs(self, heal_id: int, donor: j.Holder) -> bool:
        """Whether a group still fetches from `donor` by this heal, as far as this coordinator knows."""
        groups = self.job.groups.values()
        return not self.dead and any(group.heal_id == heal_id and donor in group.donors for group in groups)

    def without_quorum_s(self, holder: j.Holder) -> float:
        """For how long this member has been without a quorum."""
        group = self.job.groups.get(holder[0])
        if self.dead or self.job.quorum is not None or group is None or group.holder != holder:
            return 0.0
        return self.world.now_s - self._without_s if group.phase is j.GroupPhase.MEMBER else 0.0

    def founders_without_quorum(self) -> list[str]:
        job = self.job
        if job.frontier is None or job.quorum is not None or job.last_quorum_id:
            return []
        return [group.name for group in job.groups.values() if group.phase is j.GroupPhase.MEMBER]

    def has_all(self, incarnations: set[int], spares: frozenset[str]) -> bool:
        """Whether all groups that can take part do so, and the others stand by."""
        job = self.job
        phases = (j.GroupPhase.MEMBER, j.GroupPhase.READY)
        there = {group.incarnation for group in job.groups.values() if group.phase in phases}
        if there != incarnations or job.quorum is None:
            return False
        return len(job.quorum.members) == len(incarnations) - len(spares) or bool(job.blamed)
