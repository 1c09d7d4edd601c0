"""The coordinator's shell: real gRPC streams on a port that the system chooses."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from jaxft_coordinator.shell import _jobs, _server, _session
from jaxft_coordinator.shell._server import Server
from jaxft_coordinator.shell._services import SERVICE
from jaxft_protocol import deltas, wire
from jaxft_protocol.coordinator.job import GroupPhase, Options, SessionId
from jaxft_protocol.messages import (
    Commit,
    CoordinatorMessage,
    Evicted,
    GroupName,
    Heartbeat,
    Incarnation,
    Join,
    NewQuorum,
    Step,
    Welcome,
)
from jaxft_protocol.proto import coordinator_pb2 as pb

from tests import patience
from tests.security.groups import Group, commit, pair

PATIENCE_S = patience.FAR_S
NEVER_S = 3600.0


class Client(Group):
    """A group without a key."""

    def __init__(self, port: int, name: str = "a", job: str = "job") -> None:
        super().__init__(port, name, job=job)

    async def hello(self, incarnation: int = 1) -> CoordinatorMessage | None:
        self.identity = replace(self.identity, incarnation=Incarnation(incarnation))
        return await self.greet()

    async def join(self, shards: int = 2) -> None:
        await self.say(Join(Step(0), 0xD1, total_shards=shards))


@contextlib.asynccontextmanager
async def serving(**options: float) -> AsyncIterator[Server]:
    """A coordinator; by default it judges no silence, because most clients here send no heartbeats."""
    options = {"founding_wait_s": 0.0, "heartbeat_timeout_s": NEVER_S, **options}
    server = Server("localhost:0", Options(**options))  # pyright: ignore[reportArgumentType]
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=0.0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await patience.wait_for(scenario())

    asyncio.run(bounded())


def test_a_round_of_votes_is_a_commit():
    async def scenario() -> None:
        async with serving(min_replicas=2) as server, pair(server.port) as (a, b, quorum):
            assert [member.group for member in quorum.members] == ["a", "b"]
            await commit(a, b, quorum, 0)

    run(scenario)


def test_welcome_answers_hello():
    async def scenario() -> None:
        async with serving(heartbeat_timeout_s=5.0) as server, Client(server.port) as client:
            before_s = int(time.time())
            welcome = await client.hello()
            assert isinstance(welcome, Welcome)
            assert replace(welcome, term=0) == Welcome(1667)
            assert before_s - 60 < welcome.term <= time.time(), "terms grow with the clock"

    run(scenario)


def test_a_closed_stream_is_noticed_at_once():
    async def once() -> float:
        async with serving(min_replicas=1) as server, Client(server.port, "a") as a:
            async with Client(server.port, "b") as b:
                await a.hello()
                await b.hello()
                await a.join()
                await b.join()
                await a.hear_until(NewQuorum)
                began_s = patience.machine_s()
            again = await a.hear_until(NewQuorum)
            assert isinstance(again, NewQuorum)
            assert [member.group for member in again.members] == ["a"]
            return patience.machine_s() - began_s

    async def best_of_five() -> float:
        return min([await once() for _ in range(5)])

    assert asyncio.run(best_of_five()) < 1.0


def test_a_silent_group_whose_process_lives_is_put_out_later(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_jobs, "SILENT_TIMEOUTS", 2)

    async def scenario() -> None:
        async with (
            serving(heartbeat_timeout_s=2.0) as server,
            pair(server.port, min_replicas=1) as (a, b, _),
        ):

            async def beat() -> None:
                while True:
                    await a.say(Heartbeat())
                    await asyncio.sleep(0.05)

            beating = asyncio.create_task(beat())
            evicted = await b.hear_until(Evicted)
            assert isinstance(evicted, Evicted)
            assert "no heartbeat for " in evicted.reason
            assert evicted.may_return
            assert await b.hear() is None
            again = await a.hear_until(NewQuorum)
            beating.cancel()
            assert isinstance(again, NewQuorum)
            assert [member.group for member in again.members] == ["a"]

    run(scenario)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "a message of kind None is not part of protocol 2"),
        (b"\xfa\x01\x00", "a message of kind None is not part of protocol 2"),
        (
            pb.GroupMessage(heartbeat=pb.Heartbeat()).SerializeToString(),
            "the first message of a session must be",
        ),
        (pb.GroupMessage(hello=pb.Hello(job="x" * 10_001)).SerializeToString(), "'job' has 10001 characters"),
        (
            pb.GroupMessage(join=pb.Join(settings={f"{i}": "" for i in range(201)})).SerializeToString(),
            "201 settings exceed the maximum of 200",
        ),
        (
            pb.GroupMessage(vote=pb.Vote(accused=["x"] * 10_001)).SerializeToString(),
            "10001 accused groups exceed the maximum of 10000",
        ),
        (
            pb.GroupMessage(vote=pb.Vote(ok=True, raised=True)).SerializeToString(),
            "a vote is ok and reports an exception",
        ),
    ],
)
def test_who_breaks_the_protocol_is_told_and_put_out_and_others_go_on(data: bytes, text: str):
    async def scenario() -> None:
        async with serving(min_replicas=2) as server, pair(server.port) as (a, b, quorum):
            async with Client(server.port, "mad") as mad:
                await mad.send(data)
                evicted = await mad.hear()
                assert isinstance(evicted, Evicted)
                assert text in evicted.reason
                assert not evicted.may_return
                assert await mad.hear() is None
            await commit(a, b, quorum, 0)

    run(scenario)


def test_a_second_hello_in_a_session_is_refused():
    async def scenario() -> None:
        async with serving() as server, Client(server.port) as client:
            await client.hello()
            assert isinstance(await client.hello(), Evicted)

    run(scenario)


def test_the_server_keeps_nothing_of_jobs_and_sessions_that_are_over():
    async def scenario() -> None:
        async with serving() as server:
            for i in range(20):
                async with Client(server.port, "a", f"job-{i}") as client:
                    await client.hello()
                    await client.join()
                    await client.hear_until(NewQuorum)
        assert len(server._jobs) == 0
        assert server._sessions == {}

    run(scenario)


def test_health_is_serving():
    async def scenario() -> None:
        async with serving() as server, grpc.aio.insecure_channel(f"localhost:{server.port}") as channel:
            for service in ("", SERVICE):
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=service)
                )
                assert answer.status == health_pb2.HealthCheckResponse.SERVING

    run(scenario)


def test_reflection_lists_the_service():
    async def scenario() -> None:
        async with serving() as server, grpc.aio.insecure_channel(f"localhost:{server.port}") as channel:
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            answer = await call.read()
            listed = {service.name for service in answer.list_services_response.service}
            assert {"jaxft.v1.Coordinator", "grpc.reflection.v1alpha.ServerReflection"} <= listed
            await call.done_writing()

    run(scenario)


def test_stopping_ends_every_stream():
    async def scenario() -> None:
        async with serving(min_replicas=2) as server, pair(server.port) as (a, b, _):
            stopping = asyncio.create_task(server.stop(grace_s=5.0))
            assert await a.hear() is None
            assert await b.hear() is None
            await patience.wait_for(stopping, 5.0)

    run(scenario)


def test_a_decision_without_change_costs_the_same_few_bytes_for_any_number_of_groups():
    sizes: dict[int, int] = {}

    async def measure(groups: int) -> None:
        async with (
            serving(min_replicas=groups, heartbeat_timeout_s=NEVER_S) as server,
            contextlib.AsyncExitStack() as stack,
        ):
            clients = [await stack.enter_async_context(Client(server.port, f"g-{i}")) for i in range(groups)]
            for client in clients:
                await client.hello()
                await client.join(shards=50)
            quorums = [await client.hear_until(NewQuorum) for client in clients]
            assert isinstance(quorums[0], NewQuorum)
            for client in clients:
                await client.vote(quorums[0], 0)
            decisions = {await client.read_bytes() for client in clients}
            (decision,) = decisions
            assert decision is not None
            sizes[groups] = len(decision)

    run(lambda: measure(2))
    run(lambda: measure(50))
    assert sizes[2] == sizes[50] < 20


def test_what_goes_to_many_is_put_into_words_once(monkeypatch: pytest.MonkeyPatch):
    made: list[CoordinatorMessage] = []
    to_proto = wire.coordinator_to_proto

    def counted(message: CoordinatorMessage, base: NewQuorum | None = None) -> pb.CoordinatorMessage:
        made.append(message)
        return to_proto(message, base)

    async def scenario() -> None:
        async with serving(min_replicas=2) as server:
            monkeypatch.setattr(_server.wire, "coordinator_to_proto", counted)
            async with pair(server.port) as (a, b, quorum):
                await commit(a, b, quorum, 0)
        assert sum(isinstance(message, NewQuorum) for message in made) == 1
        assert sum(isinstance(message, Commit) for message in made) == 1

    run(scenario)


def phase_of(server: Server, group: str) -> GroupPhase | None:
    job = server._jobs.get("job")
    known = None if job is None else job.groups.get(GroupName(group))
    return None if known is None else known.phase


def test_a_change_of_quorum_is_told_as_a_difference():
    async def scenario() -> None:
        async with serving(min_replicas=2) as server, pair(server.port) as (a, b, quorum):
            async with Client(server.port, "c") as late:
                await late.hello()
                await late.join()
                # Another connection carries the votes.
                await patience.until_async(lambda: phase_of(server, "c") is GroupPhase.READY, "c to stand by")
                for group in (a, b):
                    await group.vote(quorum, 0)
                while (heard := await a.read()) is not None and not heard.HasField("commit"):
                    pass
                assert heard is not None
                following = heard.commit.next
                assert following.base_quorum_id == quorum.quorum_id
                assert [member.group for member in following.members] == ["c"]
                complete = await late.hear_until(NewQuorum)
                assert isinstance(complete, NewQuorum)
                assert deltas.from_proto(following, quorum) == complete

    run(scenario)


def test_a_group_that_reads_nothing_is_cut_off():
    async def scenario() -> None:
        session = _session.GroupSession(SessionId(1))
        for _ in range(_session.MAX_OUTBOX_MESSAGES):
            session.put(pb.CoordinatorMessage())
        assert not session.closed
        session.put(pb.CoordinatorMessage())
        assert session.closed
        assert session.outbox.get_nowait() is None
        assert session.outbox.empty()

    run(scenario)
