"""A group that trains climbs down the mesh ladder and up again, recompiled for each mesh, while the job continues."""

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import patience
from tests.launch.launches import IMPATIENT, Launch, launch
from tests.shared import compiled_environment

STEPS = 120
PROGRAM = (sys.executable, str(Path(__file__).with_name("ladder_program.py")), "{folder}", str(STEPS))
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def steps_of(running: Launch, group: str) -> list[dict[str, Any]]:
    file = running.file(f"{group}.jsonl")
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def until_trains_on(running: Launch, group: str, devices: int) -> None:
    """Wait until the group takes part, on this number of devices."""

    def trains() -> bool:
        assert running.process.poll() is None, running.text()
        newest = steps_of(running, group)[-1:]
        return any(
            each["devices"] == devices and each["shards"] for each in newest if each["event"] == "step"
        )

    patience.until(trains, f"{group} to train on {devices} devices", context=running.text)


@pytest.mark.long
def test_four_devices_then_two_then_four(tmp_path: Path) -> None:
    working = tmp_path / "working"
    working.write_text("0 1 2 3 4 5 6 7")
    words = ("--groups", "2", "--rungs", "4,2,1", "--probe", shlex.join(("cat", str(working))))
    environment = {"JAX_PLATFORMS": "cpu", **compiled_environment()}
    with launch(tmp_path / "run", *words, program=PROGRAM, module=IMPATIENT, **environment) as running:
        until_trains_on(running, "group-0", 4)
        until_trains_on(running, "group-1", 4)
        working.write_text("0 1 2 3 4 7")
        started = [event for event in running.events("group_started") if event["group"] == "group-1"]
        os.kill(started[0]["pids"][0], signal.SIGKILL)
        until_trains_on(running, "group-1", 2)
        working.write_text("0 1 2 3 4 5 6 7")
        until_trains_on(running, "group-1", 4)
        running.file("hurry").touch()
        assert running.status() == 0, running.text()
    devices = [event["devices"] for event in running.events("group_started") if event["group"] == "group-1"]
    assert devices == [["4", "5", "6", "7"], ["4", "7"], ["4", "5", "6", "7"]]
    assert len({steps_of(running, group)[-1]["digest"] for group in ("group-0", "group-1")}) == 1
    # Half of the devices, half of the shards.
    on_two = [each["shards"] for each in steps_of(running, "group-1") if each.get("devices") == 2]
    assert {len(shards) for shards in on_two} == {2}
    assert len(steps_of(running, "group-1")[-2]["shards"]) == 3
    # group-0 has applied each step once: none was lost while the other changed its mesh.
    assert [each["step"] for each in steps_of(running, "group-0")[:-1]] == list(range(STEPS))
    assert all(event["warm"] for event in running.events("group_started"))
