"""Other jobs of the same coordinator, of one group each: they come, train, finish, and are forgotten."""

from typing import TYPE_CHECKING

from jaxft_protocol.coordinator.job import SessionId
from jaxft_protocol.messages import GroupName, Incarnation, Step
from jaxft_protocol.replica import machine as core
from jaxft_protocol.replica import state as r

from .truth import Violation

if TYPE_CHECKING:
    from .coordinator import Life
    from .world import World

STEPS = 6
TURN_S = 0.02
TICK_S = 0.1
# No guest waits longer for its coordinator, which the storm may stop or kill, than this.
PATIENCE_S = 12.0


class Guest:
    """One job after the other, each of one group with the real core. Its stream is prompt."""

    def __init__(self, world: "World", number: int) -> None:
        self.world = world
        self._number = number
        self._jobs = 0
        self._begin()
        self._tick()

    def _begin(self) -> None:
        self._jobs += 1
        self.job = f"guest-{self._number}-{self._jobs}"
        identity = r.Identity(self.job, GroupName("group-0"), Incarnation(self._jobs), "guest:1", "c0,c1")
        now_s = self.world.now_s
        self.replica = r.Replica(identity, 1e9, since_s=now_s, offline_since_s=now_s)
        self.life: Life | None = None
        self.session: SessionId | None = None
        self._moved_s = now_s
        self.world.after(0.0, self._connect)

    def _connect(self) -> None:
        life = self.world.leader
        if life is None or life.stands:
            self.world.after(0.05, self._connect)
            return
        self.life = life
        self.session = life.welcome_guest(self)
        self._step(r.Connected())
        if self.replica.prepared is None:
            self._step(r.Prepared(Step(0), 7, {}, 1, total_shards=1))

    def receive(self, session: SessionId, message: object) -> None:
        """The coordinator's messages on a session of this guest; None is its end."""
        if session != self.session:
            return
        if message is None:
            self.session = None
            self.world.after(0.0, self._ended)
        else:
            self.world.after(0.001, self._hear, session, message)

    def _hear(self, session: SessionId, message: object) -> None:
        if session == self.session:
            self._step(r.Received(message))  # pyright: ignore[reportArgumentType]

    def _ended(self) -> None:
        if self.replica.phase in (r.Phase.LEFT, r.Phase.LEAVING, r.Phase.FAILED, r.Phase.FINISHED):
            self._begin()
        elif self.session is None and self.replica.phase is not r.Phase.OFFLINE:
            self._step(r.Disconnected("its coordinator ended the session"))

    def _step(self, event: r.Event) -> None:
        before = core.directive(self.replica)
        self.replica, effects = core.step(self.replica, event, self.world.now_s)
        for effect in effects:
            if isinstance(effect, r.Send) and self.life is not None and self.session is not None:
                self.life.hear_guest(self, self.session, effect.message)
            elif isinstance(effect, r.Close) and self.life is not None and self.session is not None:
                self.life.hang_up_guest(self, self.session)
                self.session = None
                self.world.after(0.0, self._ended)
            elif isinstance(effect, r.Dial):
                self.world.after(0.05, self._connect)
        directive = core.directive(self.replica)
        if directive != before:
            self._moved_s = self.world.now_s
            self.world.after(TURN_S, self._turn, directive)

    def _turn(self, directive: r.Directive) -> None:
        if core.directive(self.replica) != directive:
            return
        match directive:
            case r.Attempt(_, step) if step >= STEPS:
                self.world.sometimes.note("guest finished")
                self._step(r.LeaveNow(finished=True))
            case r.Attempt(quorum, step):
                self._step(r.Exchanged(quorum.quorum_id, step, 7))
            case r.Apply(_, step):
                self._step(r.Applied(Step(step + 1)))
            case r.TakeDigest(step):
                self._step(r.Digested(step, 7))
            case _:
                pass

    def _tick(self) -> None:
        world = self.world
        world.after(TICK_S, self._tick)
        if self.life is not None and self.life.dead and self.session is not None:
            self.session = None
            self._ended()
        if self.session is not None:
            self._step(r.Tick())
        if self.replica.failure is not None:
            self.session = None
            self._begin()
        if world.calm and world.calm_for_s > PATIENCE_S and world.now_s - self._moved_s > PATIENCE_S:
            raise Violation("a job never stops another", f"{self.job} waits: {core.directive(self.replica)}")
