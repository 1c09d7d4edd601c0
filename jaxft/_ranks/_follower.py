"""A rank of a group of several processes that is not its rank 0.

It has no stream to the coordinator. `Follower` stands in for rank 0's session; events that the
runner posts go nowhere, because rank 0 posts the same for the whole group.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from jaxft_protocol.messages import HistoryId, NewQuorum, QuorumId, Step, Stripe
from jaxft_protocol.proto import ranks_pb2 as pb
from jaxft_protocol.ranks import follower as core
from jaxft_protocol.ranks import messages
from jaxft_protocol.ranks.messages import Decided, Directed, Judged, Verdict
from jaxft_protocol.replica.state import Attempt, Directive, Event, TakeDigest
from jaxft_protocol.values import LongWait
from jaxft_protocol.wire import WireError

from jaxft._errors import SessionFailed
from jaxft._ranks._directives import decode_failure, decode_order, encode_outcome
from jaxft._ranks._link import Life, Link, Silence, Traffic, leader_message
from jaxft._ranks._outside import Awaited, Outside
from jaxft._ranks._ranks import CameApart, Operation, Settled
from jaxft._report import StepReport
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import Abort

_log = logging.getLogger("jaxft")

_LOOK_S = 0.5
_M = TypeVar("_M")
_O = TypeVar("_O", Directed, Decided, Judged)


class Pins(Protocol):
    def pin(self, heal_id: int, step: int, *, log_only: bool, stripe: Stripe) -> None: ...
    def release(self, heal_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """A rank among the ranks of its group; `address`: where the same rank of other groups reaches it."""

    rank: int
    size: int
    address: str


class Follower:
    """The link to rank 0, in place of a session with the coordinator.

    Args:
        connection: to rank 0; owned.
        life: the second connection to it, for signs of life.
        place: of this process in its group.
        pins: keeps states for joiners, on rank 0's order.
        silence: how long rank 0 may be silent; before its first message it waits for the slowest other rank.
        name: this group's name, for logs.
    """

    def __init__(
        self,
        connection: Connection,
        place: Place,
        pins: Pins,
        silence: Silence,
        *,
        life: Life | None = None,
        name: str,
    ) -> None:
        self.rank = place.rank
        self.size = place.size
        self.address = place.address
        self.quorum: NewQuorum | None = None
        self.history = HistoryId(0)
        self.frontier: tuple[Step | None, bool] = (None, False)
        self.all_computed = (QuorumId(0), Step(0))
        self.computed = (QuorumId(0), Step(0))
        self.in_parts = False
        self._name = name
        self._pins = pins
        # Guards the core, which events of the training thread and of the link change.
        self._changed = threading.Condition()
        self._core = core.Follower(place.rank)
        self._abort: Abort | None = None  # of the current operation
        self._undecodable: WireError | None = None  # an order, which the training thread takes as its error
        self._settled: queue.SimpleQueue[pb.Settled] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[pb.SaveBegins] = queue.SimpleQueue()
        self._progress = 0
        self._outside = Outside()
        self._takes_directive = False  # the training thread waits for rank 0's next one
        self._awaited, self._waits, self._away = Awaited(), Awaited(), ""
        self._drains = False
        self._silence_s = silence.seconds
        self._ended: str | None = None
        self._closed = False
        self._link = Link(
            connection,
            Traffic(leader_message, self._hear, self._beat),
            silence,
            life=life,
            other=0,
            name=name,
        )
        self._link.send(pb.RankMessage(hello=pb.RankHello(rank=place.rank, address=place.address)))
        self._link.start()

    # ---- as a session ----

    def post(self, event: Event) -> None:
        """Rank 0 posts for the whole group."""

    def drain(self) -> None:
        """Have rank 0 leave the job for the whole group. A signal handler may call it: it takes no lock."""
        self._drains = True

    def _beat(self) -> bytes:
        waits_s = self._waits.seconds(is_awaited=self._takes_directive)
        beat = pb.Beat(
            progress=self._progress, drains=self._drains, waits_s=waits_s, away=self._look_outside()
        )
        return pb.RankMessage(beat=beat).SerializeToString()

    def _look_outside(self) -> str:
        """Where this rank's program stands, while rank 0 waits for it in the step."""
        orders = self._core.orders
        awaited_s = self._awaited.seconds(is_awaited=bool(orders) and orders[0] != Directed(None))
        if text := self._outside.to_say("rank 0", awaited_s):
            self._away = text
            _log.warning("[jaxft %s] rank %d %s", self._name, self.rank, text)
        elif awaited_s == 0.0:
            self._away = ""
        return self._away

    def wait(self, seen: int) -> tuple[int, Directive]:
        """Return the next directive.

        Raises:
            SessionFailed: rank 0 has ended.
        """
        self._takes_directive = True
        try:
            directive = self._take(Directed, "", "rank 0's next directive").directive
        finally:
            self._takes_directive = False
        if directive is None:
            raise SessionFailed("Rank 0 has left the job, but this rank calls the step once more.")
        if isinstance(directive, Attempt):
            self.quorum, self.history = directive.quorum, directive.quorum.history
        return seen + 1, directive

    def activity(self, _directive: Directive, abort: Abort, /) -> contextlib.AbstractContextManager[Abort]:
        return contextlib.nullcontext(abort)

    def in_step(self, *, now: bool) -> contextlib.AbstractContextManager[None]:
        return self._outside.in_step(now=now)

    def got_on(self) -> None:
        """Bytes have moved, or a shard is computed: rank 0 waits for this rank as long as it gets on."""
        self._progress += 1

    @property
    def cut_off(self) -> bool:
        return False  # rank 0 decides

    def wants_digest(self, _step: Step, /) -> bool:
        return False  # rank 0 decides

    def wait_until_left(self, _deadline_s: float, _taken: Step | None, /) -> Step | None:
        """Return the next step whose digest is needed; None once the group has left the job."""
        directive = self._take(Directed, "", "the group to leave its job").directive
        if directive is None:
            return None
        if not isinstance(directive, TakeDigest):
            raise SessionFailed(
                f"This rank's loop has ended, but rank 0 continues with {type(directive).__name__}: every rank must "
                "run the same number of steps."
            )
        return directive.step

    def show(self, values: Mapping[str, float]) -> None:
        """Rank 0 shows values for the whole group."""

    def sample(self, report: StepReport) -> None:
        """Rank 0 reports steps for the whole group."""

    def close(self, error: str = "") -> None:
        """Tell rank 0 that this rank ends, and wait for its end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._link.send(pb.RankMessage(group_ends=pb.GroupEnds(error=error)))
        self._link.close(error)

    # ---- as a rank ----

    def decide(self, what: str, /, *, value: bool) -> bool:  # noqa: ARG002 (rank 0's counts)
        return self._take(Decided, what, f"rank 0 to decide {what!r}").value

    def choose(self, what: str, _number: int, /) -> int:
        return self._take(Decided, what, f"rank 0 to choose {what!r}").number

    def awaits_others(self, *, now: bool) -> None:
        """Rank 0 reports for the whole group."""

    def save_begins(self, number: int, _folder: str, /) -> str:
        message = self._next(self._saves, f"rank 0 to begin save {number}")
        if message.number != number:
            raise CameApart(
                f"The ranks of this group have come apart: rank 0 begins save {message.number}, but rank {self.rank} "
                f"save {number}. Every rank must run the same program, with the same calls of the step."
            )
        return message.folder

    def save_ends(self, number: int, failure: str) -> Sequence[str]:
        self._link.send(pb.RankMessage(saved=pb.Saved(number=number, failure=failure)))
        return ()

    def await_loss(self) -> None:
        self._link.await_loss(self._silence_s)

    def report_raised(self, step: Step, text: str, shard: int | None, *, timeout_s: float) -> Settled:
        """Tell rank 0 that the user's code has raised in an attempt, and wait for what becomes of the step.

        Rank 0 answers in time. With `timeout_s` 0 there is no wait.

        Raises:
            SessionFailed: rank 0 has ended.
        """
        self._link.send(pb.RankMessage(raised=pb.Raised(step=step, text=text, shard=shard)))
        if not timeout_s:
            return Settled()
        found = self._next(self._settled, f"what becomes of step {step}")
        failure = decode_failure(found.failure) if found.HasField("failure") else None
        return Settled(failure, found.done)

    @contextlib.contextmanager
    def operation(self, what: str, abort: Abort) -> Iterator[Operation]:
        with self._changed:
            self._abort = abort
        self._happened(core.Begins(what))
        try:
            yield _Followed(self)
        finally:
            self._happened(core.Leaves())
            with self._changed:
                self._abort = None

    def settle(self, own: Verdict) -> Verdict:
        self._happened(core.Done(own))
        what = self._core.what
        return self._take(Judged, what, f"rank 0's verdict about {what}").verdict

    def _happened(self, event: core.Event) -> None:
        with self._changed:
            self._core, effects = core.step(self._core, event)
            if core.Interrupt() in effects and self._abort is not None:
                self._abort.set("rank 0 stopped it")
            self._changed.notify_all()
        for effect in effects:
            if isinstance(effect, core.Report):
                self._link.send(pb.RankMessage(outcome=encode_outcome(effect.outcome)))

    # ---- the receiving thread ----

    def _hear(self, message: pb.LeaderMessage) -> None:
        match message.WhichOneof("kind"):
            case "directive" | "decision" | "verdict" | "stop_work":
                self._hear_order(message)
            case "pin_state":
                pin = message.pin_state
                stripe = Stripe(pin.stripe, pin.stripes)
                self._pins.pin(pin.heal_id, pin.step, log_only=pin.log_only, stripe=stripe)
            case "release_pin":
                self._pins.release(message.release_pin.heal_id)
            case "all_computed":
                found = message.all_computed
                self.all_computed = QuorumId(found.quorum_id), Step(found.step)
            case "beat":
                pass  # it has broken the silence
            case "settled":
                self._settled.put(message.settled)
            case "save_begins":
                self._saves.put(message.save_begins)
            case "group_ends":
                self._ended = message.group_ends.error
                self._link.expect_end(message.group_ends.error)
            case other:
                raise ConnectionError(f"it sent a message of kind {other!r}, which this rank does not expect")

    def _hear_order(self, message: pb.LeaderMessage) -> None:
        try:
            order = decode_order(message)
        except WireError as error:
            with self._changed:
                self._undecodable = error
                self._changed.notify_all()
            return
        if order is not None:
            self._happened(core.Heard(order))

    def _take(self, kind: type[_O], about: str, what: str) -> _O:
        """Wait for rank 0's next order, which is `what`."""

        def look() -> _O | None:
            with self._changed:
                try:
                    self._core, order = core.take(self._core, kind, about)
                except messages.CameApart as error:
                    raise CameApart(str(error), error.theirs) from error
                if order is None and self._undecodable is not None:
                    raise self._undecodable
                if order is None:
                    self._changed.wait(_LOOK_S)
                return order

        return self._wait(look, what)

    def _next(self, answers: "queue.SimpleQueue[_M]", what: str) -> _M:
        def look() -> _M | None:
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=_LOOK_S)
            return None

        return self._wait(look, what)

    def _wait(self, look: Callable[[], _M | None], what: str) -> _M:
        """Wait as long as rank 0 is there. `look` waits for a moment."""
        waiting = LongWait(time.monotonic())
        while True:
            ended = self._ended
            if (found := look()) is not None:
                return found
            if ended is not None:
                raise SessionFailed(
                    f"Rank 0 of group {self._name!r} has ended{f' with {ended}' if ended else ''}, while "
                    f"rank {self.rank} waits for {what}. Every rank must run the same number of steps."
                )
            if (waited_s := waiting.to_say(time.monotonic())) is not None:
                _log.info(
                    "[jaxft %s] rank %d has waited %.0f s for %s", self._name, self.rank, waited_s, what
                )


class _Followed:
    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def settle(self, failure: str = "", accused: tuple[str, ...] = (), note: str = "") -> Verdict:
        return self._follower.settle(Verdict(failure, accused, note))
