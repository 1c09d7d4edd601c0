"""The connections to the HTTP port: few at a time, and none for long on which the client owes something.

Uvicorn takes any number of connections, and asyncio any number of TLS handshakes: a flood would use up the
descriptors that groups need. So connections are accepted here. When there are as many as may be, the oldest idle one
of the address with the most of them gives way; where none is idle, the others wait in the kernel.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from jaxft_protocol.host.admission import RateLimitFilter, crowded_out
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger("jaxft_coordinator.http.door")
_log.addFilter(RateLimitFilter())

# Viewers, scrapers and probes.
MAX_CONNECTIONS = 128
# For a handshake, for a whole request, and for a client to take any byte of an answer.
TIMEOUT_S = 15.0
# The wait before the next check for room, and after an error of accept(2), such as too few descriptors.
_PAUSE_S = 0.1

Peer = tuple[str, int]
_Make = Callable[[], asyncio.Protocol]


@dataclass(eq=False)
class _Guest:
    address: str
    idle_since_s: float
    requests: int = 0  # under way
    shaking: asyncio.Task[None] | None = None
    transport: asyncio.BaseTransport | None = None
    protocol: asyncio.BaseProtocol | None = None

    def end(self) -> None:
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()
        elif self.shaking is not None:
            self.shaking.cancel()


class Door:
    """Accepts connections; also an ASGI middleware, which knows who asks something."""

    def __init__(self, app: ASGIApp, context: ssl.SSLContext | None) -> None:
        self._app = app
        self._context = context
        self._guests: dict[Peer, _Guest] = {}  # oldest first
        self._live: Collection[asyncio.BaseProtocol] = ()

    async def accept(
        self, listening: Sequence[socket.socket], make: _Make, live: Collection[asyncio.BaseProtocol]
    ) -> None:
        """Accept connections until cancelled, and close the sockets."""
        self._live = live
        try:
            async with asyncio.TaskGroup() as tasks:
                for each in listening:
                    each.settimeout(0.0)
                    tasks.create_task(self._accept(each, make))
        finally:
            for each in listening:
                each.close()
            for guest in self._guests.values():
                if guest.protocol is None:
                    guest.end()

    def end_idle(self) -> None:
        """End connections that have been idle for too long. Call this again and again."""
        now_s = time.monotonic()
        for peer, guest in list(self._guests.items()):
            if guest.protocol and guest.protocol not in self._live:
                del self._guests[peer]
            elif not guest.requests and now_s - guest.idle_since_s > TIMEOUT_S:
                guest.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guest = self._guests.get(scope.get("client") or ("", 0))
        if guest is None:
            await self._app(scope, receive, send)
            return
        owes_body = True

        async def receive_soon() -> Message:
            nonlocal owes_body
            try:
                async with asyncio.timeout(TIMEOUT_S if owes_body else None):
                    message = await receive()
            except TimeoutError:
                guest.end()
                return {"type": "http.disconnect"}
            owes_body = bool(message.get("more_body"))
            return message

        async def send_soon(message: Message) -> None:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await send(message)
            except TimeoutError:
                guest.end()

        guest.requests += 1
        try:
            await self._app(scope, receive_soon, send_soon)
        finally:
            guest.requests -= 1
            guest.idle_since_s = time.monotonic()

    async def _accept(self, listening: socket.socket, make: _Make) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._has_room():
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(_PAUSE_S)
                continue
            guest = _Guest(address[0], time.monotonic())
            guest.shaking = loop.create_task(self._enter(address[:2], guest, sock, make))
            self._guests[address[:2]] = guest

    def _has_room(self) -> bool:
        """Whether one more may come in; if not, end an idle one."""
        self.end_idle()
        too_many = len(self._guests) + 1 - MAX_CONNECTIONS
        if too_many <= 0:
            return True
        idle = [(guest, guest.address) for guest in self._guests.values() if not guest.requests]
        for guest in crowded_out(idle, max(0, len(idle) - too_many)):
            guest.end()
        return False

    async def _enter(self, peer: Peer, guest: _Guest, sock: socket.socket, make: _Make) -> None:
        loop = asyncio.get_running_loop()
        patience_s = None if self._context is None else TIMEOUT_S
        try:
            guest.transport, guest.protocol = await loop.connect_accepted_socket(
                make, sock, ssl=self._context, ssl_handshake_timeout=patience_s
            )
        except OSError:
            pass  # the client has gone, is too slow, speaks no TLS, or refuses the certificate
        except Exception:  # no client may end the port
            _log.exception("a connection to the HTTP port failed in its TLS handshake")
        finally:
            if guest.protocol is None:
                sock.close()
                if self._guests.get(peer) is guest:
                    del self._guests[peer]
