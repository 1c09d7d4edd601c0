"""Who may speak for a job. An unknown client at the coordinator's port can do nothing to its groups."""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import re
import socket

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from jaxft_coordinator.shell import _admission, _connections, _server, _services, limits
from jaxft_coordinator.shell._connections import Connections, peer_of
from jaxft_coordinator.shell._services import SERVICE
from jaxft_protocol import credentials
from jaxft_protocol.coordinator.job import Options
from jaxft_protocol.credentials import JobKey
from jaxft_protocol.host import admission
from jaxft_protocol.host.admission import RateLimitFilter, crowded_out
from jaxft_protocol.messages import (
    Evicted,
    GroupName,
    Heartbeat,
    Hello,
    Incarnation,
    Join,
    Refused,
    Step,
    Welcome,
)

from tests import patience
from tests.security.groups import KEY, SECRET, Group, commit, pair, run, serving, until
from tests.security.unknown_clients import crowd, read_all, streams

OTHER_SECRET = b"another secret of enough bytes"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (
            None,
            "group 'a' sent no proof: give it the token that `jaxft-coordinator token --token-file FILE job`",
        ),
        (JobKey(bytes(32)), "group 'a' does not prove that it knows the key of job 'job'"),
        (credentials.job_key(OTHER_SECRET, "job"), "does not prove"),
        (credentials.job_key(SECRET, "another job"), "does not prove"),
    ],
    ids=["no token", "zeros", "another secret", "another job"],
)
def test_who_does_not_know_the_key_is_refused_and_disturbs_nobody(key: JobKey | None, text: str) -> None:
    """With the key, a newer process of a group's name would take its place."""

    async def scenario() -> None:
        async with serving(secret=SECRET) as server, pair(server.port, KEY) as (a, b, quorum):
            for _ in range(3):
                async with Group(server.port, "a", key=key) as mallory:
                    refused = await mallory.greet()
                    assert isinstance(refused, Refused)
                    assert text in refused.reason
                    assert await mallory.hear() is None
            job = server._jobs.get("job")
            assert job is not None
            assert set(job.groups) == {"a", "b"}
            await commit(a, b, quorum, 0)

    run(scenario)


def test_a_proof_is_good_for_one_stream_and_for_what_was_said() -> None:
    async def scenario() -> None:
        async with serving(secret=SECRET) as server:
            async with Group(server.port, key=KEY) as group:
                good = group.signed()
                await group.send(good.SerializeToString())
                assert isinstance(await group.hear(), Welcome)
            async with Group(server.port) as replay:
                await replay.send(good.SerializeToString())
                assert isinstance(await replay.hear(), Refused)
            for change in ({"group": "b"}, {"job": "job2"}, {"address": "evil:1"}, {"incarnation": 8}):
                async with Group(server.port, key=KEY) as group:
                    forged = group.signed()
                    for name, value in change.items():
                        setattr(forged.hello, name, value)
                    await group.send(forged.SerializeToString())
                    assert isinstance(await group.hear(), Refused), change

    run(scenario)


@pytest.mark.parametrize("message", [Heartbeat(), Join(Step(0), 0xD1, total_shards=2)])
def test_nothing_counts_before_the_hello(message: Heartbeat | Join) -> None:
    async def scenario() -> None:
        async with serving(secret=SECRET) as server, Group(server.port) as group:
            await group.say(message)
            given = await group.read()
            assert given is not None
            assert "the first message of a session must be Hello" in given.evicted.reason
            assert await group.hear() is None
            assert len(server._jobs) == 0

    run(scenario)


def test_strangers_make_room_for_each_other_and_groups_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_admission, "MAX_UNAUTHENTICATED", 8)
    monkeypatch.setattr(
        _server, "FIRST_MESSAGE_TIMEOUT_S", 3600.0
    )  # they go to make room, not for their silence
    monkeypatch.setattr(_connections, "UNAUTHENTICATED_TIMEOUT_S", 3600.0)

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(serving(secret=SECRET))
            a, b, quorum = await stack.enter_async_context(pair(server.port, KEY))
            silent = [await stack.enter_async_context(Group(server.port)) for _ in range(20)]
            for group in silent[:12]:
                assert await group.hear() is None  # the oldest went first
            assert len(server._admission) == 8
            late = await stack.enter_async_context(Group(server.port, "c", key=KEY))
            assert isinstance(await late.greet(), Welcome)
            await commit(a, b, quorum, 0)

    run(scenario)


def test_a_stranger_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "FIRST_MESSAGE_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        async with serving() as server, Group(server.port) as silent:
            assert await silent.hear() is None
            assert len(server._admission) == 0

    run(scenario)


def test_the_coordinator_serves_a_bounded_number_of_jobs_groups_and_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_JOBS", 2)
    monkeypatch.setattr(limits, "MAX_GROUPS_PER_JOB", 2)
    monkeypatch.setattr(limits, "MAX_SESSIONS", 4)

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(serving())

            async def greet(name: str, job: str) -> object:
                group = await stack.enter_async_context(Group(server.port, name, job=job))
                return await group.greet()

            for name in "aba":  # a group that comes back finds its place
                assert isinstance(await greet(name, "one"), Welcome)
            full = await greet("c", "one")
            assert isinstance(full, Refused)
            assert (
                full.reason == "job 'one' already has 2 groups, its limit: stop a group that it does not need"
            )
            assert isinstance(await greet("a", "two"), Welcome)
            assert "this coordinator serves 2 jobs, its limit" in str(await greet("a", "three"))
            assert isinstance(await greet("b", "two"), Welcome)
            assert "this coordinator serves 4 groups, its limit" in str(await greet("b", "one"))

    run(scenario)


def test_a_job_that_fills_the_coordinator_does_not_keep_the_groups_of_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, one job's token was enough: no group of another job that had died came back."""
    monkeypatch.setattr(limits, "MAX_SESSIONS", 4)

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(serving())

            async def is_admitted(name: str, job: str) -> bool:
                group = await stack.enter_async_context(Group(server.port, name, job=job))
                return isinstance(await group.greet(), Welcome)

            assert [await is_admitted(name, "one") for name in "abcde"] == [True] * 4 + [False]
            # With two jobs the share of each is two, with three it is one.
            assert [await is_admitted(name, "two") for name in "abc"] == [True, True, False]
            assert [await is_admitted(name, "three") for name in "ab"] == [True, False]
            assert not await is_admitted("e", "one")

    run(scenario)


@pytest.mark.parametrize("address", ["h" * 10_000, "\u00e4" * 2_500])
def test_the_addresses_that_all_groups_of_a_job_receive_are_bounded(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: 300 groups with 24,576 characters each took gigabytes, and no job had a step for seconds."""
    monkeypatch.setattr(limits, "MAX_ADDRESSES_BYTES", 3 * 30_000)

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(serving())

            async def greet(name: str, job: str = "one") -> object:
                group = await stack.enter_async_context(Group(server.port, name, job=job))
                group.identity = dataclasses.replace(group.identity, address=address)
                return await group.greet()

            for name in "abc":
                assert isinstance(await greet(name), Welcome)
            refused = await greet("d")
            assert isinstance(refused, Refused)
            assert refused.reason.startswith("each of 4 groups of job 'one' receives the addresses of all")
            assert isinstance(await greet("a"), Welcome)  # it comes back
            assert isinstance(await greet("d", "two"), Welcome)

    run(scenario)


def test_a_message_larger_than_any_group_needs_ends_its_stream() -> None:
    async def scenario() -> None:
        async with serving() as server, pair(server.port) as (a, b, quorum):
            async with Group(server.port, "m") as mad:
                await mad.send(b"\x0a" + b"x" * limits.MAX_MESSAGE_BYTES)
                with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
                    await mad.read()
            await commit(a, b, quorum, 0)

    run(scenario)


def test_bytes_that_are_no_message_break_the_protocol_and_not_the_coordinator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with serving() as server, pair(server.port) as (a, b, quorum):
            for begins_well in (False, True):
                async with Group(server.port, "m") as mad:
                    if begins_well:
                        await mad.greet()
                    await mad.send(b"\xff" * 30)
                    evicted = await mad.hear_until(Evicted)
                    assert (
                        "it broke the protocol: 30 bytes that begin with ffffffffffffffff" in evicted.reason
                    )
            await commit(a, b, quorum, 0)

    run(scenario)
    assert "the coordinator failed" not in caplog.text


def test_health_cannot_be_watched_only_checked() -> None:
    """A watcher that reads nothing would keep the coordinator from stopping."""

    async def scenario() -> None:
        async with serving() as server, grpc.aio.insecure_channel(f"localhost:{server.port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status
            with pytest.raises(grpc.aio.AioRpcError, match="does not support Watch"):
                await stub.Watch(health_pb2.HealthCheckRequest()).read()

    run(scenario)


def test_few_may_ask_at_once_what_services_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_services, "_MAX_REFLECTIONS", 1)

    async def scenario() -> None:
        async with serving() as server, grpc.aio.insecure_channel(f"localhost:{server.port}") as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            sits = stub.ServerReflectionInfo()
            await sits.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            assert await sits.read()
            with pytest.raises(grpc.aio.AioRpcError, match="too many reflection calls"):
                await stub.ServerReflectionInfo().read()
            sits.cancel()

    run(scenario)


def test_the_largest_crowd_makes_room() -> None:
    known = [(1, "x"), (2, "y"), (3, "y"), (4, "z"), (5, "y"), (6, "x")]
    assert crowded_out(known, 6) == []
    assert crowded_out(known, 5) == [2]
    assert crowded_out(known, 4) == [2, 1]
    assert crowded_out(known, 3) == [2, 1, 3]
    assert sorted(crowded_out(known, 0)) == [1, 2, 3, 4, 5, 6]
    assert crowded_out([], 3) == []


# ---- connections ----


def test_what_strangers_keep_open_is_ended_and_groups_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "_SWEEP_S", 0.02)
    stuck = streams(8, path=f"/{SERVICE}/Session", window_bytes=0)

    async def scenario() -> None:
        async with serving(secret=SECRET) as server, pair(server.port, KEY) as (a, b, quorum):
            # Not before the groups are let in: they too have only that long for it.
            monkeypatch.setattr(_connections, "UNAUTHENTICATED_TIMEOUT_S", 0.5)
            with crowd(server.port, 10, stuck) as greedy, crowd(server.port, 10) as silent:
                for sock in (*greedy, *silent):
                    await asyncio.to_thread(read_all, sock)  # to its end
            await commit(a, b, quorum, 0)

    run(scenario)


def test_a_group_whose_session_is_over_cannot_keep_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "_SWEEP_S", 0.02)

    async def scenario() -> None:
        async with serving() as server, Group(server.port) as group:
            assert isinstance(await group.greet(), Welcome)
            monkeypatch.setattr(_connections, "UNAUTHENTICATED_TIMEOUT_S", 0.5)
            await group.send(b"\xff\xff")
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await group.read() is not None:
                    pass
            await until(
                lambda: not Connections(server.port)._strangers(frozenset()), "its connection to be ended"
            )

    run(scenario)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::]", "[::1]"])
def test_connections_are_known_by_the_addresses_that_grpc_gives_them(host: str) -> None:
    async def scenario() -> None:
        server = _server.Server(f"{host}:0", Options())
        await server.start()
        try:
            async with Group(server.port) as group:
                assert isinstance(await group.greet(), Welcome)
                (session,) = server._sessions.values()
                assert session.peer in Connections(server.port)._strangers(frozenset())
                assert Connections(server.port).sweep({session.peer}, 0.0) == 0
        finally:
            await server.stop(grace_s=0.0)

    run(scenario)


def test_of_too_many_connections_the_largest_crowd_loses_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connections, "MAX_UNAUTHENTICATED", 5)
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stack:
        port = listening.getsockname()[1]
        connections = Connections(port)

        def come(address: str, *groups: socket.socket) -> socket.socket:
            sock = socket.create_connection(
                ("127.0.0.1", port), timeout=patience.FAR_S, source_address=(address, 0)
            )
            stack.enter_context(listening.accept()[0])
            connections.sweep({group.getsockname() for group in groups}, 0.0)
            return stack.enter_context(sock)

        lonely, group = come("127.0.0.2"), come("127.0.0.3")
        crowd_of_one = [come("127.0.0.4", group) for _ in range(6)]
        until_ended(*crowd_of_one[:2])
        assert not any(map(is_ended, (*crowd_of_one[2:], lonely, group)))
        connections.sweep({group.getsockname()}, _connections.UNAUTHENTICATED_TIMEOUT_S + 1.0)
        until_ended(*crowd_of_one[2:], lonely)
        assert not is_ended(group)


def until_ended(*socks: socket.socket) -> None:
    """The kernel of a busy machine may deliver the end of a connection later than it was made."""
    patience.until(lambda: all(map(is_ended, socks)), "the ends of connections")


def is_ended(sock: socket.socket) -> bool:
    sock.settimeout(0.0)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("ipv4:127.0.0.1:4711", ("127.0.0.1", 4711)),
        ("ipv6:%5B::1%5D:4711", ("::1", 4711)),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", ("fe80::1", 4711)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:4711", ("10.0.0.1", 4711)),
        ("unix:", None),
        ("", None),
    ],
)
def test_peers_as_grpc_writes_them(name: str, peer: tuple[str, int] | None) -> None:
    assert peer_of(name) == peer


def test_sweeping_leaves_no_descriptor_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), listening.accept()[0]:
            gc.collect()  # what earlier tests have left could be closed in between
            before = len(os.listdir("/proc/self/fd"))
            for now_s in (0.0, 1.0, 100.0, 101.0):
                Connections(port).sweep(set(), now_s)
            assert len(os.listdir("/proc/self/fd")) <= before


# ---- names, and the log ----


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"job": ""}, "the name of a job must have 1 to 200 characters, not 0"),
        ({"job": "x" * 201}, "the name of a job must have 1 to 200 characters, not 201"),
        ({"job": ".."}, "the name of a job must not be '..', which means a folder"),
        ({"job": "a\nb"}, r"the name of a job must have only printable characters, unlike 'a\\nb'"),
        # Its lines would look like lines of job "other", and use up the lines that this job may log.
        ({"job": "other] lost b"}, "the name of a job must not contain '] ', which ends it in the log"),
        ({"group": "a\x1b[2J"}, "the name of a group must have only printable characters"),
        ({"group": "a "}, "the name of a group must not begin or end with a space, unlike 'a '"),
        ({"address": "x" * 24_577}, "of group 'a' must be at most 24576 printable characters"),
    ],
)
def test_names_that_would_harm_a_reader_are_refused(change: dict[str, str], text: str) -> None:
    hello = Hello("job", GroupName("a"), Incarnation(1), "x" * limits.MAX_ADDRESS_LENGTH)
    assert _admission.names_problem(hello) == ""
    problem = _admission.names_problem(dataclasses.replace(hello, **change))
    assert re.search(text, problem), problem
    assert problem.isprintable()


def test_a_log_of_unauthenticated_peers_is_rate_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 100.0
    monkeypatch.setattr(admission.time, "monotonic", lambda: now_s)
    logger = logging.getLogger("jaxft_coordinator.test")
    logger.addFilter(rate_limit := RateLimitFilter())
    try:
        for number in range(1000):
            logger.warning("line %d", number)
        assert len(caplog.records) == admission._LINES
        now_s += admission._PERIOD_S
        logger.warning("line %d", 1000)
    finally:
        logger.removeFilter(rate_limit)
    dropped = 1000 - admission._LINES
    assert caplog.messages[-1] == f"line 1000 ({dropped} similar lines before this one were dropped)"
