"""Groups that speak with a coordinator by hand, and coordinators to speak with."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from jaxft_coordinator.shell._server import Server
from jaxft_coordinator.shell._services import SERVICE
from jaxft_protocol import credentials, wire
from jaxft_protocol.coordinator.job import Options
from jaxft_protocol.credentials import JobKey
from jaxft_protocol.messages import (
    Commit,
    CoordinatorMessage,
    GroupMessage,
    GroupName,
    Hello,
    Incarnation,
    Join,
    NewQuorum,
    Step,
    Vote,
    Welcome,
)
from jaxft_protocol.proto import coordinator_pb2 as pb
from jaxft_protocol.seals import Body, Broken, Seal

from tests import patience

T = TypeVar("T")
PATIENCE_S = 60.0
SECRET = b"a secret of enough bytes"
KEY = credentials.job_key(SECRET, "job")


class Group:
    """One stream to the coordinator at a port."""

    def __init__(self, port: int, name: str = "a", *, job: str = "job", key: JobKey | None = None) -> None:
        self.identity = Hello(job, GroupName(name), Incarnation(7), f"{name}:1")
        self.key = key
        self.nonce = b""  # the coordinator's
        # Of the coordinator's messages, and of this group's from its Hello on.
        self.seals: tuple[Seal, Seal] | None = None
        self.carried: NewQuorum | None = None
        self._channel = grpc.aio.insecure_channel(
            f"localhost:{port}", [("grpc.use_local_subchannel_pool", 1)]
        )
        self._call = self._channel.stream_stream(f"/{SERVICE}/Session")()  # bytes in, bytes out

    async def __aenter__(self) -> Self:
        challenge = await self.read()
        assert challenge is not None
        self.nonce = challenge.challenge.nonce
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()  # as a session does; gRPC before 1.83 leaves that to the garbage collector
        await self._channel.close()

    async def send(self, data: bytes) -> None:
        await self._call.write(data)

    async def say(self, message: GroupMessage) -> None:
        body = Body(wire.group_to_proto(message))
        await self.send(body.data if self.seals is None else self.seals[1].close(body))

    async def read_bytes(self) -> bytes | None:
        data = await asyncio.wait_for(self._call.read(), patience.FAR_S)
        return None if data is grpc.aio.EOF else data

    async def read(self) -> pb.CoordinatorMessage | None:
        """The next message; None at the end of the stream."""
        data = await self.read_bytes()
        if data is None:
            return None
        if self.seals is not None:
            with contextlib.suppress(Broken):  # a refusal of who has not proved itself
                data = self.seals[0].open(data)
        return pb.CoordinatorMessage.FromString(data)

    async def hear(self) -> CoordinatorMessage | None:
        message = await self.read()
        if message is None:
            return None
        heard = wire.coordinator_from_proto(message, self.carried)
        self.carried = wire.quorum_of(heard) or self.carried
        return heard

    async def hear_until(self, kind: type) -> Any:
        while not isinstance(message := await self.hear(), kind):
            assert message is not None, f"the stream ended before a {kind.__name__} came"
        return message

    def signed(self, hello: Hello | None = None) -> pb.GroupMessage:
        """This group's Hello, or another, with its proof."""
        sent = hello or self.identity
        message = wire.group_to_proto(sent)
        if self.key is not None:
            nonces = {"coordinator_nonce": self.nonce, "group_nonce": credentials.new_nonce()}
            message.hello.nonce = nonces["group_nonce"]
            message.hello.proof = credentials.group_proof(self.key, sent, **nonces)
            to_group, to_coordinator = credentials.stream_keys(self.key, sent, **nonces)
            self.seals = Seal(to_group), Seal(to_coordinator)
        return message

    async def greet(self) -> CoordinatorMessage | None:
        await self.send(self.signed().SerializeToString())
        return await self.hear()

    async def vote(self, quorum: NewQuorum, step: int) -> None:
        await self.say(Vote(quorum.quorum_id, Step(step), ok=True))


@contextlib.asynccontextmanager
async def pair(
    port: int, key: JobKey | None = None, min_replicas: int = 2
) -> AsyncIterator[tuple[Group, Group, NewQuorum]]:
    """Two groups in their first quorum, in a separate job."""
    async with Group(port, "a", key=key) as a, Group(port, "b", key=key) as b:
        for group in (a, b):
            assert isinstance(await group.greet(), Welcome)
        for group in (a, b):
            await group.say(Join(Step(0), 0xD1, min_replicas=min_replicas, total_shards=2))
        quorum = await a.hear_until(NewQuorum)
        assert await b.hear_until(NewQuorum) == quorum
        yield a, b, quorum


async def commit(a: Group, b: Group, quorum: NewQuorum, step: int) -> None:
    """Let the pair commit a step."""
    for group in (a, b):
        await group.vote(quorum, step)
    for group in (a, b):
        assert await group.hear_until(Commit) == Commit(quorum.quorum_id, Step(step))


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Server]:
    """A coordinator in this loop; it judges no silence, however slow the machine is."""
    server = Server("localhost:0", Options(heartbeat_timeout_s=3600.0, founding_wait_s=0.0), **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=0.0)


@contextlib.contextmanager
def serving_beside(**options: Any) -> Iterator[int]:
    """A coordinator in another thread; yields its port."""
    context = serving(**options)
    server = run(context.__aenter__)
    try:
        yield server.port
    finally:
        run(lambda: context.__aexit__(None, None, None))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """A loop that outlives the tests of this process.

    gRPC still hands the rest of its calls to a closed loop, fails, and forgets events for other loops.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grpc-of-tests", daemon=True).start()
    return loop


def run(scenario: Callable[[], Coroutine[Any, Any, T]], *, timeout_s: float = patience.FAR_S) -> T:
    """Run a scenario to its end."""
    running = asyncio.run_coroutine_threadsafe(scenario(), _loop())
    try:
        return running.result(timeout_s)
    finally:
        running.cancel()


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = patience.machine_s() + PATIENCE_S
    while not condition():
        assert patience.machine_s() < deadline_s, f"waited {PATIENCE_S:.0f} s for {what}"
        await asyncio.sleep(0.01)
