"""One incarnation of a group in `protocol_world.py`: its real core, and a model of its training thread."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxft_coordinator.core.messages import (
    GroupName,
    Heal,
    HistoryId,
    Incarnation,
    NewQuorum,
    QuorumId,
    Step,
)
from protocol_links import Gate, Stream

from jaxft._replica import _core as replica_core
from jaxft._replica import _types as r

if TYPE_CHECKING:
    from protocol_world import World

TICK_S = 0.1
FETCH_TIMEOUT_S = 1.0
SAVES_EVERY = 4


@dataclass(frozen=True)
class Checkpoint:
    state: tuple[QuorumId, ...]
    history: HistoryId


class Process:
    """One incarnation of a group: its core, and a model of its training thread."""

    def __init__(self, world: "World", name: str, incarnation: int) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.history: list[QuorumId] = []
        self.flipped = 0  # names a flipped bit in the state
        self.flips_next = False
        self.computed: defaultdict[int, set[int]] = defaultdict(set)
        self.sums: set[tuple[QuorumId, Step]] = set()
        self.spare = name in world.spares
        self.pins: dict[int, Step] = {}
        self.log: dict[int, QuorumId] = {}
        self.dead = self.over = False
        self.token = 0  # counts what the training thread has begun; a callback of something older is void
        self._key: object = None
        self._applying = False
        self._fetches: Heal | None = None  # the heal for which something is being fetched or replayed
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
        world.soon(self._prepare, 0.3)

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

    def flip(self) -> None:
        """A bit of the next state changes by itself."""
        self.flips_next = True

    @property
    def is_flipped(self) -> bool:
        return not self.dead and (bool(self.flipped) or self.flips_next)

    def _prepare(self) -> None:
        """Begin with a fresh state, or with the newest checkpoint."""
        fresh = self.replica.frontier_held and self.world.rng.random() < 0.5
        if self.world.checkpoints and not fresh:
            self.history = list(self.world.checkpoints[-1].state)
        saved = self.world.checkpoints[-1].history if self.history else 0
        step, digest = Step(len(self.history)), f"state {self.history}"
        self.post(r.Prepared(step, digest, self.world.settings, history=HistoryId(saved), spare=self.spare))

    # ---- the session thread ----

    def from_stream(self, stream: Stream, event: r.Event) -> None:
        def read() -> None:
            if self._stream is stream:
                if isinstance(event, r.Disconnected):
                    self._stream = None
                    self._step(r.Disconnected(event.reason, busy=self._fetches is not None))
                else:
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
                case r.PinState(heal_id, step, _):
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
            case r.Replay(heal, step):
                self._heal = self._fetches = heal
                self._replay(heal, step, self.world.now_s + FETCH_TIMEOUT_S)
            case r.Fail(failure) if failure.error == "Diverged":
                assert self.world.coordinator.halted
            case r.Fail(failure) if failure.error == "CannotHeal" and not self.replica.history:
                # It was told that peers hold the state, so it brought none; then they all died.
                self.kill()
                self.world.launch(self.name)
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
        if self._fetches is not None:
            self._fetched(r.HealBroke(self._fetches.heal_id, "overtaken"))

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
        self.post(r.Exchanged(quorum_id, step, self.flipped))

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
            # One that missed a resume may still apply what counted before it.
            resumed = self.world.happened["resume"]
            assert resumed or self.world.decided[step] == quorum_id, (
                "what was applied is not what was decided"
            )
            if self.pins:
                self.log[step] = quorum_id
            self.history.append(quorum_id)
            self._fetches = None
            self._save()
            if self.flips_next:
                self.world.flips += 1
                self.flipped, self.flips_next = self.world.flips, False
            self.post(then)

        self.world.soon(lambda: self._thread_gate.let(done), 0.008)

    def _save(self) -> None:
        quorum = self.replica.quorum
        first = quorum is not None and quorum.members[0].group == self.name
        if first and not self.flipped and len(self.history) % SAVES_EVERY == 0:
            saved = Checkpoint(tuple(self.history), self.replica.job_history)
            if not self.world.checkpoints or len(saved.state) > len(self.world.checkpoints[-1].state):
                self.world.checkpoints.append(saved)

    def _fetch(self, heal: Heal, until_s: float) -> None:
        self._heal = self._fetches = heal
        donors = self._donors()
        keepers = [p for p in donors if p.pins.get(heal.heal_id) == heal.step and len(p.history) >= heal.step]
        if keepers:

            def fetched() -> None:
                donor = self.world.rng.choice(keepers)
                self.history, self.flipped = donor.history[: heal.step], donor.flipped
                assert self.world.happened["resume"] or self.history == self.world.decided[: heal.step]
                self._fetched(r.Healed(heal.heal_id, heal.step))

            self.world.soon(self.bound(fetched), 0.1)
        elif not donors or self.world.now_s > until_s:
            self._fetched(r.HealBroke(heal.heal_id, "no donor answers"))
        else:
            self.world.after(0.01, self.bound(lambda: self._fetch(heal, until_s)))

    def _fetched(self, event: r.Healed | r.HealBroke) -> None:
        self._fetches = None
        self.post(event)

    def _replay(self, heal: Heal, step: Step, until_s: float) -> None:
        donors = self._donors()
        logs = [p.log[step] for p in donors if heal.heal_id in p.pins and step in p.log]
        if logs:
            self._advance(logs[0], r.Replayed(heal.heal_id, Step(step + 1)))
        elif not donors or self.world.now_s > until_s:
            self._fetched(r.HealBroke(heal.heal_id, "no donor answers"))
        else:
            self.world.after(0.005, self.bound(lambda: self._replay(heal, step, until_s)))

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
        case r.Replay(heal, step):
            return ("replay", heal.heal_id, step)
        case r.Apply(quorum_id, step):
            return ("apply", quorum_id, step)
        case r.Over() | r.Fail():
            return ("end",)
        case r.Wait():
            return ("wait",)
