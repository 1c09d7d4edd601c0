"""examples/ray under a real Ray: the actor of a group is killed, and the bits stay."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxft_launch.processes._ranks import free_ports
from tests import patience
from tests.clusters import ROOT, digest_alone

STEPS, GATE = 120, 40
GROUPS = ("group-0", "group-1", "group-2")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.processes,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="ray is not installed: `make test-ray` has an environment with it",
    ),
]


def read(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def test_the_actor_of_a_group_is_killed_and_the_bits_stay(tmp_path: Path) -> None:
    folder, gate, log = tmp_path / "run", tmp_path / "gate", tmp_path / "driver.log"
    folder.mkdir()
    flags = ("--steps", str(STEPS), "--gate", f"{GATE}:{gate}", "--gate", f"{GATE + 20}:{gate}-2")
    command = [sys.executable, "-m", "tests.ray.driver", str(folder), str(free_ports(1)[0]), *flags]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "RAY_DEDUP_LOGS": "0", "PYTHONPATH": str(ROOT)}

    def until(condition: Callable[[], Any], what: str) -> None:
        patience.until(
            lambda: condition() or driver.poll() is not None, what, limit_s=120, context=log.read_text
        )
        assert condition(), f"it has ended before {what}\n{log.read_text()}"

    def steps(group: str) -> list[int]:
        events = read(folder / f"{group}.jsonl")
        return [event["step"] for event in events if event["event"] == "step" and event["shards"]]

    def ready() -> int:
        events = read(folder / "events.jsonl")
        return sum(event["event"] == "group_ready" and event["group"] == "group-1" for event in events)

    with log.open("wb") as output:
        driver = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=environment)
    try:
        until(lambda: all(GATE in steps(group) for group in GROUPS), f"step {GATE}")
        before, pids = ready(), folder / "group-1.pids"
        os.kill(int(pids.read_text()), signal.SIGKILL)
        until(lambda: ready() > before, "group-1 to heal in another process")
        gate.touch()
        until(lambda: GATE + 20 in steps("group-1"), "group-1 to take part again")
        gate.with_name("gate-2").touch()
        until(lambda: driver.poll() is not None, "the end")
        assert driver.wait() == 0, log.read_text()
    finally:
        driver.terminate()  # Ray's own processes end with it
        driver.wait()
    assert len(pids.read_text().split()) == 2
    assert len((folder / "group-0.pids").read_text().split()) == 1
    events = [event for group in GROUPS for event in read(folder / f"{group}.jsonl")]
    finished = [event for event in events if event["event"] == "finished"]
    assert [event["digest"] for event in finished] == [digest_alone(STEPS)] * 3
