"""Serves the HTTP port on the coordinator's event loop."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from jaxft_protocol.host.admission import RateLimitFilter

from jaxft_coordinator.http._actions import Actions
from jaxft_coordinator.http._app import make_app
from jaxft_coordinator.http._door import Door
from jaxft_coordinator.http._stream import STATE_EVERY_S, Streams
from jaxft_coordinator.http._views import Snapshots
from jaxft_coordinator.observe.observer import Observer
from jaxft_coordinator.shell._server import Server

_log = logging.getLogger("jaxft_coordinator.http")
# Uvicorn's lines are about requests of clients, which must not be able to fill the disk.
logging.getLogger("uvicorn.error").addFilter(RateLimitFilter())

_STOP_TIMEOUT_S = 1


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the coordinator."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpPort:
    """The port that people and their tools use.

    Args:
        bind: `host:port`; port 0 takes a free one, which `port` then holds.
        server: the coordinator.
        observer: its view of the jobs.
        secret: the tokens that allow actions derive from it; None: no actions.
        cert: certificate to serve with, in PEM form; None: no encryption.
        key: its private key.
    """

    def __init__(
        self,
        bind: str,
        server: Server,
        observer: Observer,
        *,
        secret: bytes | None = None,
        cert: Path | None = None,
        key: Path | None = None,
    ) -> None:
        self.port = 0
        self._bind = bind
        self._observer = observer
        self._streams = Streams(observer, Snapshots(observer, server.jobs))
        app = make_app(server, observer, Actions(server, observer, secret), self._streams)
        context = None
        if cert and key:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key)
        self._door = Door(app, context)
        config = uvicorn.Config(
            self._door,
            log_config=None,
            log_level="warning",
            access_log=False,
            http="h11",
            ws="none",
            lifespan="off",
            server_header=False,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
            # A proxy may not say for whom it asks: the audit log has the address that was seen.
            proxy_headers=False,
        )
        self._scheme = "https" if cert else "http"
        config.load()
        self._uvicorn = _Uvicorn(config)
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            OSError: the address cannot be bound.
        """
        listening = _listening(self._bind)
        self.port = listening[0].getsockname()[1]
        self.running = asyncio.create_task(self._run(listening))
        host = self._bind.rpartition(":")[0]
        shown = "localhost" if host.strip("[]") in ("", "::", "0.0.0.0") else host
        _log.info("page, API and metrics are at %s://%s:%d/", self._scheme, shown, self.port)

    async def stop(self) -> None:
        """End all streams and close the port."""
        assert self.running is not None
        self._streams.close()
        self._uvicorn.should_exit = True
        await asyncio.wait([self.running], timeout=5 * _STOP_TIMEOUT_S)
        self.running.cancel()

    async def _run(self, listening: Sequence[socket.socket]) -> None:
        """Serve until stopped.

        Raises:
            Exception: a part failed. The coordinator does not go on without what people see of it.
        """
        async with asyncio.TaskGroup() as tasks:
            others = (
                tasks.create_task(self._tick_forever()),
                tasks.create_task(
                    self._door.accept(listening, self._protocol, self._uvicorn.server_state.connections)
                ),
            )
            await self._uvicorn.serve(sockets=[])
            for task in others:
                task.cancel()

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self._uvicorn.config.http_protocol_class
        return make(config=self._uvicorn.config, server_state=self._uvicorn.server_state, app_state={})

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(STATE_EVERY_S)
            self._observer.tick()
            self._door.end_idle()


def _listening(bind: str) -> list[socket.socket]:
    """Return a socket for each address of `bind`, which is host:port; without a host, for all of this machine."""
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    found: list[socket.socket] = []
    try:
        if host in ("", "::") and socket.has_dualstack_ipv6():
            everywhere = socket.create_server(("::", int(port)), family=socket.AF_INET6, dualstack_ipv6=True)
            return [everywhere]
        # gRPC takes both for this name, whatever /etc/hosts has.
        hosts = (
            ("127.0.0.1", *(("::1",) if socket.has_dualstack_ipv6() else ()))
            if host == "localhost"
            else (host,)
        )
        kinds = [
            kind
            for each in hosts
            for kind in socket.getaddrinfo(each or "0.0.0.0", port, type=socket.SOCK_STREAM)
        ]
        for family, where in dict.fromkeys((kind[0], str(kind[4][0])) for kind in kinds):
            number = int(port) or (found[0].getsockname()[1] if found else 0)
            found.append(socket.create_server((where, number), family=family))
    except (OSError, OverflowError, ValueError) as error:
        for each in found:
            each.close()
        raise OSError(
            f"cannot listen on {bind!r} for HTTP: {error}. For --http, name an address of this machine, and a port "
            "that no other program has (ss -ltnp)"
        ) from error
    return found
