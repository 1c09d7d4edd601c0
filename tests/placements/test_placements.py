"""Whatever placement jit takes: join, exchange, kill, heal and resume from a checkpoint, on real processes."""

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


def kill(here: Cluster, *workers: Worker) -> None:
    for worker in workers:
        worker.process.send_signal(signal.SIGKILL)
        here.until_dead(worker)


@pytest.mark.parametrize("state", STATES)
def test_a_group_is_killed_and_heals_and_then_all_die_and_resume(state: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator("--min-replicas", "2")
        alone = start(here, "alone", state, alone=True)
        saved, third, sixth = (tmp_path / name for name in ("saved", "third", "sixth"))
        flags = ("--checkpoints", str(saved), "--gate", f"3:{third}", "--gate", f"6:{sixth}")
        first, second = (start(here, f"group-{i}", state, *flags) for i in (0, 1))
        here.until(lambda: len(first.steps()) == len(second.steps()) == 3, "the first steps")
        kill(here, second)
        healed = start(here, "group-1", state, *flags)
        here.until(lambda: any(event["healed"] for event in healed.steps()), "the heal")
        third.touch()
        here.until(lambda: first.step == healed.step == 6, "the steps with the healed group")
        assert healed.steps()[-1]["places"] == first.steps()[-1]["places"]
        here.until(lambda: (saved / "6").is_dir(), "the checkpoint")
        kill(here, first, healed)
        sixth.touch()
        again = [start(here, f"group-{i}", state, *flags) for i in (0, 1)]
        here.until_finished(alone, *again)
        assert [worker.events()[0] for worker in again] == [{"event": "began", "step": 6}] * 2
        assert end(again[0]) == end(again[1]) == end(alone)
