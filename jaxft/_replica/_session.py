"""Carries the replica's core: a thread with an event loop, the stream to the coordinator, and the slot from
which the training thread reads what to do.

The loop's thread alone owns the replica's state. The training thread posts events and waits for a directive;
when a directive gives way to another, whatever it still does under the old one is told to stop.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Protocol, assert_never

import grpc
import grpc.aio
from jaxft_coordinator import wire
from jaxft_coordinator.core.messages import GroupMessage, HistoryId, NewQuorum, QuorumId, Step
from jaxft_coordinator.proto import coordinator_pb2 as pb

from jaxft._credentials import Credentials, Greeting, Unproven
from jaxft._replica import _core
from jaxft._replica._types import (
    Apply,
    Attempt,
    Connected,
    Dial,
    Directive,
    Disconnected,
    Event,
    Fail,
    Failure,
    HangUp,
    HealFrom,
    Heard,
    Identity,
    Idle,
    Note,
    Over,
    Phase,
    PinState,
    ReleasePin,
    Replay,
    Replica,
    Say,
    TakeDigest,
    Tick,
    Wait,
)
from jaxft._wire import Abort

_log = logging.getLogger("jaxft")

TICK_S = 0.05
# A wait is mentioned after this, and again each time it has doubled.
FIRST_MENTION_S = 5.0

_SESSION = f"/{pb.DESCRIPTOR.services_by_name['Coordinator'].full_name}/Session"
_OPTIONS = [
    # Finds a coordinator whose machine is gone without a FIN. The server allows a ping a second.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    # Each dial is a channel of its own, so gRPC's own back-off never applies; ours is in the core.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]


class Pins(Protocol):
    """Keeps states for joiners (`jaxft._heal._store.StateStore`)."""

    def pin(self, heal_id: int, step: int, *, log_only: bool = False) -> None: ...
    def release(self, heal_id: int) -> None: ...


class Session:
    def __init__(
        self,
        identity: Identity,
        pins: Pins,
        *,
        failure_timeout_s: float,
        credentials: Credentials = Credentials(),  # noqa: B008  (a frozen value)
    ) -> None:
        self._replica = Replica(
            identity, failure_timeout_s, since_s=time.monotonic(), offline_since_s=time.monotonic()
        )
        self._pins = pins
        self._credentials = credentials
        self._proved = False  # a coordinator has proved once that it knows the job's key
        self._changed = threading.Condition()
        self._sequence = 0
        self._directive: Directive = _core.directive(self._replica)
        self._activity: tuple[tuple[object, ...], Abort] | None = None
        self._waits = False  # the training thread waits for a directive
        # Of which quorum and step it has computed its shards last. A heartbeat says it: no message of its own.
        self.computed = (QuorumId(0), Step(0))
        # Likewise: whether it is outside of any step, and how often it has got on with one.
        self.away = True
        self.progress = 0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox: asyncio.Queue[GroupMessage] | None = None
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] | None = None
        self._hung_up = ""  # why the call was ended from here
        self._thread = threading.Thread(target=self._run, name="jaxft-session", daemon=True)

    # ---- the training thread's side ----

    def start(self) -> None:
        """Dial the coordinator; return when this group is welcome.

        Raises:
            JaxftError: what `Fail` says, if it was refused or the coordinator cannot be reached.
        """
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._replica.phase not in (Phase.OFFLINE, Phase.GREETING))

    def post(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._handle, event)

    def wait(self, seen: int) -> tuple[int, Directive]:
        """Return the first directive after number `seen` that is not `Wait`, with its number."""
        began_s = time.monotonic()
        mention_s = FIRST_MENTION_S
        while True:
            with self._changed:
                self._waits = True
                if self._changed.wait_for(lambda: self._actionable(seen), timeout=mention_s):
                    self._waits = False
                    return self._sequence, self._directive
                directive = self._directive
            waited_s = time.monotonic() - began_s
            reason = directive.reason if isinstance(directive, Wait) else "its own turn"
            _log.info("[jaxft %s] waiting %.0f s for %s", self._replica.identity.group, waited_s, reason)
            mention_s = waited_s

    @contextlib.contextmanager
    def activity(self, directive: Directive, abort: Abort) -> Iterator[Abort]:
        """Have `abort` set as soon as `directive` no longer stands, for the length of the context."""
        with self._changed:
            self._activity = (_key(directive), abort)
            self._stop_if_stale()
        try:
            yield abort
        finally:
            with self._changed:
                self._activity = None

    @contextlib.contextmanager
    def in_step(self, now: bool) -> Iterator[None]:
        """Let heartbeats say, for the length of the context, whether the training thread is in a step.

        Outside of steps it may take any time, and is waited for as docs/guarantees.md says.
        """
        before, self.away = self.away, not now
        try:
            yield
        finally:
            self.away = before

    def got_on(self) -> None:
        """The training thread has got on with its step."""
        self.progress += 1

    def wait_until_left(self, deadline_s: float, told: Step | None) -> Step | None:
        """Wait until this group has left, or the deadline; return a step whose digest is wanted before that.

        Not for step `told`: its digest is on its way to the session's thread.
        """

        def wanted() -> Step | None:
            directive = self._directive
            return directive.step if isinstance(directive, TakeDigest) and directive.step != told else None

        def over() -> bool:
            return self._replica.phase in (Phase.LEFT, Phase.FAILED) or wanted() is not None

        with self._changed:
            self._changed.wait_for(over, max(0.0, deadline_s - time.monotonic()))
            return wanted()

    def wants_digest(self, step: Step) -> bool:
        """Whether a joiner waits for the digest of state `step`, which is about to be overwritten."""
        return step in self._replica.digests_due.values()

    @property
    def all_computed(self) -> tuple[QuorumId, Step]:
        """Of which attempt it is known that all members have computed their shards."""
        return self._replica.all_computed

    @property
    def quorum(self) -> NewQuorum | None:
        return self._replica.quorum

    @property
    def history(self) -> HistoryId:
        """The history of what the job commits, as far as this group has been told."""
        return self._replica.job_history

    @property
    def frontier(self) -> tuple[Step | None, bool]:
        """How far the job was when this group came, and whether a group that was there held that state."""
        return self._replica.frontier_step, self._replica.frontier_held

    @property
    def failed(self) -> Failure | None:
        return self._replica.failure

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)

    def _actionable(self, seen: int) -> bool:
        return self._sequence > seen and not isinstance(self._directive, Wait)

    # ---- the loop's side ----

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._keep(self._tick_forever())
        self._keep(self._connect(0.0, self._replica.identity.coordinators[0]))
        try:
            self._loop.run_forever()
        finally:
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._loop.close()

    def _keep(self, coroutine: object) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)  # pyright: ignore[reportArgumentType]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _handle(self, event: Event) -> None:
        try:
            replica, effects = _core.step(self._replica, event, time.monotonic())
        except Exception as error:
            _log.exception("[jaxft %s] failed on %r", self._replica.identity.group, event)
            self._fail(f"internal error on {type(event).__name__}: {error!r}")
            return
        for effect in effects:
            match effect:
                case Say(message):
                    if self._outbox is not None:
                        self._outbox.put_nowait(message)
                case Dial(delay_s, address):
                    self._keep(self._connect(delay_s, address))
                case HangUp(reason):
                    if self._call is not None:
                        self._hung_up = reason
                        self._call.cancel()
                case PinState(heal_id, step, log_only):
                    self._pins.pin(heal_id, step, log_only=log_only)
                case ReleasePin(heal_id):
                    self._pins.release(heal_id)
                case Note(text, warning):
                    level = logging.WARNING if warning else logging.INFO
                    _log.log(level, "[jaxft %s] %s", replica.identity.group, text)
                case _:
                    assert_never(effect)
        self._show(replica)

    def _show(self, replica: Replica) -> None:
        """Make the new state visible, and wake whoever waits for what changed in it."""
        directive = _core.directive(replica)
        moved = replica.phase is not self._replica.phase
        with self._changed:
            self._replica = replica
            if directive != self._directive:
                self._directive = directive
                self._sequence += 1
                self._stop_if_stale()
                self._changed.notify_all()
            elif moved:
                self._changed.notify_all()

    def _stop_if_stale(self) -> None:
        if self._activity is None:
            return
        key, abort = self._activity
        if key != _key(self._directive) and not abort.is_set:
            abort.set("what the group was doing has been overtaken")

    def _fail(self, text: str) -> None:
        with self._changed:
            self._directive = Fail(Failure("JaxftError", text))
            self._sequence += 1
            self._stop_if_stale()
            self._changed.notify_all()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._replica.busy and self._waits:
                self._handle(Idle())
            self._handle(Tick(self.computed, self.away, self.progress))

    async def _connect(self, delay_s: float, address: str) -> None:
        await asyncio.sleep(delay_s)
        if self._replica.phase is not Phase.OFFLINE:
            return
        channel = self._credentials.channel(address, _OPTIONS)
        greeting = Greeting(self._credentials.key, known=self._proved)
        self._hung_up = ""
        reason = "the coordinator ended the session"
        writer: asyncio.Task[None] | None = None
        try:
            call = self._call = channel.stream_stream(_SESSION)()  # bytes both ways: `greeting` reads them
            messages = aiter(call)
            await self._challenged(greeting, messages)
            self._outbox = asyncio.Queue()
            writer = self._keep(self._write(call, self._outbox, greeting))
            self._handle(Connected())
            async for received in messages:
                message = greeting.decode(received)
                self._proved |= greeting.proved
                self._handle(Heard(message))
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
            if not greeting.begun:
                reason = self._credentials.explained(reason)
        except asyncio.CancelledError:
            if not self._hung_up:
                raise
            reason = self._hung_up
        except (ConnectionError, TimeoutError) as error:
            reason = str(error)
        except Unproven as error:
            reason = str(error)
            group = self._replica.identity.group
            _log.warning("[jaxft %s] does not follow the coordinator %s: %s", group, address, reason)
        except wire.WireError as error:
            reason = f"the coordinator said what this jaxft does not know: {error}"
        finally:
            self._outbox = self._call = None
            if writer is not None:
                writer.cancel()
            await channel.close()
        with self._changed:
            busy = not self._waits
        self._handle(Disconnected(reason, busy))

    async def _challenged(self, greeting: Greeting, messages: AsyncIterator[bytes]) -> None:
        """Wait for the stream's first message. One that is frozen sends none: then another is tried."""
        timeout_s = min(_core.GREETING_TIMEOUT_S, self._replica.failure_timeout_s / 4)
        try:
            async with asyncio.timeout(timeout_s):
                first = await anext(messages, None)
        except TimeoutError as error:
            raise TimeoutError(f"the coordinator has not begun to speak for {timeout_s:g} s") from error
        if first is None:
            raise ConnectionError("the coordinator ended the session")
        greeting.challenged(first)

    async def _write(
        self,
        call: "grpc.aio.StreamStreamCall[bytes, bytes]",
        outbox: asyncio.Queue[GroupMessage],
        greeting: Greeting,
    ) -> None:
        with contextlib.suppress(
            grpc.aio.AioRpcError, asyncio.InvalidStateError
        ):  # the reader sees why it ended
            while True:
                await call.write(greeting.encode(await outbox.get()))


def _key(directive: Directive) -> tuple[object, ...]:
    """What must stay the same for an activity to go on."""
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
        case Wait() | Over() | Fail():
            return ("none",)
        case _:
            assert_never(directive)
