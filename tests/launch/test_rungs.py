"""`jaxft launch --rungs` with real processes that do not train: groups come back with fewer devices, and climb."""

import shlex
from pathlib import Path

import pytest

from tests import patience
from tests.launch.launches import Launch, fakes

pytestmark = pytest.mark.processes

FOUR = ("--groups", "2", "--devices", "0,1,2,3", "--rungs", "2,1")
STAYS = "group-0=steps:9 group-0=gate:end group-0=exit:0"


@pytest.fixture
def working(tmp_path: Path) -> Path:
    """What the probe prints."""
    file = tmp_path / "working"
    file.write_text("0 1 2 3")
    return file


def probed(working: Path, after_s: str) -> tuple[str, ...]:
    words = ("sh", "-c", 'echo >> "$1.asked"; cat "$1"', "sh", str(working))
    return ("--probe", shlex.join(words), "--rung-after-s", after_s)


def probes(working: Path) -> int:
    """How often the probe has run."""
    return len(working.with_name(f"{working.name}.asked").read_text())


def started(running: Launch, group: str) -> list[list[int]]:
    """The devices of each life of a group."""
    return [event["devices"] for event in running.events("group_started") if event["group"] == group]


def test_a_group_comes_back_smaller_and_climbs_when_its_device_is_back(folder: Path, working: Path) -> None:
    lives = (
        f"env:JAX_NUM_CPU_DEVICES {STAYS} steps:3 gate:lost kill",
        f"{STAYS} env:JAX_NUM_CPU_DEVICES env:JAXFT_OTHER_MESHES drains:5 steps:5 mute",
        "env:JAX_NUM_CPU_DEVICES steps:9 gate:end exit:0",
    )
    with fakes(folder, *FOUR, *probed(working, "1"), lives=lives) as running:
        running.until("group_started", 2)
        working.write_text("0 1 3")
        (folder / "lost").touch()
        missing = running.until("devices_missing")
        running.until("group_started", 3)
        # A group that is drained before its program has begun says nothing.
        patience.until(
            lambda: "JAXFT_OTHER_MESHES=" in running.text(), "the second life", context=running.text
        )
        working.write_text("0 1 2 3")
        climbs = running.until("group_climbs")
        running.until("group_started", 4)
        (folder / "end").touch()
        assert running.status() == 0, running.text()
    assert (missing["group"], missing["devices"]) == ("group-1", [2])
    assert (climbs["group"], climbs["life"]) == ("group-1", 1)
    assert started(running, "group-0") == [[0, 1]]
    assert started(running, "group-1") == [[2, 3], [3], [2, 3]]
    says = [line for line in running.text().splitlines() if "[group-1] JAX_NUM_CPU_DEVICES" in line]
    assert [line.rpartition("=")[2] for line in says] == ["2", "1", "2"]
    assert "[group-1] JAXFT_OTHER_MESHES=1" in running.text()
    assert (
        "group-1 waits for its devices 2; after 1 s it starts with as many as work, 1 at least"
        in running.text()
    )


def test_a_device_that_is_back_in_time_costs_no_rung(folder: Path, working: Path) -> None:
    lives = (f"{STAYS} steps:3 gate:lost kill", "steps:9 gate:end exit:0")
    with fakes(folder, *FOUR, *probed(working, "3600"), lives=lives) as running:
        running.until("group_started", 2)
        working.write_text("0 1")
        (folder / "lost").touch()
        running.until("devices_missing")
        working.write_text("0 1 2 3")
        running.until("group_started", 3)
        (folder / "end").touch()
        assert running.status() == 0, running.text()
    assert started(running, "group-1") == [[2, 3], [2, 3]]


def test_an_error_by_a_lost_device_is_not_tried_again_with_it(folder: Path, working: Path) -> None:
    """The answer that counts was asked for after the end: the one before may be older than the loss."""
    lives = (f"{STAYS} steps:3 gate:lost exit:1", "steps:9 gate:end exit:0")
    with fakes(folder, *FOUR, *probed(working, "0.5"), lives=lives) as running:
        running.until("group_started", 2)
        working.write_text("0 1 3")
        (folder / "lost").touch()
        running.until("group_started", 3)
        (folder / "end").touch()
        assert running.status() == 0, running.text()
    assert started(running, "group-1") == [[2, 3], [3]]


def test_no_group_climbs_while_no_other_holds_the_state(folder: Path, working: Path) -> None:
    working.write_text("0 1 2")
    lives = (
        "group-0=gate:join drains:2 steps:2 group-0=gate:end group-0=exit:0 mute",
        "steps:9 gate:end exit:0",
    )
    with fakes(folder, *FOUR, *probed(working, "0.5"), lives=lives) as running:
        running.until("group_started", 2)
        assert started(running, "group-1") == [[2]]
        working.write_text("0 1 2 3")
        # group-0 has done no step yet, and five answers take longer than a group waits before it climbs.
        most = probes(working) + 5
        patience.until(lambda: probes(working) >= most, "five answers", context=running.text)
        assert not running.events("group_climbs")
        running.until_file(
            "group-1.0.starts"
        )  # drained before it has begun, it would wait forever in its next life
        (folder / "join").touch()
        running.until("group_climbs")
        running.until("group_started", 3)
        (folder / "end").touch()
        assert running.status() == 0, running.text()
    assert started(running, "group-1") == [[2], [2, 3]]


def test_without_an_answer_no_group_starts_and_a_signal_ends_the_launch(folder: Path, working: Path) -> None:
    working.unlink()
    with fakes(folder, *FOUR, *probed(working, "0.5"), lives=("exit:0",)) as running:
        patience.until(lambda: "ended with status 1" in running.text(), "the report", context=running.text)
        assert not running.events("group_started")
        running.process.terminate()
        assert running.status() == 75, running.text()


def test_a_group_alone_in_its_launcher_climbs_once_others_take_part(folder: Path, working: Path) -> None:
    """It is one of a larger job, as under Slurm: only it knows whether others hold the job's state."""
    working.write_text("0")
    lone = ("--group", "3", "--devices", "0,1", "--rungs", "2,1", *probed(working, "0.5"))
    waits = "members:2 phase:exchange:1 gate:joined"  # for those who were there in the last step
    lives = (f"drains:9 members:1 steps:1 {waits} steps:3 mute", "gate:end exit:0")
    with fakes(folder, *lone, lives=lives) as running:
        assert running.until("group_started")["devices"] == [0]
        working.write_text("0 1")
        most = probes(working) + 5
        patience.until(lambda: probes(working) >= most, "five answers", context=running.text)
        assert not running.events("group_climbs")
        (folder / "joined").touch()
        running.until("group_climbs")
        assert running.until("group_started", 2)["devices"] == [0, 1]
        (folder / "end").touch()
        assert running.status() == 0, running.text()
