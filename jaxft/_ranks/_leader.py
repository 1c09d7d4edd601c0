"""Rank 0 of a group of several processes."""

import contextlib
import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from jaxft_protocol.messages import Step, Stripe
from jaxft_protocol.proto import ranks_pb2 as pb
from jaxft_protocol.ranks import leader as core
from jaxft_protocol.ranks import messages
from jaxft_protocol.ranks.messages import Decided, Directed, Order, StopWork, Verdict
from jaxft_protocol.replica.state import Directive
from jaxft_protocol.values import LongWait

from jaxft._base._room import start_thread
from jaxft._errors import SessionFailed
from jaxft._ranks._directives import decode_outcome, encode_failure, encode_order
from jaxft._ranks._link import Life, Link, Silence, Traffic, rank_message
from jaxft._ranks._outside import Outside
from jaxft._ranks._ranks import CameApart, Operation, Settled
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import Abort

_log = logging.getLogger("jaxft")

# How often a wait for another rank checks whether that one has ended, or has to be stopped.
_LOOK_S = 0.1


class Leader:
    """The links of rank 0 to all other ranks. `decide`, `operation` and `direct` are for the training thread."""

    rank = 0

    def __init__(
        self,
        connections: Sequence[Connection],
        *,
        lives: Sequence[Life] = (),
        silence_s: float,
        stuck_s: float,
        name: str,
    ) -> None:
        self.size = 1 + len(connections)
        self._name = name
        self._silence_s = silence_s
        # Guards the core: events of the training thread and of all links change it.
        self._changed = threading.Condition()
        self._core = core.Leader.of(self.size, stuck_s=stuck_s)
        self._events = 0  # that have happened
        self._abort: Abort | None = None  # of the current operation
        self._saved: list[queue.SimpleQueue[pb.Saved]] = [queue.SimpleQueue() for _ in connections]
        self._closed = False
        # The group gets on with its step, though rank 0 only waits; set before the first step.
        self.on_progress: Callable[[], None] | None = None
        # Asks the job to let this group leave, for another rank got SIGTERM; set before the first step.
        self.on_drain: Callable[[], None] | None = None
        # Reports to the job that the user's code has raised in another rank; set before the first step.
        self.on_raised: Callable[[Step, str, int | None], Settled] | None = None
        # Where rank 0's own program stands; and where other ranks have reported theirs.
        self._outside = Outside()
        self._away = ["" for _ in connections]
        self._addresses = ["" for _ in connections]
        beat = pb.LeaderMessage(beat=pb.Beat()).SerializeToString
        self._links = [
            Link(
                connection,
                Traffic(rank_message, functools.partial(self._hear, rank), beat),
                Silence(silence_s),
                life=life,
                other=rank,
                name=name,
            )
            for rank, (connection, life) in enumerate(itertools.zip_longest(connections, lives), 1)
        ]

    def start(self) -> None:
        for link in self._links:
            link.start()

    def addresses(self, timeout_s: float) -> list[str]:
        """Where the other groups reach the other ranks, in their order.

        Raises:
            TimeoutError: a rank has not sent its address in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: all(self._addresses), timeout_s):
                silent = 1 + self._addresses.index("")
                raise TimeoutError(f"rank {silent} has not sent its address for {timeout_s:g} s")
            return list(self._addresses)

    def direct(self, directive: Directive) -> None:
        """Tell all ranks what comes next."""
        self._order(Directed(directive))

    def left(self) -> None:
        """Tell all ranks that the group has left its job."""
        self._order(Directed(None))

    def in_step(self, *, now: bool) -> contextlib.AbstractContextManager[None]:
        return self._outside.in_step(now=now)

    def decide(self, what: str, /, *, value: bool) -> bool:
        self._order(Decided(what, value))
        return value

    def choose(self, what: str, number: int) -> int:
        self._order(Decided(what, number=number))
        return number

    def save_begins(self, number: int, folder: str) -> str:
        self._send(pb.LeaderMessage(save_begins=pb.SaveBegins(number=number, folder=folder)))
        return folder

    def save_ends(self, number: int, failure: str) -> Sequence[str]:
        failures = [
            f"rank {rank}: {text}" for rank in range(1, self.size) if (text := self._saved_by(rank, number))
        ]
        return [*filter(None, [failure]), *failures]

    def await_loss(self) -> None:
        deadline_s = time.monotonic() + self._silence_s
        for link in self._links:
            link.await_loss(max(0.0, deadline_s - time.monotonic()))

    @contextlib.contextmanager
    def operation(self, what: str, abort: Abort) -> Iterator[Operation]:
        with self._changed:
            self._abort = abort
        self._happened(core.Begins(what, abort.is_set))
        try:
            yield _Led(self)
        finally:
            self._happened(core.Leaves())
            with self._changed:
                self._abort = None

    def awaits_others(self, *, now: bool) -> None:
        self._happened(core.Awaits(now))

    def settle(self, own: Verdict) -> Verdict:
        """Collect all outcomes, and tell all ranks the verdict."""
        event: core.Event = core.Done(own)
        while True:
            seen, effects = self._happened(event)
            for effect in effects:
                if (verdict := self._do(effect)) is not None:
                    return verdict
            with self._changed:
                self._changed.wait_for(lambda seen=seen: self._events != seen, _LOOK_S)
            event = core.Looks()

    # ---- the session's thread ----

    def pin(self, heal_id: int, step: int, *, log_only: bool, stripe: Stripe) -> None:
        pin = pb.PinState(heal_id=heal_id, step=step, log_only=log_only)
        pin.stripe, pin.stripes = stripe.number, stripe.count
        self._send(pb.LeaderMessage(pin_state=pin))

    def release(self, heal_id: int) -> None:
        message = pb.LeaderMessage()
        message.release_pin.heal_id = heal_id
        self._send(message)

    def all_computed(self, quorum_id: int, step: int) -> None:
        message = pb.LeaderMessage()
        message.all_computed.quorum_id, message.all_computed.step = quorum_id, step
        self._send(message)

    def close(self, error: str = "") -> None:
        """Tell the other ranks that this one ends, and wait for their ends. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._send(pb.LeaderMessage(group_ends=pb.GroupEnds(error=error)))
        for link in self._links:
            link.close(error)

    def _send(self, message: pb.LeaderMessage) -> None:
        for link in self._links:
            link.send(message)

    def _order(self, order: Order | StopWork) -> None:
        self._send(encode_order(order))

    def _happened(self, event: core.Event) -> tuple[int, tuple[core.Effect, ...]]:
        """Tell the core; return how many events it has had, and its effects for the training thread."""
        now_s = time.monotonic()
        with self._changed:
            if (abort := self._abort) is not None and abort.is_set:
                self._core, _ = core.step(self._core, core.Redirected(), now_s)
            try:
                self._core, effects = core.step(self._core, event, now_s)
            except messages.CameApart as error:
                raise CameApart(str(error)) from error
            for effect in effects:
                if isinstance(effect, core.Interrupt) and abort is not None:
                    abort.set(effect.reason)
                elif isinstance(effect, core.GetsOn) and self.on_progress is not None:
                    self.on_progress()
            self._events += 1
            self._changed.notify_all()
            return self._events, effects

    def _do(self, effect: core.Effect) -> Verdict | None:
        """For the training thread. Return the verdict once there is one."""
        match effect:
            case core.Tell(message):
                self._order(message)
            case core.Conclude(verdict):
                return verdict
            case core.GiveUp(rank, error):
                raise SessionFailed(
                    f"Rank {rank} of this group has ended{f' with {error}' if error else ''}, while rank 0 is at "
                    f"{self._core.what!r}. Every rank must run the same number of steps."
                )
            case core.Lose(rank, silent_s):
                self._links[rank - 1].lost(f"no progress in {self._core.what!r} for {silent_s:.0f} s")
            case core.Mention(rank, waited_s):
                waits = (self._name, waited_s, rank, self._core.what)
                _log.info("[jaxft %s] waiting %.0f s for rank %d in %r", *waits)
            case core.Interrupt() | core.GetsOn():
                pass  # done at once, by the thread that learned of it
        return None

    def _saved_by(self, rank: int, number: int) -> str:
        """Wait as long as that rank's disk takes; if the rank is gone, this process ends. Return why it failed."""
        waiting = LongWait(time.monotonic())
        while True:
            with contextlib.suppress(queue.Empty):
                if (found := self._saved[rank - 1].get(timeout=_LOOK_S)).number == number:
                    return found.failure
            if (waited_s := waiting.to_say(time.monotonic())) is not None:
                _log.info("[jaxft %s] waiting %.0f s for rank %d to write", self._name, waited_s, rank)
            if self._core.ranks[rank - 1].ended is not None and self._saved[rank - 1].empty():
                raise SessionFailed(
                    f"Rank {rank} of this group has ended before its part of a checkpoint was written."
                )

    def _hear(self, rank: int, message: pb.RankMessage) -> None:
        match message.WhichOneof("kind"):
            case "beat":
                self._happened(core.Moved(rank, message.beat.progress))
                self._look_outside(rank, message.beat)
                if message.beat.drains and self.on_drain is not None:
                    self.on_drain()
            case "hello":
                with self._changed:
                    self._addresses[rank - 1] = message.hello.address
                    self._changed.notify_all()
            case "outcome":
                self._happened(core.Reported(rank, decode_outcome(message.outcome)))
            case "saved":
                self._saved[rank - 1].put(message.saved)
            case "raised":
                # The training thread may be in a collective that never returns.
                raised = message.raised
                start_thread(self._settle_raised, rank, raised, name=f"jaxft-raised-{rank}")
            case "group_ends":
                self._happened(core.Ended(rank, message.group_ends.error))
                self._links[rank - 1].expect_end(message.group_ends.error)
            case other:
                raise ConnectionError(f"it sent a message of kind {other!r}, which rank 0 does not expect")

    def _look_outside(self, rank: int, beat: pb.Beat) -> None:
        """Say which rank is outside of the step while another waits for it there."""
        if beat.away and beat.away != self._away[rank - 1]:
            _log.warning("[jaxft %s] rank %d %s", self._name, rank, beat.away)
        self._away[rank - 1] = beat.away
        # All other ranks wait together for rank 0: the last one speaks for all.
        if rank == self.size - 1 and (text := self._outside.to_say(f"rank {rank}", beat.waits_s)):
            _log.warning("[jaxft %s] rank 0 %s", self._name, text)

    def _settle_raised(self, rank: int, raised: pb.Raised) -> None:
        """Report another rank's exception to the job, and tell that rank what became of the step."""
        settled = Settled()
        if self.on_raised is not None:
            shard = raised.shard if raised.HasField("shard") else None
            try:
                settled = self.on_raised(Step(raised.step), f"{raised.text} (in rank {rank})", shard)
            except Exception:  # top level of the thread; the other rank waits for an answer
                _log.exception("[jaxft %s] could not report the error of rank %d", self._name, rank)
        failure = None if settled.failure is None else encode_failure(settled.failure)
        message = pb.Settled(failure=failure, done=settled.done)
        self._links[rank - 1].send(pb.LeaderMessage(settled=message))


class _Led:
    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def settle(self, failure: str = "", accused: tuple[str, ...] = (), note: str = "") -> Verdict:
        return self._leader.settle(Verdict(failure, accused, note))
