"""Where the training thread and the session's thread meet: events go one way, directives come back.

The session's thread publishes the replica's state, and the directive that follows from it. The training thread posts
events, waits for directives, and reports its progress. A new directive aborts the work under the old one. Once the
session has ended, each call from the training thread raises an error with the reason.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar, assert_never

from jaxft_protocol import values
from jaxft_protocol.messages import HistoryId, NewQuorum, QuorumId, Step
from jaxft_protocol.replica import machine
from jaxft_protocol.replica.deadlines import stranded
from jaxft_protocol.replica.state import (
    Apply,
    Attempt,
    Directive,
    DrainNow,
    Event,
    Fail,
    HealFrom,
    LeaveJob,
    Over,
    Phase,
    ReadCheckpoint,
    Replay,
    Replica,
    TakeDigest,
    Wait,
)

from jaxft._errors import ConfigurationError, JaxftError, SessionFailed
from jaxft._ranks._ranks import Leading
from jaxft._report import StepReport
from jaxft._session._loop import LoopThread, Watch
from jaxft._session._samples import Samples
from jaxft._transport._sockets import Abort

_log = logging.getLogger("jaxft")

# How often a waiting training thread checks that the loop is alive.
LOOK_S = 1.0
# The loop counts as stuck only after this many checks, however short the failure timeout.
LEAST_STUCK_LOOKS = 10

_T = TypeVar("_T")


class Mailbox:
    """The training thread's side of a session.

    Args:
        replica: the protocol's state at the start.
        ranks: the other ranks of the group, which get each directive too.
        handle: passes an event to the replica's core, in the session's thread.
    """

    def __init__(self, replica: Replica, ranks: Leading, handle: Callable[[Event], None]) -> None:
        self._replica = replica
        self._ranks = ranks
        self._handle = handle
        self.loop = LoopThread("jaxft-session", self.end)
        self._changed = threading.Condition()
        self._sequence = 0
        self._directive: Directive = machine.directive(replica)
        self._activity: tuple[tuple[object, ...], Abort] | None = None
        self.waits = False  # the training thread is waiting for a directive
        # The last attempt (quorum and step) whose shards are all computed. Sent with heartbeats.
        self.computed = (QuorumId(0), Step(0))
        # Also sent with heartbeats: whether the training thread is outside of a step, and its progress count.
        self.away = True
        self.progress = 0
        self.in_parts = False  # the training thread computes a shard that it may leave, such as a round's
        # For people who watch the coordinator, if it asks for it. Sent with each heartbeat.
        self.samples = Samples()
        self._closing = False
        self._ended: JaxftError | None = None  # why the session has ended
        self._cause: BaseException | None = None  # of `_ended`

    def post(self, event: Event) -> None:
        """Pass `event` to the replica's core, in the session's thread.

        Raises:
            SessionFailed: the session has ended.
            ConfigurationError: the session was closed.
        """
        self._check()
        try:
            self.loop.call(self._handle, event)
        except RuntimeError:  # the loop has closed in the meantime; `_ended` has the reason
            self._check()
            raise

    def drain(self) -> None:
        """Ask to leave the job at the next step boundary. A signal handler may call it: it takes no lock."""
        with contextlib.suppress(RuntimeError):  # the loop has closed, and the group has left already
            self.loop.call(self._handle, DrainNow(at_once=self.in_parts))

    def wait(self, seen: int) -> tuple[int, Directive]:
        """Return the first directive after number `seen` that is not `Wait`, with its number.

        Raises:
            SessionFailed: the session has ended.
        """
        self.waits = True
        found = self._await(lambda: self._taken(seen))
        assert found is not None
        self._ranks.direct(found[1])
        return found

    def wait_until(self, holds: Callable[[Replica], bool], timeout_s: float = math.inf) -> bool:
        """Wait until `holds` of the replica's state; return False if it does not within `timeout_s`.

        Raises:
            JaxftError: the session has ended.
        """
        return self._await(lambda: holds(self._replica) or None, timeout_s) is not None

    def wait_until_left(self, deadline_s: float, taken: Step | None) -> Step | None:
        """Wait until this group has left or the deadline has passed; return early with a step whose digest is needed.

        Ignores step `taken`: its digest is already on its way to the session's thread.

        Raises:
            SessionFailed: the session has ended.
        """

        def wanted() -> Step | None:
            directive = self._directive
            return directive.step if isinstance(directive, TakeDigest) and directive.step != taken else None

        def over() -> bool:
            return self._replica.phase in (Phase.LEFT, Phase.FAILED) or wanted() is not None

        self._await(over, max(0.0, deadline_s - time.monotonic()))
        step = wanted()
        if step is None:
            self._ranks.left()
        else:
            self._ranks.direct(TakeDigest(step))
        return step

    @contextlib.contextmanager
    def activity(self, directive: Directive, abort: Abort) -> Iterator[Abort]:
        """Within the context, set `abort` as soon as `directive` is replaced."""
        with self._changed:
            self._activity = (_key(directive), abort)
            self._stop_if_stale()
        try:
            yield abort
        finally:
            with self._changed:
                self._activity = None

    @contextlib.contextmanager
    def in_step(self, *, now: bool) -> Iterator[None]:
        """Within the context, heartbeats report whether the training thread is in a step.

        Outside of steps it may take any amount of time; docs/guarantees.md has the job's patience.
        """
        before, self.away = self.away, not now
        try:
            with self._ranks.in_step(now=now):
                yield
        finally:
            self.away = before

    def show(self, values: Mapping[str, float]) -> None:
        """Show values with this group's next sample."""
        self.samples.show(values)

    def sample(self, report: StepReport) -> None:
        """Count a call of the step in this group's next sample."""
        self.samples.add(report)

    def got_on(self) -> None:
        """The training thread has made progress in its step."""
        self.progress += 1

    @property
    def replica(self) -> Replica:
        """The protocol's state, a frozen value."""
        return self._replica

    @property
    def address(self) -> str:
        """Where the others reach this group: its ranks, separated by commas."""
        return self._replica.identity.address

    @property
    def quorum(self) -> NewQuorum | None:
        return self._replica.quorum

    @property
    def history(self) -> HistoryId:
        """The history of the job's commits, as far as this group knows."""
        return self._replica.job_history

    @property
    def frontier(self) -> tuple[Step | None, bool]:
        """The job's frontier when this group joined, and whether a group in the job held that state."""
        return self._replica.frontier_step, self._replica.frontier_held

    @property
    def all_computed(self) -> tuple[QuorumId, Step]:
        """The newest attempt for which all members are known to have computed their shards."""
        return self._replica.all_computed

    @property
    def cut_off(self) -> bool:
        """Whether this group has no coordinator for now."""
        return self._replica.phase in (Phase.OFFLINE, Phase.GREETING)

    @property
    def stranded(self) -> bool:
        """Whether this group has waited for a while for the job's state, and no group that holds it is connected."""
        replica = self._replica
        return stranded(replica) and time.monotonic() - replica.since_s > values.SLOW_WAIT_S

    def wants_digest(self, step: Step) -> bool:
        """Whether a joiner waits for the digest of state `step`, which is about to be overwritten."""
        return step in self._replica.digests_due.values()

    def publish(self, replica: Replica) -> None:
        """From the session's thread: show the new state, and wake the waiting thread if it changed."""
        directive = machine.directive(replica)
        moved = replica.phase is not self._replica.phase
        if replica.all_computed != self._replica.all_computed:
            self._ranks.all_computed(*replica.all_computed)
        with self._changed:
            self._replica = replica
            if directive != self._directive:
                self._directive = directive
                self._sequence += 1
                self._stop_if_stale()
                self._changed.notify_all()
            elif moved:
                self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether the session has ended."""
        return self._ended is not None

    def end(self, what: str, cause: BaseException | None = None) -> None:
        """The session has ended. From any thread; the first reason counts."""
        with self._changed:
            if self._ended is not None:
                return
            self._ended, self._cause = self._farewell(what, cause), cause
            self._stop_if_stale()
            self._changed.notify_all()
        if not self._closing:
            _log.error("[jaxft %s] %s", self._replica.identity.group, self._ended, exc_info=cause)
        self.loop.stop()

    def close(self) -> None:
        """End the session, and wait for its thread."""
        self._closing = True
        if not self.loop.close():
            _log.warning("%s does not stop; %s", self._name, self.loop.stands_at())

    def _await(self, done: Callable[[], _T | None], timeout_s: float = math.inf) -> _T | None:
        """Return the value of `done`, called with the lock, as soon as it is true; None after `timeout_s`.

        Logs long waits.

        Raises:
            JaxftError: the session has ended, or its loop is stuck.
        """
        waiting = values.LongWait(time.monotonic())
        watch = Watch(self.loop)
        while True:
            left_s = waiting.began_s + timeout_s - time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: self._ended or done(), max(0.0, min(LOOK_S, left_s)))
                self._check()
                if found := done():
                    return found
            now_s = time.monotonic()
            if now_s - waiting.began_s >= timeout_s:
                return None
            looks = watch.looks_without_a_turn()
            if looks * LOOK_S > max(self._replica.failure_timeout_s, LEAST_STUCK_LOOKS * LOOK_S):
                self.end(f"its loop has made no progress for {looks * LOOK_S:.0f} s; {self.loop.stands_at()}")
            elif (waited_s := waiting.to_say(now_s)) is not None:
                self._say_for_whom(waited_s)

    def _say_for_whom(self, waited_s: float) -> None:
        replica, directive = self._replica, self._directive
        reason = directive.reason if isinstance(directive, Wait) else "the session's next directive"
        # Shown also by a program that configures no logging: the address may be wrong.
        offline = replica.phase in (Phase.OFFLINE, Phase.GREETING)
        level = logging.WARNING if offline else logging.INFO
        _log.log(level, "[jaxft %s] waiting %.0f s for %s", replica.identity.group, waited_s, reason)

    def _check(self) -> None:
        if self._ended is not None:
            # A new exception each time: a raised exception collects the tracebacks of all callers.
            raise type(self._ended)(str(self._ended)) from self._cause

    @property
    def _name(self) -> str:
        me = self._replica.identity
        return f"the session of group {me.group!r} of job {me.job!r} with the coordinator {me.coordinator}"

    def _farewell(self, what: str, cause: BaseException | None) -> JaxftError:
        if self._closing:
            text = f"{self._name} is closed: its Manager's `with` block has ended. Call the step inside the block."
            return ConfigurationError(text)
        reason = what if cause is None else f"{what} with {type(cause).__name__}: {cause}"
        return SessionFailed(
            f"{self._name} has ended: {reason}. The job continues without this group. Restart the group: it heals "
            "from the others. If this happens again, report it with the log, which has the traceback.",
        )

    def _taken(self, seen: int) -> tuple[int, Directive] | None:
        """The directive, if it is newer than `seen` and not `Wait`. Needs the lock."""
        if self._sequence <= seen or isinstance(self._directive, Wait):
            return None
        self.waits = False
        return self._sequence, self._directive

    def _stop_if_stale(self) -> None:
        if self._activity is None:
            return
        key, abort = self._activity
        if self._ended is not None and not abort.is_set:
            abort.set(str(self._ended))
        elif key != _key(self._directive) and not abort.is_set:
            abort.set("the work was replaced by a newer directive")


def _key(directive: Directive) -> tuple[object, ...]:
    """The part of a directive that must stay the same for an activity to continue."""
    match directive:
        case Attempt(quorum, step):
            return ("attempt", quorum.quorum_id, step)
        case HealFrom(heal):
            return ("heal", heal.heal_id)
        case Replay(heal):
            return ("replay", heal.heal_id)
        case Apply(quorum_id, step):
            return ("apply", quorum_id, step)
        case TakeDigest(step):
            return ("digest", step)
        case ReadCheckpoint():
            return ("read",)
        case Wait() | Over() | LeaveJob() | Fail():
            return ("none",)
        case _:
            assert_never(directive)
