"""The stream to the coordinator: one call at a time, its greeting, and the messages in both directions.

Everything here runs in the session's loop.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from jaxft_protocol import wire
from jaxft_protocol.messages import CoordinatorMessage, GroupMessage, GroupName, Sample
from jaxft_protocol.proto import coordinator_pb2 as pb
from jaxft_protocol.replica.deadlines import GREETING_TIMEOUT_S
from jaxft_protocol.replica.legal import IllegalEvent

from jaxft._base._room import MORE_DESCRIPTORS
from jaxft._session._credentials import Credentials, Greeting, Unproven
from jaxft._session._loop import LoopThread
from jaxft._transport._addresses import Target, in_digits, targets_of
from jaxft._transport._sockets import split_address

_log = logging.getLogger("jaxft")

_SESSION = f"/{pb.DESCRIPTOR.services_by_name['Coordinator'].full_name}/Session"
_OPTIONS = [
    # Detects a coordinator whose machine is gone without a FIN. The server allows one ping per second.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    # Each dial opens a new channel, so gRPC's backoff never applies; ours is in the core.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # A quorum has 8 MB of addresses at most, by the coordinator's limits, and shards; gRPC's default is 4 MB.
    ("grpc.max_receive_message_length", 64 << 20),
]

# For gRPC's poller and the sockets of a channel; gRPC needs about half of them.
_DESCRIPTORS = 16


# Errors that end a call and not the session.
_ENDS_CALL = (grpc.aio.AioRpcError, ConnectionError, TimeoutError, Unproven, wire.WireError, IllegalEvent)


class Stream:
    """Calls a coordinator, and sends and receives until the call ends."""

    def __init__(
        self,
        loop: LoopThread,
        credentials: Credentials,
        *,
        group: GroupName,
        silence_s: float,
        on_open: Callable[[], None],
        on_message: Callable[[CoordinatorMessage], None],
    ) -> None:
        self._loop = loop
        self._credentials = credentials
        self._group = group
        self._silence_s = silence_s
        self._on_open = on_open
        self._on_message = on_message
        self._proved = False  # a coordinator has proved that it knows the job's key
        self._outbox: asyncio.Queue[GroupMessage | Sample] | None = None
        self._task: asyncio.Task[Any] | None = None  # of the current call
        self._hung_up = ""  # why this side ended the call

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._outbox is not None

    def send(self, message: GroupMessage | Sample) -> None:
        """Send a message; without an open call it is dropped, since the next greeting has all that counts."""
        if self._outbox is not None:
            self._outbox.put_nowait(message)

    def hang_up(self, reason: str) -> None:
        """End the current call, if there is one."""
        if self._task is not None:
            self._hung_up = reason
            self._task.cancel()  # not only the call: gRPC might never report its end

    async def run(self, address: str) -> str:
        """Call the coordinator at `address`; return why the call has ended.

        Other exceptions than a call's pass through: they end the session.
        """
        greeting = Greeting(self._credentials.key, known=self._proved)
        self._hung_up, self._task = "", asyncio.current_task()
        reason = "the coordinator ended the session"
        writer: asyncio.Task[None] | None = None
        channel: grpc.aio.Channel | None = None
        try:
            target, options = await self._resolved(address)
            _check_room()
            channel = self._credentials.channel(target, [*_OPTIONS, *options])
            call = channel.stream_stream(_SESSION)()  # bytes in both directions: `greeting` decodes them
            messages = aiter(call)
            await self._challenged(greeting, messages)
            self._outbox = asyncio.Queue()
            writer = self._loop.keep(self._write(call, self._outbox, greeting), "writer")
            self._on_open()
            async for received in messages:
                message = greeting.decode(received)
                self._proved |= greeting.proved
                self._on_message(message)
        except asyncio.CancelledError:
            assert self._task is not None
            if self._hung_up:
                self._task.uncancel()
            elif self._task.cancelling():
                raise
            reason = self._hung_up or "the call was cancelled"
        except _ENDS_CALL as error:
            reason = self._why(error, greeting, address)
        finally:
            self._outbox = self._task = None
            if writer is not None:
                writer.cancel()
            if channel is not None:
                async with asyncio.timeout(GREETING_TIMEOUT_S):
                    await channel.close()
        return reason

    def _why(self, error: Exception, greeting: Greeting, address: str) -> str:
        match error:
            case grpc.aio.AioRpcError():
                reason = error.details() or error.code().name
                return reason if greeting.begun else self._credentials.explained(reason)
            case Unproven():
                _log.warning("[jaxft %s] does not follow the coordinator %s: %s", self._group, address, error)
                return str(error)
            case wire.WireError():
                return f"the coordinator sent a message that this version of jaxft cannot read: {error}"
            case IllegalEvent():
                reason = f"the coordinator sent a message that is not allowed now: {error}"
                _log.warning(
                    "[jaxft %s] ends the stream to the coordinator %s: %s", self._group, address, reason
                )
                return reason
            case _:
                return str(error)

    async def _resolved(self, address: str) -> tuple[str, list[tuple[str, Any]]]:
        """Where to connect to, and with which options. Only a name needs another thread."""
        if in_digits(address):
            return channel_target(address, self._silence_s)
        try:
            return await asyncio.to_thread(channel_target, address, self._silence_s)
        except RuntimeError as error:
            raise ConnectionError(f"no thread could resolve the name in {address!r}: {error}") from error

    async def _challenged(self, greeting: Greeting, messages: AsyncIterator[bytes]) -> None:
        """Wait for the call's first message. A frozen coordinator sends none; then the next one is tried."""
        try:
            async with asyncio.timeout(self._silence_s):
                first = await anext(messages, None)
        except TimeoutError as error:
            raise TimeoutError(
                f"the coordinator has sent nothing for {self._silence_s:g} s: it hangs, or the network drops all"
            ) from error
        if first is None:
            raise ConnectionError("the coordinator ended the session")
        greeting.challenged(first)

    async def _write(
        self,
        call: "grpc.aio.StreamStreamCall[bytes, bytes]",
        outbox: "asyncio.Queue[GroupMessage | Sample]",
        greeting: Greeting,
    ) -> None:
        # The reader gets the reason why the call ended, or cancels this task.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            try:
                while True:
                    await call.write(greeting.encode(await outbox.get()))
            finally:
                call.cancel()  # a stream that can only receive would look alive


def _check_room() -> None:
    """Raise ConnectionError if there are no descriptors for a channel: gRPC would abort the process."""
    try:
        with contextlib.ExitStack() as opened:
            for _ in range(_DESCRIPTORS):
                opened.enter_context(socket.socket())
    except OSError as error:
        raise ConnectionError(
            f"this process has no descriptors for a connection: {error.strerror}. {MORE_DESCRIPTORS}"
        ) from error


# gRPC would take the proxy of the variable http_proxy, even to this machine. Groups need a direct way to each other
# anyway.
_DIRECT = ("grpc.enable_http_proxy", 0)


def channel_target(address: str, limit_s: float) -> tuple[str, list[tuple[str, Any]]]:
    """Resolve a coordinator's address; return the target of a channel, and the options that belong to it.

    Raises:
        ConnectionError: the name is unknown, or no name server has answered in time.
    """
    if in_digits(address):
        return address, [_DIRECT]
    try:
        found = targets_of(address, limit_s)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConnectionError(f"the host name in {address!r} is unknown: {why}") from error
    # As if gRPC resolved the name: proxies route by it, and certificates name it.
    named = [
        ("grpc.default_authority", address),
        ("grpc.ssl_target_name_override", split_address(address)[0]),
    ]
    return _target(found), [_DIRECT, *named]


def _target(found: Sequence[Target]) -> str:
    """All addresses, in their order: gRPC tries the next one if one does not answer soon."""
    if all(family == socket.AF_INET for family, _ in found):
        return "ipv4:" + ",".join(f"{ip}:{port}" for _, (ip, port, *_) in found)
    # A target has addresses of one family, and IPv4 addresses can be written as IPv6.
    return "ipv6:" + ",".join(
        f"[::ffff:{ip}]:{port}" if family == socket.AF_INET else f"[{ip}]:{port}"
        for family, (ip, port, *_) in found
    )
