"""One incarnation of a group in `protocol_world.py`: its real core, and a model of its training thread."""

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxft_coordinator.core.messages import (
    GroupName,
    Heal,
    HealId,
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


class Process:
    """One incarnation of a group: its core, and a model of its training thread."""

    def __init__(self, world: "World", name: str, incarnation: int) -> None:
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
