"""The shell, over real streams: what travels, what is noticed, and what a bad client can do (nothing)."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from jaxft_coordinator import wire
from jaxft_coordinator._server import SERVICE, Server
from jaxft_coordinator.core import messages as m
from jaxft_coordinator.core.job import Options
from jaxft_coordinator.proto import coordinator_pb2 as pb
from jaxft_coordinator.proto import coordinator_pb2_grpc as pb_grpc

PATIENT = Options(join_timeout_s=30.0, heartbeat_timeout_s=30.0)


class Client:
    """One group's end of a stream."""

    def __init__(self, channel: grpc.aio.Channel, number: int, job: str) -> None:
        self.number = number
        self.job = job
        self.channel = channel
        self.call: Any = pb_grpc.CoordinatorStub(channel).Session()

    async def say(self, message: m.GroupMessage) -> None:
        await self.call.write(wire.group_to_proto(message))

    async def hear(self, kind: type[Any]) -> Any:
        """The next message of a kind; others before it are passed over."""
        async with asyncio.timeout(20):
            while True:
                raw = await self.call.read()
                assert raw is not grpc.aio.EOF, f"the stream ended before {kind.__name__}"
                message = wire.coordinator_from_proto(raw)
                if isinstance(message, kind):
                    return message

    async def until_end(self) -> list[m.CoordinatorMessage]:
        heard: list[m.CoordinatorMessage] = []
        async with asyncio.timeout(20):
            while (raw := await self.call.read()) is not grpc.aio.EOF:
                heard.append(wire.coordinator_from_proto(raw))
        return heard

    async def hello(self) -> None:
        name = m.GroupName(f"group-{self.number}")
        await self.say(m.Hello(self.job, name, m.Incarnation(self.number), f"host:{self.number}"))
        await self.hear(m.Welcome)

    async def join(self, members: int) -> None:
        await self.say(m.Join(m.Step(0), "same", {"shards": "64"}, min_replicas=members))


async def join_all(groups: list[Client], members: int) -> list[m.NewQuorum]:
    """Bring `groups` into one first quorum: it waits for those that are present."""
    await asyncio.gather(*(group.hello() for group in groups))
    await asyncio.gather(*(group.join(members) for group in groups))
    return await asyncio.gather(*(group.hear(m.NewQuorum) for group in groups))


@asynccontextmanager
async def serving(options: Options = PATIENT, tick_s: float = 0.02) -> AsyncIterator[Server]:
    server = Server("localhost:0", options, quorum_tick_s=tick_s)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=0.1)


@asynccontextmanager
async def clients(server: Server, count: int, job: str = "job") -> AsyncIterator[list[Client]]:
    channels = [grpc.aio.insecure_channel(f"localhost:{server.port}") for _ in range(count)]
    try:
        yield [Client(channel, number, job) for number, channel in enumerate(channels)]
    finally:
        for channel in channels:
            await channel.close()


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(body())  # pyright: ignore[reportArgumentType]


def test_a_vote_of_each_group_makes_one_decision_for_all() -> None:
    async def body() -> None:
        async with serving() as server, clients(server, 3) as groups:
            quorums = await join_all(groups, 3)
            assert len({quorum.quorum_id for quorum in quorums}) == 1
            for step in range(3):
                for group in groups:
                    await group.say(m.Vote(quorums[0].quorum_id, m.Step(step), ok=True))
                commits = await asyncio.gather(*(group.hear(m.Commit) for group in groups))
                assert commits == [m.Commit(quorums[0].quorum_id, m.Step(step))] * 3

    run(body)


@pytest.mark.parametrize("count", [2, 40])
def test_a_decision_without_a_change_is_a_few_bytes_whatever_the_number_of_groups(count: int) -> None:
    async def body() -> None:
        async with serving() as server, clients(server, count) as groups:
            quorums = await join_all(groups, count)
            for group in groups:
                await group.say(m.Vote(quorums[0].quorum_id, m.Step(0), ok=True))
            raw = await groups[0].call.read()
            assert raw.WhichOneof("kind") == "commit"
            assert raw.ByteSize() < 12

    run(body)


def test_a_stream_that_ends_is_a_death_at_once() -> None:
    async def body() -> None:
        async with serving() as server, clients(server, 2) as groups:
            await join_all(groups, 1)
            began_s = time.monotonic()
            groups[1].call.cancel()
            quorum = await groups[0].hear(m.NewQuorum)
            while len(quorum.members) > 1:
                quorum = await groups[0].hear(m.NewQuorum)
            assert time.monotonic() - began_s < 1.0  # milliseconds, on a machine with nothing else to do
            assert [change.group for change in quorum.left] == ["group-1"]

    run(body)


def test_silence_is_a_death_after_the_heartbeat_timeout() -> None:
    async def body() -> None:
        options = Options(join_timeout_s=30.0, heartbeat_timeout_s=1.0)
        async with serving(options) as server, clients(server, 2) as groups:
            await join_all(groups, 1)

            async def beat() -> None:
                while True:
                    await groups[0].say(m.Heartbeat())
                    await asyncio.sleep(0.1)

            heart = asyncio.create_task(beat())
            try:
                evicted = await groups[1].hear(m.Evicted)
                assert evicted.reason.startswith("no heartbeat for")
                assert evicted.may_return
                quorum = await groups[0].hear(m.NewQuorum)
                assert [member.group for member in quorum.members] == ["group-0"]
            finally:
                heart.cancel()

    run(body)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.GroupMessage(), "a message of kind None is not part of protocol 1"),
        (pb.GroupMessage(vote=pb.Vote(quorum_id=1)), "the first message of a session must be Hello"),
        (pb.GroupMessage(hello=pb.Hello(job="j", group="g" * 20_000)), "'group' has 20000 characters"),
        (pb.GroupMessage(hello=pb.Hello(job="j", group="g", protocol_version=99)), "protocol version 99"),
        (pb.GroupMessage(hello=pb.Hello(job="", group="g", protocol_version=1)), "a job needs a name"),
        (pb.GroupMessage(hello=pb.Hello(job="j", group="", protocol_version=1)), "a group needs a name"),
        (
            pb.GroupMessage(hello=pb.Hello(job="j", group="g", protocol_version=1, rank=1, ranks=2)),
            "rank 1 of 2: groups of several processes are not supported yet",
        ),
    ],
)
def test_a_client_that_breaks_the_protocol_is_told_so_and_nobody_else_is_disturbed(
    message: pb.GroupMessage, text: str
) -> None:
    async def body() -> None:
        async with serving() as server, clients(server, 2) as groups:
            bad, good = groups
            (quorum,) = await join_all([good], 1)
            await bad.call.write(message)
            (answer,) = await bad.until_end()
            assert isinstance(answer, m.Evicted | m.Refused)
            assert text in answer.reason
            await good.say(m.Vote(quorum.quorum_id, m.Step(0), ok=True))
            assert (await good.hear(m.Commit)).step == 0

    run(body)


def test_jobs_of_one_coordinator_do_not_touch() -> None:
    async def body() -> None:
        async with serving() as server, clients(server, 1, "one") as one, clients(server, 1, "two") as two:
            for groups in (one, two):
                (quorum,) = await join_all(groups, 1)
                assert [member.group for member in quorum.members] == ["group-0"]

    run(body)


def test_health_and_reflection_answer() -> None:
    async def body() -> None:
        async with serving() as server, grpc.aio.insecure_channel(f"localhost:{server.port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", SERVICE):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            listed = await call.read()
            assert SERVICE in {service.name for service in listed.list_services_response.service}
            call.cancel()

    run(body)


def test_a_port_in_use_is_said_in_words() -> None:
    async def body() -> None:
        async with serving() as server:
            other = Server(f"localhost:{server.port}", PATIENT)
            with pytest.raises(
                OSError, match=r"cannot listen on .*the port is in use.*choose another --bind"
            ):
                await other.start()

    run(body)
