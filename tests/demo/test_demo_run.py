"""The whole demo with real processes, but with a fake coordinator and fake groups that do not train."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from demo_cases import WITHOUT_JAX

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.processes._processes import Processes
from jaxft_launch.storm._display import PlainDisplay
from jaxft_launch.storm._job import Job, Program
from jaxft_launch.storm._run import run_job
from lab import demo
from lab._examples import program_of
from lab._watcher import DemoWatcher
from lab.demo import Commands, DemoOptions, run_demo
from tests import patience

HERE = Path(__file__).parent
PACE_S = 0.01
pytestmark = [pytest.mark.processes, pytest.mark.timeout(100)]


def commands(*group_flags: str, launches: int = 6) -> Commands:
    return Commands(
        coordinator=(sys.executable, "-S", str(HERE / "fake_coordinator.py"), str(PACE_S), str(launches)),
        trainer=(sys.executable, "-S", str(HERE / "fake_group.py"), *group_flags),
    )


def commands_in(folder: Path, *, launches: int = 6) -> Commands:
    """Copies of the fakes and their interpreter in another folder."""
    python = folder / "python"
    python.symlink_to(sys.executable)
    fakes = [shutil.copy(HERE / name, folder) for name in ("fake_coordinator.py", "fake_group.py")]
    return Commands(
        coordinator=(str(python), "-S", fakes[0], str(PACE_S), str(launches)),
        trainer=(str(python), "-S", fakes[1]),
    )


def test_every_path_may_contain_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / 'some dir\'s "demo"'
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    file = folder / "the verdict.json"
    assert run_demo(DemoOptions(steps=20, kills=1, json=file), commands_in(folder, launches=4)) == 0
    assert json.loads(file.read_text())["matches_undisturbed"]


def test_every_group_is_killed_once_and_the_verdict_is_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, keep = tmp_path / "verdict.json", tmp_path / "keep"
    assert run_demo(DemoOptions(steps=30, seed=5, json=file, keep=keep), commands()) == 0
    result = json.loads(file.read_text())
    assert result["kills"] == 3
    assert sorted(result["victims"]) == ["group-0", "group-1", "group-2"]
    assert result["steps_committed"] == 30
    assert result["steps_lost"] == 0
    assert len(result["stall_ms"]) == len(result["back_s"]) == 3
    assert all(cost > 0 for cost in (*result["stall_ms"], *result["back_s"]))
    assert result["digests_equal"]
    assert result["matches_undisturbed"]
    text = capsys.readouterr().out
    assert "VERDICT: nothing was lost" in text
    assert text.count("kill -9") == 3
    assert text.count("is back") == 3
    names = {path.name for path in keep.iterdir()}
    assert {"coordinator.log", "disturbed.group-1.0.jsonl", "disturbed.group-1.1.jsonl"} <= names
    assert "undisturbed.group-1.1.jsonl" not in names


def test_a_group_that_ends_with_another_state_makes_it_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verdict.json"
    options = DemoOptions(steps=20, kills=1, json=file)
    assert run_demo(options, commands("--digest-again", "other", launches=4)) == 1
    result = json.loads(file.read_text())
    assert not result["digests_equal"]
    assert not result["matches_undisturbed"]
    assert result["steps_lost"] == 0
    assert "VERDICT: FAILED." in capsys.readouterr().out


def test_kills_that_do_not_fit_any_more_make_it_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(DemoOptions(steps=2, kills=9), commands(launches=3)) == 1
    text = capsys.readouterr().out
    # The latter, if the last kill of these two steps fell so late that the job was over when the group was back.
    assert "of 9 kills could be placed" in text or "returned only after the job was over" in text


def test_a_group_that_fails_of_itself_ends_the_run_and_shows_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verdict.json"
    file.write_text("an old one")
    assert run_demo(DemoOptions(steps=20, json=file), commands("--fail-at", "1")) == 1
    text = capsys.readouterr().out
    assert "fails on purpose" in text
    assert "--keep FOLDER" in text
    assert "failed with exit status 1" in text
    assert not json.loads(file.read_text())["ok"]


def test_a_coordinator_that_does_not_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    file = tmp_path / "verdict.json"
    file.write_text("an old one")
    broken = Commands(coordinator=(sys.executable, "-S", "-c", "import sys; sys.exit('no port left')"))
    with pytest.raises(
        LaunchError, match=r"(?s)The coordinator ended at once, with exit status 1.*no port left"
    ):
        run_demo(DemoOptions(json=file), broken)
    assert not file.exists()


def test_a_json_file_that_cannot_be_written_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be written"):
        run_demo(DemoOptions(json=tmp_path / "none" / "verdict.json"), commands())


def test_a_job_that_hangs_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = (sys.executable, "-S", "-c", "import signal; print('here', flush=True); signal.pause()")
    with Processes(tmp_path, cwd=tmp_path) as processes:
        program = Program(words=silent, steps=5)
        job = Job("silent", ("group-0",), program, coordinator="localhost:1", processes=processes)
        display = PlainDisplay(sys.stdout, name="jaxft demo")
        record = run_job(job, display, DemoWatcher(display), title="silent", silence_timeout_s=0.5)
        assert job.current("group-0").child.exit_code() is not None
    assert record.problems == ("the job hangs: no group reported a step for 0 s",)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_no_process_outlives_a_demo_that_is_interrupted(tmp_path: Path, number: int, status: int) -> None:
    script = WITHOUT_JAX + (
        "import json, pathlib, sys\n"
        "from lab.demo import Commands, DemoOptions, run_demo\n"
        "keep, fakes = pathlib.Path(sys.argv[1]), [tuple(command) for command in json.loads(sys.argv[2])]\n"
        "run_demo(DemoOptions(steps=10**6, keep=keep), Commands(*fakes))\n"
    )
    fakes = commands()
    words = json.dumps([fakes.coordinator, fakes.trainer])
    command = [sys.executable, "-c", script, str(tmp_path), words]
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
        patience.until(lambda: ended_by(running, number), "the demo to end")
        reader.join()
    assert running.returncode == status
    assert len(pids) >= 4
    deadline_s = patience.machine_s() + 30.0
    while any(is_alive(pid) for pid in pids):
        assert patience.machine_s() < deadline_s
        time.sleep(0.01)


def ended_by(running: subprocess.Popen[str], number: int) -> bool:
    """Send the signal, and again if needed: Python ignores an interrupt that comes inside a destructor."""
    running.send_signal(number)
    try:
        running.wait(timeout=patience.stretched(20.0))
    except subprocess.TimeoutExpired:
        return False
    return True


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_the_trainer_gets_the_flags_that_the_example_knows() -> None:
    """Also with the demo's own flags, so that a renamed flag fails here and not in the demo."""
    from examples.llama3._flags import Flags

    program = program_of(demo.TRAINER, 3, demo.trainer_flags(Path("run")))
    words = program.command(job="j", group="g", coordinator="c:1", events=Path("e.jsonl"))
    import tyro

    flags = tyro.cli(Flags, args=words[len(demo.TRAINER) :])
    assert (flags.group, flags.steps, flags.fsdp, flags.cpu_devices) == ("g", 3, 2, 2)
    assert flags.digest_at_end
