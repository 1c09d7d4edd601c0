"""Coordinators that stand by for each other through a real etcd: the leader is killed, frozen, or cut off from it."""

import asyncio
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import pytest

from tests import patience
from tests.clusters import Cluster, Worker, cluster, digest_alone
from tests.stores.etcd_server import Etcd, etcd_in
from tests.stores.proxy import Proxy, proxy_to

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 40
STRUCK_AT = 5
GROUPS = ("group-0", "group-1")


@pytest.fixture
def undisturbed() -> str:
    return digest_alone(STEPS)


@pytest.fixture
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd_in(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@dataclass
class Coordinator:
    process: subprocess.Popen[bytes]
    log_path: Path
    port: int

    def logged(self, text: str) -> bool:
        return text in self.log_path.read_text()


def start_coordinator(here: Cluster, endpoint: str) -> Coordinator:
    # A new leader continues once all groups have dialled it, however late the last one does.
    patient = ("--founding-wait-ms", "1000", "--heartbeat-timeout-ms", "15000")
    here.start_coordinator("--etcd", endpoint, *patient)
    assert here.coordinator is not None
    return Coordinator(here.coordinator, here.coordinator_log, here.port)


def start_two(here: Cluster, endpoint: str, other_endpoint: str) -> tuple[Coordinator, Coordinator]:
    """The leader, and the standby."""
    leader = start_coordinator(here, endpoint)
    here.until(lambda: leader.logged("leads as"), "the first coordinator to lead")
    standby = start_coordinator(here, other_endpoint)
    here.until(lambda: standby.logged("stands by"), "the second coordinator to stand by")
    here.coordinator_log = leader.log_path
    return leader, standby


def start_groups(here: Cluster, coordinators: tuple[Coordinator, ...], gate: Path) -> dict[str, Worker]:
    """Groups; the first dials the standby first. They wait for `gate` in the struck step."""
    addresses = [f"localhost:{coordinator.port}" for coordinator in coordinators]
    lists = {"group-0": addresses, "group-1": addresses[::-1]}
    started = here.folder / "all-present"
    workers: dict[str, Worker] = {}
    for group in GROUPS:
        flags = ("--steps", str(STEPS), "--coordinator", ",".join(lists[group]))
        gates = ("--gate", f"start:{started}", "--gate", f"{STRUCK_AT}:{gate}")
        workers[group] = here.start(group, *flags, *gates, coordinated=False)
    for group in GROUPS:
        here.until(
            lambda group=group: coordinators[0].logged(f"{group} is present"), f"{group} to be present"
        )
    started.touch()
    for worker in workers.values():
        here.until(lambda worker=worker: worker.step == STRUCK_AT, "the groups to come to the struck step")
    return workers


def assert_same_run(here: Cluster, workers: dict[str, Worker], undisturbed: str) -> None:
    here.until_finished(*workers.values())
    for worker in workers.values():
        assert worker.digest == undisturbed
        assert [event["step"] for event in worker.steps()] == list(range(1, STEPS + 1))
        ids = [event["quorum_id"] for event in worker.steps()]
        assert ids == sorted(ids), "quorum ids grow from one coordinator to the next"


@contextmanager
def cable(port: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield an endpoint that leads to `port`, and what cuts it."""
    ready: Queue[tuple[asyncio.AbstractEventLoop, Proxy, asyncio.Event]] = Queue()

    async def serve() -> None:
        async with proxy_to(port) as proxy:
            stop = asyncio.Event()
            ready.put((asyncio.get_running_loop(), proxy, stop))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    loop, proxy, stop = patience.get(ready, "the proxy")

    def cut() -> None:
        loop.call_soon_threadsafe(proxy.hold)

    try:
        yield proxy.endpoint, cut
    finally:
        loop.call_soon_threadsafe(stop.set)
        patience.join(thread)


@pytest.mark.long
def test_the_leader_is_killed(etcd: Etcd, undisturbed: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        leader, standby = start_two(here, etcd.endpoint, etcd.endpoint)
        workers = start_groups(here, (leader, standby), tmp_path / "gate")
        leader.process.kill()
        (tmp_path / "gate").touch()
        here.until(lambda: standby.logged("leads as"), "the other coordinator to lead")
        assert_same_run(here, workers, undisturbed)
        assert standby.logged(f"remembered: step {STRUCK_AT}")


@pytest.mark.storm
def test_the_leader_is_frozen_and_wakes_up(etcd: Etcd, undisturbed: str, tmp_path: Path) -> None:
    last = tmp_path / "woken"
    with cluster(tmp_path) as here:
        leader, standby = start_two(here, etcd.endpoint, etcd.endpoint)
        workers = start_groups(here, (leader, standby), tmp_path / "gate")
        leader.process.send_signal(signal.SIGSTOP)
        (tmp_path / "gate").touch()
        here.until(lambda: standby.logged("leads as"), "the other coordinator to lead")
        here.until(lambda: all(w.step > STRUCK_AT for w in workers.values()), "the groups to go on")
        leader.process.send_signal(signal.SIGCONT)
        here.until(lambda: leader.logged("no longer leads"), "the old leader to find out")
        last.touch()
        assert_same_run(here, workers, undisturbed)
        assert leader.process.poll() is None, "it stands by from now on"


@pytest.mark.storm
def test_the_leader_is_cut_off_from_etcd(etcd: Etcd, undisturbed: str, tmp_path: Path) -> None:
    with cable(etcd.port) as (endpoint, cut), cluster(tmp_path) as here:
        leader, standby = start_two(here, endpoint, etcd.endpoint)
        workers = start_groups(here, (leader, standby), tmp_path / "gate")
        cut()
        (tmp_path / "gate").touch()
        here.until(lambda: leader.logged("no longer leads"), "the leader to find out")
        here.until(lambda: standby.logged("leads as"), "the other coordinator to lead")
        assert_same_run(here, workers, undisturbed)
