"""The TLS handshakes at the HTTP port: few at a time, and each with a deadline.

Uvicorn sees a connection only once its handshake is done. Until then asyncio has it, which takes any number, for a
minute each: they would use up the memory and the descriptors of the coordinator, and no group could connect any more.
So connections are accepted here.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import socket

from jaxft_protocol.host.admission import RateLimitFilter, crowded_out

from jaxft_coordinator.http._guests import MAX_SILENT, TIMEOUT_S, Guest

_log = logging.getLogger("jaxft_coordinator.http.handshakes")
_log.addFilter(RateLimitFilter())

# After an error of accept(2), such as out of descriptors.
_PAUSE_S = 0.1


class Handshakes:
    """Those that are under way.

    Args:
        cert: the certificate to show, in PEM form.
        key: its private key.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(cert, key)
        self._running: dict[asyncio.Task[None], str] = {}  # with the addresses of their clients, oldest first

    async def accept(self, listening: Sequence[socket], make: Callable[[], Guest]) -> None:
        """Accept connections until cancelled; each becomes a guest when its handshake is done. Closes the sockets."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for each in listening:
                    each.setblocking(False)
                    tasks.create_task(self._accept(each, make))
        finally:
            for each in listening:
                each.close()
            for running in list(self._running):
                running.cancel()

    async def _accept(self, listening: socket, make: Callable[[], Guest]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(_PAUSE_S)
                continue
            task = loop.create_task(self._shake_hands(sock, make))
            self._running[task] = address[0]
            task.add_done_callback(self._running.pop)
            for running in crowded_out(self._running.items(), MAX_SILENT):
                running.cancel()

    async def _shake_hands(self, sock: socket, make: Callable[[], Guest]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(make, sock, ssl=self._context, ssl_handshake_timeout=TIMEOUT_S)
        except OSError:
            pass  # the client has gone, is too slow, speaks no TLS, or refuses the certificate
        except Exception:  # what a client does must not end the port
            _log.exception("a connection to the HTTP port failed in its TLS handshake")
            sock.close()
