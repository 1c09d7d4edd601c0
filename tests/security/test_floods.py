"""Floods of unknown clients at real ports: the groups go on, and memory stays bounded."""

import asyncio
import contextlib
import os
import random
import re
import signal
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest
from jaxft_coordinator.shell import limits
from jaxft_protocol import credentials
from jaxft_protocol.messages import NewQuorum, Welcome

from jaxft._exchange._links import Peer
from jaxft._transport import _door
from jaxft._transport._listener import Listener
from tests import patience
from tests.clusters import Cluster, cluster
from tests.security.groups import KEY, PATIENCE_S, SECRET, Group, commit, pair, run, until
from tests.security.meeting import meet
from tests.security.unknown_clients import crowd, raw_request, streams

pytestmark = [pytest.mark.storm, pytest.mark.timeout(240)]

SESSION, CHECK = "/jaxft.v1.Coordinator/Session", "/grpc.health.v1.Health/Check"
# Measured: 110 MB for all of it; 225 MB for 15,000 connections of 8 streams, as fast as they could be made.
BOUND_BYTES = 256 << 20


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Cluster]:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_bytes(SECRET)
    with cluster(tmp_path) as here:
        here.start_coordinator("--token-file", str(secret), "--heartbeat-timeout-ms", "3600000")
        yield here


def memory_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextlib.asynccontextmanager
async def training(port: int) -> AsyncIterator[list[float]]:
    """Two groups that commit one step after another for the length of the context; how long each took, in seconds."""
    took_s: list[float] = []

    async def train(a: Group, b: Group, quorum: NewQuorum) -> None:
        while True:
            began_s = time.monotonic()
            await commit(a, b, quorum, len(took_s))
            took_s.append(time.monotonic() - began_s)
            await asyncio.sleep(0.001)  # the flood is made in this process, and wants a turn

    async with pair(port, KEY) as (a, b, quorum):
        task = asyncio.create_task(train(a, b, quorum))
        try:
            yield took_s
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def let_in(port: int) -> None:
    """A group that is late comes through the flood: it dials again when it is dropped with the unknown clients."""
    deadline_s = patience.machine_s() + PATIENCE_S
    heard: object = None
    while not isinstance(heard, Welcome):
        assert patience.machine_s() < deadline_s, (
            f"not let in for {PATIENCE_S:.0f} s; at last it heard {heard!r}"
        )
        try:
            async with Group(port, "late", key=KEY) as late:
                heard = await late.greet()
        except (AssertionError, TimeoutError, grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            heard = error


FLOODS = {
    "silence": (2000, b""),
    "garbage": (500, random.Random(7).randbytes(20_000)),
    "half a preface": (500, b"PRI * HTTP/2.0\r\n"),
    "streams that take nothing": (300, streams(100, path=SESSION, window_bytes=0)),
    "checks that take nothing": (300, streams(100, path=CHECK, window_bytes=0, body=bytes(5))),
    # Each promises a message of the size that is allowed, and sends a part of it.
    "messages that never end": (
        300,
        streams(
            8,
            path=SESSION,
            window_bytes=65535,
            body=struct.pack("!BI", 0, limits.MAX_MESSAGE_BYTES) + bytes(7000),
        ),
    ),
    "messages that are too long": (
        300,
        streams(8, path=SESSION, window_bytes=65535, body=struct.pack("!BI", 0, 0xFFFFFFFF) + bytes(7000)),
    ),
}


def test_floods_at_the_coordinator_neither_stop_the_groups_nor_fill_its_memory(coordinator: Cluster) -> None:
    process = coordinator.coordinator
    assert process is not None
    before_bytes = memory_bytes(process.pid)
    most_bytes: dict[str, int] = {}

    async def scenario() -> None:
        async with training(coordinator.port) as took_s:
            for name, (size, sent) in FLOODS.items():
                steps = len(took_s)
                with await asyncio.to_thread(contextlib.ExitStack) as stack:
                    await asyncio.to_thread(stack.enter_context, crowd(coordinator.port, size, sent))
                    await let_in(coordinator.port)
                    await until(lambda steps=steps: len(took_s) > steps + 20, f"steps in a flood of {name}")
                    most_bytes[name] = memory_bytes(process.pid) - before_bytes
            few = limits.MAX_UNAUTHENTICATED + 50
            await until(
                lambda: descriptors(process.pid) < few, "the coordinator to be rid of the unknown clients"
            )

    run(scenario)
    assert max(most_bytes.values()) < BOUND_BYTES, most_bytes
    process.send_signal(signal.SIGTERM)
    assert patience.wait(process) == 0
    log = coordinator.coordinator_log.read_text()
    assert "unauthenticated connections" in log
    ours = [line for line in log.splitlines() if "jaxft coordinator]" in line]
    assert len(ours) < 300, "a flood does not fill the disk"


def test_a_flood_at_a_data_port_does_not_keep_groups_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_door, "_HELLO_TIMEOUT_S", patience.FAR_S)
    key = credentials.data_key(KEY)
    listeners = [
        Listener(host="127.0.0.1", job="job", group=f"g{i}", incarnation=i, on_heal=None, key=key)
        for i in range(2)
    ]
    members = [Peer(f"g{i}", i, f"127.0.0.1:{listener.port}", (i,)) for i, listener in enumerate(listeners)]
    try:
        with contextlib.ExitStack() as stack:
            for sent in (b"", b"jaxft-hi", raw_request(), random.Random(7).randbytes(1000)):
                for listener in listeners:
                    stack.enter_context(crowd(listener.port, 250, sent))
            assert all(len(listener._door.half_open) <= _door._MAX_UNKNOWN for listener in listeners)
            for quorum_id in range(1, 6):
                meet(listeners, members, quorum_id)
    finally:
        for listener in listeners:
            listener.close()
