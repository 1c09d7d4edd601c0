"""Whatever placement jit takes: join, exchange, kill, heal and resume from a checkpoint, on real processes."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import Cluster, Worker, cluster
from tests.placements.states import STATES

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

WORKER = Path(__file__).with_name("worker.py")
STEPS = "8"


def start(here: Cluster, group: str, state: str, *flags: str, alone: bool = False) -> Worker:
    words = ("--state", state, "--steps", STEPS, *flags)
    return here.start(group, *words, coordinated=not alone, script=WORKER)


def end(worker: Worker) -> dict[str, Any]:
    return next(event for event in worker.events() if event["event"] == "finished")


@pytest.mark.parametrize("state", STATES)
def test_a_group_is_killed_and_heals_and_then_all_resume(state: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator("--min-replicas", "2")
        alone = start(here, "alone", state, alone=True)
        gate = tmp_path / "gate"
        flags = ("--checkpoints", str(tmp_path / "saved"), "--gate", str(gate))
        first, second = (start(here, f"group-{i}", state, *flags) for i in (0, 1))
        here.until(lambda: len(first.steps()) == len(second.steps()) == 3, "the first steps")
        second.process.send_signal(signal.SIGKILL)
        here.until_dead(second)
        again = start(here, "group-1", state, *flags)
        here.until(lambda: any(event["healed"] for event in again.steps()), "the heal")
        gate.touch()
        here.until_finished(first, again, alone)
        assert end(first) == end(again)
        assert end(first) == end(alone), json.dumps([end(first), end(alone)], indent=1)


@pytest.mark.parametrize("state", STATES)
def test_all_die_and_resume(state: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator("--min-replicas", "2")
        alone = start(here, "alone", state, alone=True)
        saved, gate = tmp_path / "saved", tmp_path / "gate"
        flags = ("--checkpoints", str(saved), "--gate", str(gate))
        workers = [start(here, f"group-{i}", state, *flags) for i in (0, 1)]
        here.until(lambda: (saved / "2").is_dir(), "the checkpoint")
        here.until(lambda: all(len(worker.steps()) == 3 for worker in workers), "the first steps")
        for worker in workers:
            worker.process.send_signal(signal.SIGKILL)
            here.until_dead(worker)
        gate.touch()
        again = [start(here, f"group-{i}", state, *flags) for i in (0, 1)]
        here.until_finished(alone, *again)
        assert {
            event["step"] for worker in again for event in worker.events() if event["event"] == "began"
        } == {2}
        assert end(again[0]) == end(again[1]) == end(alone)
