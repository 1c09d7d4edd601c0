"""Whole storms with real processes and real kills, but with a fake coordinator and fake groups that do not train."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.processes._processes import Processes
from jaxft_launch.storm._display import Display
from jaxft_launch.storm._job import Job, Place, Program
from jaxft_launch.storm._runs import run_job
from jaxft_launch.storm._storm import Storm, Times
from lab._examples import Example
from lab.chaos import LabChaosOptions, plan, run_chaos, timed
from lab.demo import DemoOptions, run_demo, storm_of
from tests import patience
from tests.chaos.cases import WITHOUT_JAX

HERE = Path(__file__).parent
PACE_S = 0.01
STEPS_PER_KILL = 20
pytestmark = [pytest.mark.processes, pytest.mark.timeout(100)]


class FakeExample(Example):
    __slots__ = ()

    @property
    def trainer(self) -> tuple[str, ...]:
        return (sys.executable, "-S", "-c", WITHOUT_JAX + "import fake_group\nfake_group.main()\n")


def fakes(*flags: tuple[str, str], launches: int) -> dict[str, Any]:
    """The example and the coordinator, whose job does not end before this number of launches."""
    example = FakeExample(
        module="tests.chaos.fake_group", flags=flags, needs=(), steps_per_kill=STEPS_PER_KILL
    )
    coordinator = (sys.executable, "-S", str(HERE / "fake_coordinator.py"), str(PACE_S), str(launches))
    return {"example": example, "coordinator": coordinator}


def run(
    tmp_path: Path, *flags: tuple[str, str], launches: int = 3, **changes: Any
) -> tuple[int, dict[str, Any]]:
    keep = tmp_path / "keep"
    status = run_chaos(LabChaosOptions(keep=keep, **changes), **fakes(*flags, launches=launches))
    return status, json.loads((keep / "verdict.json").read_text())


def test_the_demo_kills_each_group_once_and_has_a_verdict_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where every path has a space."""
    keep = tmp_path / 'some dir\'s "demo"'
    assert run_demo(DemoOptions(seed=5, keep=keep), **fakes(launches=6)) == 0
    text, result = capsys.readouterr().out, json.loads((keep / "verdict.json").read_text())
    assert sorted(result["victims"]) == ["group-0", "group-1", "group-2"]
    assert (result["steps_committed"], result["steps_lost"], result["verdict"]) == (80, 0, "success")
    assert len(result["stall_ms"]) == len(result["back_s"]) == 3
    assert text.count("  restarted group-") == text.count("is back after") == 3
    (kills,) = [line for line in text.splitlines() if line.startswith("  kills")]
    assert kills == f"  kills              3 of 3 ({', '.join(result['victims'])}), --seed 5"
    assert text.endswith("  undisturbed run    the same bits\n")
    assert "[jaxft demo] " in text
    assert (keep / "coordinator.log").exists()


def test_the_demo_grows_with_the_processes_of_its_groups() -> None:
    assert (storm_of(DemoOptions()).kills, storm_of(DemoOptions()).steps) == (3, 80)
    assert (storm_of(DemoOptions(nproc=2)).kills, storm_of(DemoOptions(nproc=2)).steps) == (6, 120)
    with pytest.raises(LaunchError, match="--nproc must be 1 or more, not 0"):
        run_demo(DemoOptions(nproc=0))


@pytest.mark.long
def test_every_kill_is_placed_in_the_order_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And at each kill of a member another group lived that had taken part before."""
    kills = 20
    status, result = run(tmp_path, kills=kills, seed=4, launches=3 + kills)
    text = capsys.readouterr().out
    assert status == 0, text
    assert (result["kills"], result["steps_lost"], result["double_deaths"]) == (kills, 0, 2)
    assert sum(result["hit_phases"].values()) == sum(result["hit_groups"].values()) == kills
    assert all(stall_ms is not None for stall_ms in result["stall_ms"])
    strikes = plan(
        LabChaosOptions(kills=kills, seed=4), fakes(launches=0)["example"], result["steps_planned"]
    )
    planned = [(n, v.group, v.phase) for n, strike in enumerate(strikes) for v in strike.victims]
    hits = [(hit["strike"], hit["group"], hit["aim"]) for hit in result["hits"]]
    assert sorted(hits) == sorted(planned)
    assert [hit[0] for hit in hits] == sorted(hit[0] for hit in planned)
    assert {path.suffix for path in (tmp_path / "keep" / "storm").iterdir()} >= {".log", ".jsonl", ".phase"}


def test_another_state_in_the_end_makes_it_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"phases": "vote,compute", "seed": 7}
    status, result = run(tmp_path, ("--digest-again", "other"), kills=1, launches=3 + 1, **flags)
    assert (status, result["digests_equal"], result["matches_undisturbed"]) == (1, False, False)
    assert set(result["aimed_phases"]) <= {"vote", "compute"}
    assert "VERDICT: FAILED." in capsys.readouterr().out


def test_a_storm_by_time_has_as_many_faults_and_steps_as_fit() -> None:
    options = timed(LabChaosOptions(minutes=2.0))
    assert (options.kills, options.steps) == (6, 240)
    for minutes, steps in ((0.0, None), (-1.0, None), (float("nan"), None), (1.0, 100)):
        with pytest.raises(LaunchError, match="--minutes must be more than 0, and replaces --steps"):
            timed(LabChaosOptions(minutes=minutes, steps=steps))


def test_a_coordinator_that_does_not_start_is_an_error_with_its_log() -> None:
    broken = (sys.executable, "-S", "-c", "import sys; sys.exit('no port left')")
    with pytest.raises(
        LaunchError, match=r"(?s)The coordinator ended at once, with exit status 1.*no port left"
    ):
        run_chaos(LabChaosOptions(), example=fakes(launches=3)["example"], coordinator=broken)


def test_a_job_that_hangs_is_ended_and_its_clock_starts_with_the_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, a start waits for minutes for its warm process."""
    silent = (sys.executable, "-S", "-c", "import signal; print('here', flush=True); signal.pause()")
    clock = SimpleNamespace(now_s=0.0, waited=0)
    clock.time = lambda: clock.now_s

    def sleep(_: float) -> None:
        clock.now_s += 10.0
        clock.waited += 1

    clock.sleep = sleep
    begins_s = 1000.0
    original = Job.poll
    monkeypatch.setattr(Job, "poll", lambda job: original(job) if clock.now_s >= begins_s else None)
    monkeypatch.setattr("jaxft_launch.storm._runs.time", clock)
    with Processes(tmp_path, cwd=tmp_path) as processes:
        program, display = Program(words=silent, steps=5), Display(sys.stdout, name="test")
        job = Job("silent", ("group-0",), program, Place(processes, display))
        record = run_job(job, display, Storm(display, (), times=Times(silence_s=50.0)), title="silent")
        assert job.current("group-0").child.exit_code() is not None
    assert record.problems == ("the job hangs: no group reported a step for 50 s",)
    assert clock.now_s >= begins_s + 50.0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_process_outlives_a_storm_that_is_interrupted(tmp_path: Path, number: int, status: int) -> None:
    script = (
        "import pathlib, sys\n"
        "from lab.chaos import LabChaosOptions, run_chaos\n"
        "from tests.chaos.test_storm import fakes\n"
        "options = LabChaosOptions(kills=1, steps=10**6, keep=pathlib.Path(sys.argv[1]))\n"
        "run_chaos(options, **fakes(launches=100))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    pids: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "(pid " in line:
                pids.append(int(line.partition("(pid ")[2].partition(")")[0]))
            if "/1000000" in line:
                break
        reader = threading.Thread(target=running.stdout.read)
        reader.start()
        running.send_signal(number)
        patience.wait(running)
        reader.join()
    assert running.returncode == status
    assert len(pids) >= 4
    patience.until(lambda: not any(map(is_alive, pids)), "all processes to end")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
