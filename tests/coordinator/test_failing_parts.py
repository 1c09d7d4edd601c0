"""An error that ends a part of the coordinator is logged, and ends only the parts that need it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from jaxft_coordinator.shell import _server
from jaxft_coordinator.shell._connections import Connections
from jaxft_coordinator.shell._jobs import Jobs
from jaxft_coordinator.shell._leading import Leading
from jaxft_coordinator.shell._server import Server
from jaxft_protocol.coordinator.job import Event, Options, SessionClosed

from tests import patience
from tests.coordinator.test_server import Client, serving


class Broken(Exception):
    """What no code of the coordinator expects."""


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await patience.wait_for(scenario())

    asyncio.run(bounded())


async def breaks(*_: object) -> None:
    raise Broken("a part is broken")


async def ends(*_: object) -> None:
    pass


PARTS = {"jobs": (Leading, "run"), "connections": (Server, "_sweep_forever")}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("fault", "expected"), [(breaks, Broken), (ends, RuntimeError)])
def test_what_ends_a_part_that_never_ends_ends_the_server(
    part: str, fault: object, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*PARTS[part], fault)

    async def scenario() -> None:
        server = Server("localhost:0", Options())
        await server.start()
        assert server.running is not None
        await asyncio.wait([server.running])
        assert isinstance(server.running.exception(), expected)
        await server.stop(grace_s=0.0)

    run(scenario)


def test_a_disk_that_does_not_answer_is_named_and_does_not_keep_the_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")  # to open it takes a writer
    program = (
        "import sys\n"
        "from jaxft_coordinator import _cli, _serve\n"
        "from jaxft_coordinator.stores import _store\n"
        "_serve.END_WITHIN_S, _store.SAY_EVERY_S = 0.5, 0.1\n"
        "_cli.main()\n"
    )
    command = [sys.executable, "-c", program, "--bind", "localhost:0", "--state", str(tmp_path)]
    log = tmp_path / "lines"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output)
    try:
        waits = f"waiting for the disk of {tmp_path} to read its decisions"
        patience.until(lambda: waits in log.read_text(), "the reason of the wait", context=log.read_text)
        process.terminate()
        assert patience.wait(process) == 1
    finally:
        process.kill()
    assert "the coordinator has not ended within 0 s, as when a disk does not answer" in log.read_text()


def test_a_look_at_connections_that_fails_is_said_and_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[int] = []

    def fails(*_: object) -> int:
        looks.append(1)
        raise Broken("no /proc")

    monkeypatch.setattr(Connections, "sweep", fails)
    monkeypatch.setattr(_server, "_SWEEP_S", 0.01)

    async def scenario() -> None:
        async with serving() as server:
            await patience.until_async(lambda: len(looks) > 2, "three looks")
            assert server.running is not None
            assert not server.running.done()

    run(scenario)
    assert "failed to check its connections" in caplog.text


def test_a_failing_end_of_a_session_still_ends_its_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = Jobs.step

    def fails(self: Jobs, name: str, event: Event) -> None:
        if isinstance(event, SessionClosed):
            raise Broken("the job cannot let it go")
        step(self, name, event)

    monkeypatch.setattr(Jobs, "step", fails)

    async def scenario() -> None:
        async with serving(min_replicas=1) as server, Client(server.port) as client:
            await client.hello()
            await client._call.done_writing()  # its half of the stream
            while await client.hear() is not None:
                pass

    run(scenario)
    assert "the coordinator failed to close it" in caplog.text
