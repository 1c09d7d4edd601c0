"""The coordinator's view of the connections to its port."""

import contextlib
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxft_coordinator.shell._connections import _MOST_FULL_LOOKS, _MOST_IDLE_LOOKS, Connections

from tests import injection, patience


@contextlib.contextmanager
def listener(address: str = "127.0.0.1", *, backlog: int | None = None) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=backlog) as made:
        yield made


def dial(to: socket.socket) -> socket.socket:
    return socket.create_connection(to.getsockname()[:2], timeout=patience.FAR_S)


def look(connections: Connections, times: int = 1) -> bool:
    for _ in range(times):
        connections.sweep(frozenset(), 0.0)
    return connections.accepts


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_connections_that_nothing_accepts_are_noticed(address: str) -> None:
    with listener(address) as server:
        connections = Connections(server.getsockname()[1])
        with dial(server):
            assert look(connections, _MOST_IDLE_LOOKS - 1), "for a moment they may wait"
            assert not look(connections)
            with server.accept()[0]:
                assert look(connections)


def test_a_listener_that_accepts_others_meanwhile_is_busy() -> None:
    with listener() as server, contextlib.ExitStack() as opened:
        connections = Connections(server.getsockname()[1])
        opened.enter_context(dial(server))
        for _ in range(2 * _MOST_IDLE_LOOKS):
            opened.enter_context(dial(server))
            opened.enter_context(server.accept()[0])
            assert look(connections)


def test_a_listener_whose_connections_end_at_once_is_busy() -> None:
    with listener() as server, contextlib.ExitStack() as opened:
        connections = Connections(server.getsockname()[1])
        for number in range(2 * _MOST_IDLE_LOOKS):
            for _ in range(3):
                opened.enter_context(dial(server))
            for _ in range(2 if number % 5 else 5):
                with contextlib.suppress(BlockingIOError):
                    server.settimeout(0.0)
                    server.accept()[0].close()
            assert look(connections)


def test_a_listener_whose_queue_is_filled_as_soon_as_it_accepts_is_busy() -> None:
    """As in a flood: the coordinator would end, and its groups find no place in the queue of the next one."""
    with listener(backlog=0) as server, contextlib.ExitStack() as opened:
        connections = Connections(server.getsockname()[1])
        for _ in range(2 * _MOST_IDLE_LOOKS):
            opened.enter_context(dial(server))
            assert look(connections)
            server.accept()[0].close()


def test_a_full_queue_of_which_nothing_is_accepted_is_noticed_later() -> None:
    with listener(backlog=0) as server, dial(server):
        connections = Connections(server.getsockname()[1])
        assert look(connections, _MOST_FULL_LOOKS - 1)
        assert not look(connections)


@contextlib.contextmanager
def coordinator(log: Path, *before: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A coordinator that looks at its connections often, and its port."""
    program = (
        "from jaxft_coordinator import _cli\n"
        "from jaxft_coordinator.shell import _server\n"
        "_server._SWEEP_S = 0.02\n"
        "_cli.main()\n"
    )
    command = [*before, sys.executable, "-c", program, "--bind", "localhost:0"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output)
    listens = re.compile(r"\(port (\d+)\)")
    try:
        patience.until(
            lambda: listens.search(log.read_text()), "the coordinator to listen", context=log.read_text
        )
        found = listens.search(log.read_text())
        assert found is not None
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(bool(injection.why_not()), reason=injection.why_not() or "it can")
def test_a_coordinator_that_accepts_no_more_ends_and_says_so(tmp_path: Path) -> None:
    """gRPC gives up its listener after such an error, and the kernel still completes the handshakes of TCP."""
    log = tmp_path / "lines"
    failing = injection.failing("accept4:error=ENFILE:when=1")
    with (
        coordinator(log, *failing) as (process, port),
        socket.create_connection(("localhost", port), timeout=patience.FAR_S),
    ):
        assert patience.wait(process) == 1, log.read_text()
    assert f"gRPC accepts no connections any more on port {port}, and some wait" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit of Linux")
def test_a_coordinator_without_descriptors_says_so_in_a_sentence_and_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "lines"
    with coordinator(log) as (process, port):
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        text = "the coordinator cannot check its connections now: [Errno 24] Too many open files"
        patience.until(lambda: text in log.read_text(), "the line", context=log.read_text)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        with socket.create_connection(("localhost", port), timeout=patience.FAR_S) as sock:
            assert sock.recv(1), "gRPC greets who connects"
        process.terminate()
        assert patience.wait(process) == 0
    assert "Traceback" not in log.read_text()
