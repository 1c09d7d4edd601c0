"""Everything dies at once, again and again, at random moments: also before the first checkpoint, and during saves."""

import random
import signal
from pathlib import Path

import pytest

from tests.clusters import Cluster, Worker, cluster, digest_alone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

STEPS = 60
GROUPS = ("group-0", "group-1")
# A coordinator that has restarted waits four of these for groups that hold the newest state.
TIMEOUT = ("--heartbeat-timeout-ms", "1500")
CUTS = 8


def flags(here: Cluster) -> tuple[str, ...]:
    saved = ("--checkpoints", str(here.folder / "checkpoints"), "--checkpoint-every", "2")
    return "--steps", str(STEPS), *saved, "--pace", "0.02"


def start(here: Cluster) -> list[Worker]:
    return [here.start(group, *flags(here)) for group in GROUPS]


def until_step(here: Cluster, workers: list[Worker], step: int) -> None:
    here.until(lambda: max(worker.step for worker in workers) >= step, f"step {step}")


def cut(here: Cluster, workers: list[Worker], order: random.Random, *, coordinator: bool) -> None:
    """Kill all groups in any order, and perhaps the coordinator among them."""
    processes = [worker.process for worker in workers]
    if coordinator:
        assert here.coordinator is not None
        processes.append(here.coordinator)
    order.shuffle(processes)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait()


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(1, 5))
def test_power_cuts_at_any_moment_change_nothing(seed: int, tmp_path: Path) -> None:
    order = random.Random(seed)
    with cluster(tmp_path) as here:
        store = ("--state", str(tmp_path / "store"), *TIMEOUT)
        here.start_coordinator(*store)
        workers, before = start(here), 0
        for _ in range(CUTS):
            # Mostly early in a life: then the last save is seldom complete, and at first there is none.
            target = min(STEPS - 1, before + order.choice((1, 1, 1, 2, 3, 5, 8)))
            until_step(here, workers, target)
            coordinator = order.random() < 0.5
            cut(here, workers, order, coordinator=coordinator)
            before = max(worker.step for worker in workers)
            assert before < STEPS - 1, "all may be done before the last cut: make STEPS larger"
            if coordinator:
                here.start_coordinator(*store, port=here.port)
            else:
                here.until_lost(*GROUPS)
            workers = start(here)
        here.until_finished(*workers)
        assert {worker.digest for worker in workers} == {digest_alone(STEPS)}
