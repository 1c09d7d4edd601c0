"""Runs the replica's core: a thread with an event loop.

Only this thread changes the replica's state. It gets events from the training thread and messages from the
coordinator, carries out the core's effects, and publishes the state in the `Mailbox`.

No part fails silently. A lost stream is reconnected. Any other failure of a task, the loop or the thread, and a loop
that is stuck, ends the session (`Mailbox.end`): the stream closes, so that the other groups continue at once, and
each later call from the training thread raises `SessionFailed`.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Protocol, assert_never

from jaxft_protocol.messages import CoordinatorMessage, GroupMessage, Heartbeat, Leave, Stripe, Welcome
from jaxft_protocol.replica import machine
from jaxft_protocol.replica.deadlines import GREETING_TIMEOUT_S
from jaxft_protocol.replica.legal import IllegalEvent
from jaxft_protocol.replica.state import (
    Close,
    Connected,
    Dial,
    Disconnected,
    Effect,
    Event,
    Failure,
    FailureKind,
    Identity,
    Idle,
    Log,
    Phase,
    PinState,
    Received,
    ReleasePin,
    Replica,
    Send,
    Tick,
)

from jaxft._errors import (
    CannotHeal,
    CoordinatorUnreachable,
    Diverged,
    Evicted,
    JaxftError,
    JobHalted,
    JoinRefused,
    NonFinite,
)
from jaxft._ranks._ranks import Leading, OneRank
from jaxft._session._credentials import Credentials
from jaxft._session._mailbox import Mailbox
from jaxft._session._stream import Stream

_log = logging.getLogger("jaxft")

TICK_S = 0.05


class Pins(Protocol):
    """Keeps states for joiners (`jaxft._heal._store.StateStore`)."""

    def pin(self, heal_id: int, step: int, *, log_only: bool, stripe: Stripe) -> None: ...
    def release(self, heal_id: int) -> None: ...


class Session:
    """The session of a group with its coordinator; `mailbox` is for the training thread."""

    def __init__(
        self,
        identity: Identity,
        pins: Pins,
        *,
        failure_timeout_s: float,
        credentials: Credentials = Credentials(),  # noqa: B008  (a frozen value)
        ranks: Leading | None = None,
    ) -> None:
        now_s = time.monotonic()
        self._replica = Replica(identity, failure_timeout_s, since_s=now_s, offline_since_s=now_s)
        self._pins = pins
        self._ranks: Leading = ranks or OneRank()
        self.mailbox = Mailbox(self._replica, self._ranks, self._handle)
        self._samples_wanted = False
        self._stream = Stream(
            self.mailbox.loop,
            credentials,
            group=identity.group,
            silence_s=min(GREETING_TIMEOUT_S, failure_timeout_s / 4),
            on_open=lambda: self._handle(Connected()),
            on_message=self._hear,
        )

    def start(self) -> None:
        """Dial the coordinator; return when it has accepted this group.

        Raises:
            JaxftError: this group was refused, the coordinator cannot be reached, or the session has ended.
        """
        first = self._replica.identity.coordinators[0]
        self.mailbox.loop.start(tick=self._tick_forever(), stream=self._connect(0.0, first))
        self.mailbox.wait_until(lambda replica: replica.phase not in (Phase.OFFLINE, Phase.GREETING))
        if (failure := self.mailbox.replica.failure) is not None:
            raise error_of(failure)

    def close(self) -> None:
        self.mailbox.close()

    def _handle(self, event: Event) -> None:
        if self.mailbox.is_over:
            return
        try:
            self._step(event)
        except Exception as error:  # top level of the loop's callbacks
            self.mailbox.end(f"the event {type(event).__name__} failed", error)

    def _hear(self, message: CoordinatorMessage) -> None:
        """Pass a message to the replica's core.

        Raises:
            IllegalEvent: the coordinator must not send this now. Only the stream ends.
        """
        if self.mailbox.is_over:
            return
        if isinstance(message, Welcome):
            self._samples_wanted = message.samples
        try:
            self._step(Received(message))
        except IllegalEvent:
            raise
        except Exception as error:
            self.mailbox.end(f"the event Received({type(message).__name__}) failed", error)

    def _step(self, event: Event) -> None:
        replica, effects = machine.step(self._replica, event, time.monotonic())
        for effect in effects:
            self._do(effect)
        self._replica = replica
        self.mailbox.publish(replica)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self._send(message)
            case Dial(delay_s, address):
                self.mailbox.loop.keep(self._connect(delay_s, address), "stream")
            case Close(reason):
                self._stream.hang_up(reason)
            case PinState(heal_id, step, log_only, stripe):
                self._pins.pin(heal_id, step, log_only=log_only, stripe=stripe)
                self._ranks.pin(heal_id, step, log_only=log_only, stripe=stripe)
            case ReleasePin(heal_id):
                self._pins.release(heal_id)
                self._ranks.release(heal_id)
            case Log(text, warning):
                level = logging.WARNING if warning else logging.INFO
                _log.log(level, "[jaxft %s] %s", self._replica.identity.group, text)
            case _:
                assert_never(effect)

    def _send(self, message: GroupMessage) -> None:
        with_sample = self._samples_wanted and isinstance(message, Heartbeat | Leave)
        if with_sample and self._stream.is_open and (sample := self.mailbox.samples.take()) is not None:
            self._stream.send(sample)
        self._stream.send(message)

    async def _tick_forever(self) -> None:
        mailbox = self.mailbox
        while True:
            await asyncio.sleep(TICK_S)
            if self._replica.busy and mailbox.waits:
                self._handle(Idle())
            self._handle(Tick(mailbox.computed, mailbox.away, mailbox.progress))

    async def _connect(self, delay_s: float, address: str) -> None:
        await asyncio.sleep(delay_s)
        if self._replica.phase is not Phase.OFFLINE:
            return
        reason = await self._stream.run(address)
        self._handle(Disconnected(reason, busy=not self.mailbox.waits))


_ERRORS: Mapping[FailureKind, type[JaxftError]] = {
    FailureKind.COORDINATOR_UNREACHABLE: CoordinatorUnreachable,
    FailureKind.JOIN_REFUSED: JoinRefused,
    FailureKind.EVICTED: Evicted,
    FailureKind.CANNOT_HEAL: CannotHeal,
    FailureKind.DIVERGED: Diverged,
    FailureKind.NONFINITE: NonFinite,
    FailureKind.JOB_HALTED: JobHalted,
}


def error_of(failure: Failure) -> JaxftError:
    return _ERRORS[failure.kind](failure.text)
