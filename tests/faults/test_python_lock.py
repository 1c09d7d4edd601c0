"""Code that holds Python's lock for longer than the heartbeat timeout: its process lives, unlike a stopped one."""

import asyncio
import contextlib
import logging
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from jaxft_coordinator.shell._server import Server
from jaxft_protocol.coordinator.job import Options

from tests import patience

pytestmark = pytest.mark.processes

HEARTBEAT_S = 1.0
# PyDLL keeps the lock during the call, as `json.loads` of a long text does.
GROUP = """
import ctypes, sys, jaxft
with jaxft.Manager(sys.argv[1], group="a"):
    print("joined", flush=True)
    sys.stdin.readline()
    ctypes.PyDLL(None).sleep(4)
    print("held the lock", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def serving() -> Iterator[int]:
    """A coordinator in another thread, and its port."""
    ended, port = threading.Event(), queue.SimpleQueue[int]()

    async def serve() -> None:
        server = Server("localhost:0", Options(heartbeat_timeout_s=HEARTBEAT_S))
        await server.start()
        port.put(server.port)
        await asyncio.to_thread(ended.wait)
        await server.stop(grace_s=0.0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield port.get()
    finally:
        ended.set()
        patience.join(thread)


def test_a_group_that_holds_the_lock_stays_and_a_stopped_one_is_put_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "jaxft_coordinator"), serving() as port:
        command = [sys.executable, "-c", GROUP, f"localhost:{port}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as group:
            assert group.stdin is not None
            assert group.stdout is not None
            try:
                assert group.stdout.readline() == b"joined\n"
                group.stdin.write(b"\n")
                assert group.stdout.readline() == b"held the lock\n"
                assert "a is present" in caplog.text
                assert "lost a" not in caplog.text
                assert "evicts a" not in caplog.text
                group.send_signal(signal.SIGSTOP)
                patience.until(lambda: "lost a (no heartbeat for" in caplog.text, "its death to be noticed")
            finally:
                group.kill()
