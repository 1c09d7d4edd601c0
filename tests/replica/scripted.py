"""A scripted coordinator, which sends given bytes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import grpc
import grpc.aio
from jaxft_coordinator.shell._services import SERVICE
from jaxft_protocol import credentials, wire
from jaxft_protocol.messages import Alive, CoordinatorMessage, Goodbye, Step, Welcome
from jaxft_protocol.proto import coordinator_pb2 as pb

from tests import patience
from tests.security.groups import run

CHALLENGE = pb.CoordinatorMessage(challenge=pb.Challenge(nonce=credentials.new_nonce())).SerializeToString()
GOODBYE = wire.coordinator_to_proto(Goodbye()).SerializeToString()
ALIVE = wire.coordinator_to_proto(Alive()).SerializeToString()


class Coordinator:
    """Greets each group, and then sends `lines` to the first."""

    def __init__(self) -> None:
        self.port = 0
        self.opened = 0
        self.ended = 0
        self.silent = False  # sends nothing, not even a greeting
        self.mute = False  # answers no heartbeats
        self.heartbeat_interval_ms = 100
        self.frontier_step: Step | None = None  # of its job
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None

    def say(self, line: bytes | CoordinatorMessage) -> None:
        """Send this to the connected group, or the next one to connect."""
        data = line if isinstance(line, bytes) else wire.coordinator_to_proto(line).SerializeToString()

        async def put() -> None:
            self._lines.put_nowait(data)

        run(put)

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handler = grpc.stream_stream_rpc_method_handler(self._session)  # bytes in, bytes out
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Session": handler}),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0.0)

    async def _session(
        self, requests: AsyncIterator[bytes], _context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        self.opened += 1
        reader = asyncio.create_task(self._read(requests))
        try:
            if self.silent:
                await reader
                return
            yield CHALLENGE
            welcome = Welcome(self.heartbeat_interval_ms, frontier_step=self.frontier_step)
            yield wire.coordinator_to_proto(welcome).SerializeToString()
            while not reader.done():
                with contextlib.suppress(TimeoutError):
                    yield await asyncio.wait_for(self._lines.get(), 0.02)
        finally:
            self.ended += 1
            reader.cancel()

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for request in requests:
            kind = pb.GroupMessage.FromString(request).WhichOneof("kind")
            if kind == "leave":
                self._lines.put_nowait(GOODBYE)
            elif kind == "heartbeat" and not self.mute:
                self._lines.put_nowait(ALIVE)


@contextlib.contextmanager
def coordinating() -> Iterator[Coordinator]:
    coordinator = Coordinator()
    run(coordinator.start)
    try:
        yield coordinator
    finally:
        run(coordinator.stop, timeout_s=patience.FAR_S)
