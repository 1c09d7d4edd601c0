import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from jaxft_launch.check._readings import Level, Limits, Reading
from jaxft_launch.check._sources import (
    Command,
    Measured,
    NoValue,
    Place,
    first_line,
    free_disk_gb,
    free_memory_gb,
    slowness,
    slowness_in,
    source_of,
)
from jaxft_launch.client._port import PortError
from jaxft_launch.processes._processes import kill_beside
from tests import patience
from tests.health.rules import command_rule

PLACE = Place(
    group="group-1",
    devices=(2, 3),
    environment={"JAXFT_GROUP": "group-1"},
    folder=Path("/run/one"),
    http="",
)


def run(*command: str, timeout_s: float = 60.0) -> Reading:
    return Command(command_rule(*command, timeout_s=timeout_s), PLACE).read()


@pytest.mark.parametrize(
    ("status", "level"),
    [(0, Level.OK), (1, Level.WARNING), (2, Level.CRITICAL), (3, Level.UNKNOWN), (4, Level.UNKNOWN)],
)
def test_an_exit_status_is_a_level(status: int, level: Level) -> None:
    assert run("sh", "-c", f"exit {status}").level is level


def test_the_first_line_of_a_command_is_its_text() -> None:
    reading = run("sh", "-c", "echo 'LINK DOWN | errors=3'; echo more; exit 2")
    assert reading == Reading(Level.CRITICAL, "LINK DOWN")
    assert run("sh", "-c", "exit 2").text == "exit status 2"
    assert run("sh", "-c", "echo why >&2; exit 2").text == "why"
    assert run("sh", "-c", "echo why; exit 9").text == "sh ended with status 9, not 0 to 3: why"
    assert len(first_line("x" * 5000)) == 200


def test_a_command_that_a_signal_ends_is_unknown() -> None:
    assert run("sh", "-c", "kill -9 $$").level is Level.UNKNOWN


def test_a_command_knows_its_group_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXFT_TOKEN", "secret")
    said = run("sh", "-c", "echo {group} {devices} {folder} $JAXFT_GROUP token=$JAXFT_TOKEN").text
    assert said == "group-1 2,3 /run/one group-1 token="


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    """Its child keeps its output open, and would keep a reader of a pipe waiting."""
    pid = tmp_path / "pid"
    reading = run("sh", "-c", f"sleep 1000 & echo $! > {pid}; wait", timeout_s=1.0)
    assert reading == Reading(Level.UNKNOWN, "sh did not end within 1 s, and was killed")
    if said := pid.read_text() if pid.exists() else "":  # on a busy machine it may have come no further
        child = int(said)
        patience.until(lambda: not running(child), "the child to end")


def test_a_command_of_another_user_is_not_killed_and_ends_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `sudo`: a group may end, and its launch too, while a check of it runs."""
    process = subprocess.Popen(["sleep", "1000"], process_group=0)
    try:
        with monkeypatch.context() as foreign:
            foreign.setattr(os, "killpg", Mock(side_effect=PermissionError(1, "Operation not permitted")))
            kill_beside(process)
    finally:
        process.kill()
        process.wait()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_that_is_gone_is_unknown(tmp_path: Path) -> None:
    assert run(str(tmp_path / "gone")).text == f"there is no program '{tmp_path}/gone' to run"


def test_host_memory_is_what_is_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:    4000000 kB\n")
    assert free_memory_gb(meminfo, tmp_path) == (4.096, "4.1 GB of host memory are available")
    assert free_memory_gb()[0] > 0
    meminfo.write_text("nothing")
    with pytest.raises(NoValue, match="tells how much memory is available"):
        free_memory_gb(meminfo, tmp_path)


def test_the_disk_is_that_of_the_folder(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    assert free_disk_gb(str(tmp_path))[0] == pytest.approx(
        stat.f_bavail * stat.f_frsize / 1e9, rel=0.2, abs=1.0
    )
    with pytest.raises(NoValue, match="cannot be asked"):
        free_disk_gb(str(tmp_path / "gone"))


def view(*times: float | None, members: int = 3) -> dict[str, object]:
    """As in docs/operate-api.md. `tests/operate/test_commands.py` asks a real port."""
    return {
        "group_list": [
            {
                "group": f"g{number}",
                "state": "member" if number < members else "spare",
                **({} if seconds is None else {"compute_s": seconds}),
            }
            for number, seconds in enumerate(times)
        ]
    }


def test_a_straggler_is_compared_with_the_median_of_its_peers() -> None:
    found = slowness_in(view(3.0, 1.0, 2.0), "g0")
    assert found == (2.0, "a step computes for 3.000 s, and for 1.500 s in the median of 2 peers")
    faster = slowness_in(view(3.0, 1.0, 2.0), "g1")
    assert faster is not None
    assert faster[0] == 0.4


@pytest.mark.parametrize(
    ("job", "group"),
    [
        (view(3.0), "g0"),  # it has no peers
        (view(None, 1.0), "g0"),  # it has done no step lately
        (view(1.0, 0.0), "g0"),
        (view(3.0, 1.0, members=1), "g0"),  # the other is a spare
        (view(3.0, 1.0), "other"),
    ],
)
def test_a_group_that_cannot_be_compared_has_no_value(job: dict[str, object], group: str) -> None:
    assert slowness_in(job, group) is None


def test_a_port_that_does_not_answer_is_unknown() -> None:
    source = Measured(
        Limits(critical=2.0, high_is_bad=True), lambda: slowness("http://localhost:1", "", "g0")
    )
    reading = source.read()
    assert reading is not None
    assert reading.level is Level.UNKNOWN
    with pytest.raises(PortError):
        slowness("http://localhost:1", "", "g0")


def test_each_source_reads() -> None:
    assert source_of(command_rule(sys.executable, "-S", "-c", "pass"), PLACE).read() == Reading(
        Level.OK, "exit status 0"
    )
