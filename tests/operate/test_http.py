"""The HTTP port, on a coordinator in this process."""

import asyncio
import contextlib
import json
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from jaxft_coordinator.http import _door, _stream, serve
from jaxft_coordinator.http.serve import HttpPort
from jaxft_coordinator.observe._happened import Happened
from jaxft_coordinator.observe.observer import Observer
from jaxft_coordinator.shell._server import Server
from jaxft_coordinator.stores import Opened
from jaxft_protocol import credentials
from jaxft_protocol.coordinator.job import Options
from jaxft_protocol.messages import Drained, Evicted, NewQuorum, Step, Vote

from jaxft_launch.client._drain import DrainOptions, run_drain
from jaxft_launch.client._port import PortError
from jaxft_launch.client._status import StatusOptions, run_status
from tests import patience
from tests.coordinator.test_server import NEVER_S, Client, run
from tests.operate.port import Port

SECRET = b"0123456789abcdef0123456789abcdef"
# How many connections the door lets in for these tests.
FEW = 8


class Behind:
    """A store that another coordinator leads."""

    leader = ""

    async def open(self, _: str) -> Opened:
        await asyncio.Event().wait()
        raise AssertionError

    async def append(self, records: object) -> None: ...

    async def lost(self) -> str:
        return ""

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def serving(
    store: Behind | None = None,
    secret: bytes | None = None,
    *,
    cert: Path | None = None,
    key: Path | None = None,
) -> AsyncIterator[tuple[Server, HttpPort, Observer, Port]]:
    observer = Observer()
    # It judges no silence: the clients of these tests send no heartbeats.
    options = Options(founding_wait_s=0.0, heartbeat_timeout_s=NEVER_S)
    server = Server("localhost:0", options, store=store, observer=observer)  # pyright: ignore
    http = HttpPort("localhost:0", server, observer, secret=secret, cert=cert, key=key)
    await server.start()
    await http.start()
    try:
        yield server, http, observer, Port(f"{'https' if cert else 'http'}://localhost:{http.port}")
    finally:
        await http.stop()
        await server.stop(grace_s=0.0)


@contextlib.asynccontextmanager
async def silent_at(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("localhost", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def read_until(reader: asyncio.StreamReader, text: bytes) -> None:
    tail = b""
    while text not in tail:
        part = await reader.read(1 << 16)
        assert part, "the connection was ended"
        tail = tail[-len(text) :] + part


def few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_door, "MAX_CONNECTIONS", FEW)


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at connections all the time."""
    monkeypatch.setattr(serve, "STATE_EVERY_S", 0.01)
    monkeypatch.setattr(_door, "TIMEOUT_S", 1.0)


def test_a_standby_is_ready_once_it_knows_the_leader() -> None:
    async def scenario() -> None:
        store = Behind()
        async with serving(store) as (_, _, _, web):
            status, text = await asyncio.to_thread(web.get, "/readyz")
            assert (status, json.loads(text)["role"]) == (503, "starting")
            store.leader = "other:29510"
            status, text = await asyncio.to_thread(web.get, "/readyz")
            assert (status, json.loads(text)["leader"]) == (200, "other:29510")
            assert await asyncio.to_thread(web.metric, "jaxft_leads") == 0
            assert await asyncio.to_thread(web.metric, "jaxft_ready") == 1

    run(scenario)


def test_a_coordinator_that_does_not_lead_says_whom_to_ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rather than that there is no such job."""
    token = credentials.operator_key(SECRET).hex()
    monkeypatch.setenv("JAXFT_TOKEN", token)

    async def scenario() -> None:
        store = Behind()
        async with serving(store, SECRET) as (_, _, _, web):
            for leader, text in (
                ("", "does not lead yet, and knows of no other that does"),
                ("other:29510", "stands by, and other:29510 leads: ask the HTTP port of that one"),
            ):
                store.leader = leader
                assert (await asyncio.to_thread(web.json, "/api/v1/jobs")) == {"jobs": []}
                status, output = await asyncio.to_thread(web.get, "/api/v1/jobs/job")
                assert (status, text in json.loads(output)["text"]) == (503, True)
                status, found = await asyncio.to_thread(web.post, "/api/v1/jobs/job/pause", b"", token)
                assert (status, text in found["text"]) == (503, True)
                for command in (
                    lambda: run_status(StatusOptions(http=web.url)),
                    lambda: run_status(StatusOptions("job", http=web.url)),
                    lambda: run_drain(DrainOptions("a", http=web.url)),
                    lambda: run_drain(DrainOptions("a", job="job", http=web.url)),
                ):
                    with pytest.raises(PortError, match=text):
                        await asyncio.to_thread(command)

    run(scenario)
    assert capsys.readouterr().out == ""


def test_a_job_name_with_a_slash_has_its_page() -> None:
    async def scenario() -> None:
        async with serving() as (server, _, _, web), Client(server.port, "a", "team/run 1") as client:
            await client.hello()
            found = await asyncio.to_thread(web.json, "/api/v1/jobs/team/run%201")
            assert found["job"] == "team/run 1"
            assert found["state"] == "starting"
            (group,) = found["group_list"]
            assert (group["group"], group["state"], group["address"]) == ("a", "present", "a:1")
            status, text = await asyncio.to_thread(web.get, "/api/v1/jobs/none")
            assert (status, json.loads(text)["text"][:40]) == (
                404,
                "this coordinator knows no job 'none'; 1 ",
            )

    run(scenario)


def test_viewers_of_one_address_do_not_keep_those_of_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The busiest address loses its oldest viewer, unless the new one would make its own the busiest."""
    monkeypatch.setattr(_stream, "MAX_VIEWERS", 3)

    async def scenario() -> None:
        async with serving() as (_, http, _, _), contextlib.AsyncExitStack() as stack:

            async def view(address: str) -> asyncio.StreamReader:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", http.port, local_addr=(address, 0)
                )
                stack.callback(writer.close)
                writer.write(b"GET /api/v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
                return reader

            async def is_shown(reader: asyncio.StreamReader) -> bool:
                return b" 200 " in await patience.wait_for(reader.readline())

            first, *others = [await view("127.0.0.1") for _ in range(3)]
            assert [await is_shown(each) for each in (first, *others)] == [True] * 3
            assert not await is_shown(await view("127.0.0.1"))
            assert await is_shown(await view("127.0.0.2"))
            await read_until(first, b"\r\n0\r\n\r\n")  # the end of the answer
            assert not await is_shown(await view("127.0.0.2"))
            assert await is_shown(await view("127.0.0.3"))

    run(scenario)


def test_connections_that_ask_nothing_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    few_connections(monkeypatch)

    async def scenario() -> None:
        async with serving() as (_, http, _, web):
            async with contextlib.AsyncExitStack() as stack:
                silent = [await stack.enter_async_context(silent_at(http.port)) for _ in range(2 * FEW)]
                assert await asyncio.to_thread(web.get, "/healthz") == (200, "ok\n")
                ended = [reader.read() for reader, _ in silent[:-FEW]]
                await patience.wait_for(asyncio.gather(*ended, return_exceptions=True))

    run(scenario)


def test_a_connection_that_never_sends_a_whole_request_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    hurried(monkeypatch)

    async def scenario() -> None:
        async with serving(secret=SECRET) as (_, http, _, _), contextlib.AsyncExitStack() as stack:
            ends: list[asyncio.Task[bytes]] = []
            for sent in (
                b"",
                b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
                b"POST /api/v1/actions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
                b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\n",
            ):
                reader, writer = await stack.enter_async_context(silent_at(http.port))
                writer.write(sent)
                ends.append(asyncio.create_task(reader.read()))
            await patience.wait_for(asyncio.gather(*ends, return_exceptions=True))

    run(scenario)


def test_a_viewer_that_reads_nothing_is_ended_and_one_that_reads_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hurried(monkeypatch)
    monkeypatch.setattr(_stream, "MAX_VIEWERS", 2)
    asks = b"GET /api/v1/events HTTP/1.1\r\nHost: x\r\n\r\n"
    big = Happened("leads", reason="x" * 100_000)

    async def scenario() -> None:
        async with (
            serving() as (_, http, observer, web),
            silent_at(http.port) as (reads, asks_and_reads),
            silent_at(http.port) as (_, asks_only),
        ):
            asks_and_reads.write(asks)
            asks_only.write(asks)
            await patience.wait_for(reads.readuntil(b"event: state"))
            reading = asyncio.create_task(read_until(reads, b'"term": 7'))
            while (await asyncio.to_thread(web.get, "/api/v1/jobs"))[0] == 200:
                for _ in range(50):
                    observer.tell("", big)
                await asyncio.sleep(0)
                if len(http._streams._viewers) == 1:  # pyright: ignore[reportPrivateUsage]
                    break
            observer.tell("", Happened("leads", more={"term": 7}))
            await patience.wait_for(reading)

    run(scenario)


def test_actions_are_off_by_default_and_need_a_token() -> None:
    body = json.dumps({"action": "evict", "job": "job", "group": "a"}).encode()

    async def off() -> None:
        async with serving() as (_, _, _, web):
            status, found = await asyncio.to_thread(web.post, "/api/v1/actions", body, "x")
            assert (status, found["ok"]) == (403, False)
            assert (await asyncio.to_thread(web.get, "/api/v1/actions"))[0] == 405

    async def on() -> None:
        operator = credentials.operator_key(SECRET).hex()
        other = credentials.job_key(SECRET, "other").hex()
        async with serving(secret=SECRET) as (server, _, _, web), Client(server.port, "a") as client:
            await client.hello()
            cases = [
                (body, "", 401, "neither the token of job 'job' nor"),
                (body, other, 401, "neither the token of job 'job' nor"),
                (b"{}", operator, 400, "must be evict, drain, pause or resume"),
                (body.replace(b'"a"', b'""'), operator, 400, "evict is for one group of job 'job': name it"),
                (b" " * 5000, operator, 413, "at most 4096 bytes"),
                (body.replace(b'"a"', b'"b"'), operator, 404, "group 'b' of job 'job' is not connected"),
                (body.replace(b'"job"}', b'"x"}'), operator, 200, "is evicted"),
            ]
            for output, token, status, text in cases:
                got, found = await asyncio.to_thread(web.post, "/api/v1/actions", output, token)
                assert (got, text in found["text"]) == (status, True), (output, found)
            assert server.jobs.get("job") is None or not server.jobs.get("job").groups  # pyright: ignore

    run(off)
    run(on)


def test_a_body_that_makes_no_sense_is_a_bad_request(caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /api/v1/actions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    drain = {"action": "drain", "job": "job", "group": "a"}
    cases = [
        *((body, "must be JSON: ") for body in (b"[" * 4000, b'{"a":' * 800, b"\xff")),
        *((body, "must be a JSON object, not ") for body in (b"null", b"[]", b'"drain"')),
        *(
            (json.dumps(drain | {field: "\ud800"}).encode(), "must be texts")
            for field in ("action", "job", "group", "reason")
        ),
    ]

    async def scenario() -> None:
        async with serving(secret=SECRET) as (_, http, _, web):
            for token in ("", credentials.operator_key(SECRET).hex()):
                for body, text in cases:
                    got, found = await asyncio.to_thread(web.post, "/api/v1/actions", body, token)
                    assert (got, text in found["text"]) == (400, True), found
            # A client that goes in the middle of its body.
            reader, writer = await asyncio.open_connection("localhost", http.port)
            writer.write(head)
            writer.write_eof()
            await patience.wait_for(reader.read())
            writer.close()

    run(scenario)
    assert not [record for record in caplog.records if record.exc_info]


def test_strangers_at_the_port_cause_few_lines_and_forge_none(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loggers = ("uvicorn.error", "jaxft_coordinator.audit.refused")
    for limit in [each for name in loggers for each in logging.getLogger(name).filters]:
        monkeypatch.setattr(limit, "_period_start_s", -1e9)  # whatever other tests have logged
    forged = json.dumps({"action": "x\n12:00 audit: operator", "job": "job"}).encode()

    async def scenario() -> None:
        async with serving(secret=SECRET) as (_, http, _, web):
            for _ in range(60):
                reader, writer = await asyncio.open_connection("localhost", http.port)
                writer.write(b"no request\r\n\r\n")
                await patience.wait_for(reader.read())
                writer.close()
                assert (await asyncio.to_thread(web.post, "/api/v1/actions", forged))[0] == 401

    with caplog.at_level(logging.INFO):
        run(scenario)
    by_logger = Counter(record.name for record in caplog.records)
    assert [0 < by_logger[name] <= 20 for name in loggers] == [True, True]
    assert not [text for text in caplog.messages if "\n" in text]


def test_what_operators_and_groups_say_forges_no_line(caplog: pytest.LogCaptureFixture) -> None:
    output = "why\n12:00 [jaxft coordinator] forged \x1b[2J"
    shown = "why 12:00 [jaxft coordinator] forged \\x1b[2J"

    async def scenario() -> None:
        operator = credentials.operator_key(SECRET).hex()
        async with serving() as (server, _, _, _), Client(server.port, "a") as client:
            await client.hello()
            await client.join()
            quorum = await client.hear_until(NewQuorum)
            assert isinstance(quorum, NewQuorum)
            await client.say(Vote(quorum.quorum_id, Step(0), ok=False, reason=output, raised=True))
            await client.hear_until(Evicted)
        async with serving(secret=SECRET) as (server, _, _, web), Client(server.port, "a") as client:
            await client.hello()
            body = json.dumps({"reason": output}).encode()
            await asyncio.to_thread(web.post, "/api/v1/jobs/job/groups/a/drain", body, operator)
            await client.hear_until(Drained)
            events = (await asyncio.to_thread(web.json, "/api/v1/jobs/job"))["events"]
            assert [each["reason"] for each in events if each["event"] == "operator_action"] == [shown]

    with caplog.at_level(logging.INFO):
        run(scenario)
    assert [text for text in caplog.messages if shown in text]
    assert not [text for text in caplog.messages if not text.isprintable()]


def test_a_path_names_the_action_too() -> None:
    async def scenario() -> None:
        token = credentials.operator_key(SECRET).hex()
        async with serving(secret=SECRET) as (server, _, _, web), Client(server.port, "a") as client:
            await client.hello()
            cases = [
                ("/api/v1/jobs/job/groups/a/drain", "", 401, "neither the token of job 'job' nor"),
                ("/api/v1/jobs/job/pause", "", 401, "neither the token of job 'job' nor"),
                ("/api/v1/jobs/job/groups/b/drain", token, 404, "group 'b' of job 'job' is not connected"),
                ("/api/v1/jobs/x/groups/a/drain", token, 404, "serves no job 'x'"),
                ("/api/v1/jobs/x/pause", token, 404, "serves no job 'x'"),
                ("/api/v1/jobs/job/stop", token, 400, "must be evict, drain, pause or resume"),
                (
                    "/api/v1/jobs/job/groups/a/pause",
                    token,
                    400,
                    "pause is for a whole job: leave out the group, 'a'",
                ),
                ("/api/v1/jobs/job/groups/a/resume", token, 400, "resume is for a whole job"),
                ("/api/v1/jobs/job/pause", token, 200, "pauses after its current step"),
                ("/api/v1/jobs/job/resume", token, 200, "continues"),
                ("/api/v1/jobs/job/groups/a/drain", token, 200, "its process ends with status 0"),
            ]
            for path, key, status, text in cases:
                got, found = await asyncio.to_thread(web.post, path, b"", key)
                assert (got, text in found["text"]) == (status, True), (path, found)
            assert await client.hear_until(Drained) == Drained()

    run(scenario)


def test_a_path_names_a_group_with_a_slash() -> None:
    async def scenario() -> None:
        token = credentials.job_key(SECRET, "team/run").hex()
        async with serving(secret=SECRET) as (server, _, _, web):
            for incarnation, name in enumerate(("rack%2F1", "rack/1"), start=1):
                async with Client(server.port, "rack/1", "team/run") as client:
                    await client.hello(incarnation)
                    path = f"/api/v1/jobs/team/run/groups/{name}/drain"
                    got, found = await asyncio.to_thread(web.post, path, b"", token)
                    assert (got, found["text"][:27]) == (200, "group 'rack/1' is drained: "), found
                    assert await client.hear_until(Drained) == Drained()

    run(scenario)


def test_what_is_not_served_is_a_problem_like_any_other() -> None:
    async def scenario() -> None:
        async with serving() as (_, _, _, web):
            status, text = await asyncio.to_thread(web.get, "/api/v1/no")
            assert (status, json.loads(text)) == (
                404,
                {"ok": False, "text": "this port does not serve GET '/api/v1/no': Not Found"},
            )
            status, found = await asyncio.to_thread(web.post, "/api/v1/jobs", b"")
            assert (status, found["ok"], found["text"]) == (
                405,
                False,
                "this port does not serve POST '/api/v1/jobs': Method Not Allowed",
            )

    run(scenario)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_every_address_of_a_name_is_served_or_none() -> None:
    async def scenario() -> None:
        async with serving() as (server, _, observer, _):
            port = HttpPort("localhost:0", server, observer)
            await port.start()
            try:
                for host in ("127.0.0.1", "[::1]", "localhost"):
                    web = Port(f"http://{host}:{port.port}")
                    assert await asyncio.to_thread(web.get, "/healthz") == (200, "ok\n")
            finally:
                await port.stop()
            for host in ("127.0.0.1", "::1"):
                with socket.create_server((host, 0), family=socket.getaddrinfo(host, 0)[0][0]) as taken:
                    number = taken.getsockname()[1]
                    with pytest.raises(OSError, match="Address already in use"):
                        await HttpPort(f"localhost:{number}", server, observer).start()

    run(scenario)


@pytest.mark.parametrize("bind", ["192.0.2.1:29512", "nowhere.invalid:29512", "localhost:99999"])
def test_an_address_that_the_port_cannot_have_is_an_error_that_says_why(bind: str) -> None:
    async def scenario() -> None:
        async with serving() as (server, _, observer, _):
            with pytest.raises(OSError, match=f"cannot listen on '{bind}' for HTTP: .* name an address"):
                await HttpPort(bind, server, observer).start()

    run(scenario)
