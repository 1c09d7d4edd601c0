"""`jaxft launch` with real processes that do not train: restarts, fates, deadlines, drains and exit statuses."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import patience
from tests.launch.launches import FAKE, HERE, NOWHERE, fakes, is_alive, launch, launch_command

pytestmark = pytest.mark.processes
ABSOLUTE = os.pathsep.join(str(HERE.parents[1] / name) for name in ("", "protocol", "coordinator"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_job_that_is_done(folder: Path) -> None:
    with fakes(folder, "--groups", "2", lives=("say:hello steps:3 exit:0",)) as running:
        assert running.status() == 0, running.text()
    first, *between, last = (event["event"] for event in running.events())
    assert (first, last) == ("launch_began", "launch_ended")
    assert sorted(between) == ["group_ended", "group_ended", "group_started", "group_started"]
    assert {event["group"] for event in running.events("group_started")} == {"group-0", "group-1"}
    assert all(event["step"] == 3 for event in running.events("group_ended"))
    assert "[group-0] hello" in running.text()
    assert "[group-1] hello" in running.text()
    assert (folder / "group-0.0.log").read_text() == "hello\n"


def test_a_group_that_was_killed_is_restarted_at_once_if_it_made_progress(folder: Path) -> None:
    with fakes(folder, "--groups", "1", lives=("steps:3 kill", "steps:5 kill", "steps:6 exit:0")) as running:
        assert running.status() == 0, running.text()
    assert [event["wait_s"] for event in running.events("group_restarts")] == [0.0, 0.0]
    assert [event["status"] for event in running.events("group_ended")] == [-9, -9, 0]
    assert [event["life"] for event in running.events("group_started")] == [0, 1, 2]


@pytest.mark.parametrize("phase", ["heal", "compute"])
def test_a_step_that_the_other_groups_committed_is_no_progress(folder: Path, phase: str) -> None:
    """A group that fails after each heal is at a higher step each time."""
    lives = ("steps:3 kill", f"phase:{phase}:8 kill", f"phase:{phase}:9 kill")
    with fakes(folder, "--max-restarts", "1", lives=lives) as running:
        assert running.status() == 75, running.text()
    assert [event["step"] for event in running.events("group_ended")] == [3, 8, 9]
    first_s, second_s = (event["wait_s"] for event in running.events("group_restarts"))
    assert first_s == 0.0 < second_s
    assert "2 times in a row without a new step" in running.events("group_given_up")[0]["why"]


def test_a_launch_goes_on_where_its_lines_cannot_be_written(folder: Path) -> None:
    """Its output may be a file on a disk that is full, or a pipe whose reader is gone."""
    with Path("/dev/full").open("wb") as full:
        command = launch_command(folder, *NOWHERE, "--no-warm", program=(*FAKE, "say:hello steps:2 exit:0"))
        patience.run(command, stdout=full, stderr=subprocess.DEVNULL)
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["status"]) == ("launch_ended", 0)


def test_exit_statuses_count_where_the_parent_ignores_ended_children(folder: Path) -> None:
    """As some process managers leave it. A program that was killed would otherwise count as done."""
    ignores = "signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    parent = (sys.executable, "-c", f"import os, signal, sys; {ignores}")
    command = launch_command(folder, *NOWHERE, "--no-warm", program=(*FAKE, "exit:78"))
    ended = patience.run([*parent, *command], stdout=subprocess.DEVNULL)
    assert ended.returncode == 78


def test_a_rank_takes_its_group_with_it(folder: Path) -> None:
    """Rank 0 would wait forever, and is killed; both come back together, with other ports."""
    lives = ("steps:3 0=deaf 0=made:up 1=gate:up 1=kill mute", "steps:4 exit:0")
    with fakes(folder, "--nproc", "2", lives=lives) as running:
        assert running.status() == 0, running.text()
    (ended,) = running.events("rank_ended")
    assert (ended["rank"], ended["status"], ended["ending"]) == (1, -9, "killed")
    first, second = (event["pids"] for event in running.events("group_started"))
    assert not any(is_alive(pid) for pid in first)
    assert not set(first) & set(second)


def test_only_the_group_of_a_rank_ends_with_it(folder: Path) -> None:
    lives = ("steps:1 made:up-{group} gate:go exit:0",)
    with fakes(folder, "--groups", "2", "--nproc", "2", lives=lives) as running:
        for group in ("group-0", "group-1"):
            running.until_file(f"up-{group}")
        os.kill(running.pids("group-1")[0], signal.SIGKILL)
        again = running.until("group_started", 3)
        (folder / "go").touch()
        assert running.status() == 0, running.text()
    assert again["group"] == "group-1"
    assert {event["group"] for event in running.events("rank_ended")} == {"group-1"}


def test_a_process_beside_one_that_failed_may_say_why(folder: Path) -> None:
    # Both have begun: one that is killed before that would begin its first life again.
    lives = ("steps:1 0=made:up 1=gate:up 1=exit:1 0=gate:never", "exit:0")
    with fakes(folder, "--nproc", "2", lives=lives) as running:
        assert running.status() == 0, running.text()
    ended = running.events("group_ended")[0]
    assert (ended["ending"], ended["status"]) == ("error", 1)


def test_an_error_before_any_step_is_tried_twice(folder: Path) -> None:
    with fakes(folder, lives=("say:broken exit:3",)) as running:
        assert running.status() == 3, running.text()
    assert len(running.events("group_started")) == 2
    (given_up,) = running.events("group_given_up")
    assert "fix the program" in given_up["why"]
    assert "--- end of the log of group-0.1" in running.text()


def test_what_the_job_refuses_is_not_started_again(folder: Path) -> None:
    with fakes(folder, lives=("exit:78",)) as running:
        assert running.status() == 78, running.text()
    assert len(running.events("group_started")) == 1


def test_a_group_without_progress_is_given_up_and_may_be_started_again(folder: Path) -> None:
    with fakes(folder, "--max-restarts", "1", lives=("exit:75",)) as running:
        assert running.status() == 75, running.text()
    assert len(running.events("group_started")) == 2


def test_a_job_is_done_without_the_group_that_was_given_up(folder: Path) -> None:
    """It is killed once after a new step, and then without one."""
    lives = ("steps:1 group-1=kill gate:go exit:0",)
    with fakes(folder, "--groups", "2", "--max-restarts", "0", lives=lives) as running:
        assert running.until("group_given_up")["group"] == "group-1"
        (folder / "go").touch()
        assert running.status() == 0, running.text()
    assert len(running.events("group_started")) == 3


@pytest.mark.parametrize(
    ("deadlines", "life", "phase"),
    [
        ("boot=0.3", "mute", "boot"),
        ("compute=0.3", "steps:2 phase:compute:2 alive", "compute"),
        ("silence=0.3", "steps:2 phase:vote:2 stop", "silence"),
    ],
)
def test_what_does_not_move_is_killed(folder: Path, deadlines: str, life: str, phase: str) -> None:
    with fakes(folder, "--deadlines", deadlines, lives=(life, "steps:3 exit:0")) as running:
        late = running.until("rank_overdue")
        assert running.until("group_ended")["ending"] == "killed"
        assert not is_alive(late["pid"])
        # On a busy machine the second life is late too.
        assert running.until("group_started", 2)["life"] == 1
        assert f"(--deadlines {phase}=...): its group is killed" in running.text()
    assert late["phase"] == phase
    assert late["lasted_s"] >= 0.3  # it is rounded
    assert late["deadline_s"] == 0.3


def test_one_that_waits_for_the_others_is_left_alone(folder: Path) -> None:
    deadlines = "compute=0.3,apply=0.3,silence=600"
    with fakes(folder, "--deadlines", deadlines, lives=("phase:vote:1 gate:go exit:0",)) as running:
        running.until_file("group-0.0.starts")
        began_s = patience.machine_s()
        patience.until(lambda: patience.machine_s() > began_s + 0.7, "time in which it could be killed")
        (folder / "go").touch()
        assert running.status() == 0, running.text()
    assert running.events("rank_overdue") == []


@pytest.mark.long
def test_a_job_that_was_suspended_as_a_whole_goes_on(folder: Path) -> None:
    """As when a laptop sleeps, or Slurm suspends a job: what the launcher missed is not its groups' silence."""
    lives = ("steps:1 made:up alive", "exit:3")
    with fakes(folder, "--deadlines", "silence=5", lives=lives) as running:
        running.until_file("up")
        (pid,) = running.pids()
        for one in (running.process.pid, pid):
            os.kill(one, signal.SIGSTOP)
        time.sleep(6.5)
        for one in (running.process.pid, pid):
            os.kill(one, signal.SIGCONT)
        until_it_has_looked()
        assert is_alive(pid), running.text()
    assert running.events("rank_overdue") == []


def test_a_folder_of_signs_that_was_removed_is_made_again(folder: Path, tmp_path: Path) -> None:
    """As by what clears temporary folders. A life that tells no phase would be killed after that for `boot`."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    lives = ("steps:1 made:up gate:go kill", "steps:3 exit:0")
    with fakes(folder, lives=lives, environment={"TMPDIR": str(temporary)}) as running:
        running.until_file("up")
        (phases,) = temporary.glob("jaxft-launch-*")
        shutil.rmtree(phases)
        (folder / "go").touch()
        assert running.status() == 0, running.text()
    assert [event["step"] for event in running.events("group_ended")][-1] == 3
    assert list(temporary.iterdir()) == []


def test_a_change_of_the_time_of_day_is_not_silence(folder: Path) -> None:
    with fakes(folder, lives=("steps:1 aged made:up gate:go exit:0",)) as running:
        running.until_file("up")
        until_it_has_looked()
        (folder / "go").touch()
        assert running.status() == 0, running.text()
    assert running.events("rank_overdue") == []


def until_it_has_looked() -> None:
    """Let so much time pass that a supervisor has compared signs of life with deadlines."""
    began_s = patience.machine_s()
    patience.until(lambda: patience.machine_s() > began_s + 1.5, "time in which it could be killed")


def test_a_rank_that_stays_after_the_others_are_done_has_a_deadline(folder: Path) -> None:
    lives = ("steps:1 1=exit:0 alive", "exit:0")
    with fakes(folder, "--nproc", "2", "--deadlines", "end=0.3", lives=lives) as running:
        late = running.until("rank_overdue")
        running.until("group_started", 2)
    assert (late["phase"], late["rank"]) == ("end", 0)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_drains_the_groups(folder: Path, number: int, status: int) -> None:
    lives = ("leave:75 steps:1 made:up-{group}-{rank} mute",)
    with fakes(folder, "--groups", "2", "--nproc", "2", lives=lives) as running:
        for name in ("group-0-0", "group-0-1", "group-1-0", "group-1-1"):
            running.until_file(f"up-{name}")
        running.process.send_signal(number)
        assert running.status() == status, running.text()
    assert [event["signal"] for event in running.events("drain_began")] == [signal.Signals(number).name]
    assert [event["ending"] for event in running.events("group_ended")] == ["again", "again"]
    assert running.events("group_restarts") == []
    assert running.text().count("has left, at step 1") == 2


def test_a_group_that_an_operator_drains_is_not_restarted_and_does_not_end_the_others(folder: Path) -> None:
    lives = ("group-0=phase:drained:3 group-0=exit:0 gate:go exit:0",)
    with fakes(folder, "--groups", "2", "--deadlines", "end=0.3", lives=lives) as running:
        ended = running.until("group_ended")
        assert (ended["group"], ended["ending"], ended["status"], ended["step"]) == (
            "group-0",
            "drained",
            0,
            3,
        )
        running.file("go").touch()
        assert running.status() == 0, running.text()
    assert running.events("group_restarts") == []
    assert [event["ending"] for event in running.events("group_ended")] == ["drained", "done"]


def test_a_terminal_that_is_closed_drains_the_groups(folder: Path) -> None:
    ours, theirs = os.openpty()
    lives = ("drains:1 steps:1 made:up mute",)
    command = launch_command(folder, *NOWHERE, "--no-warm", program=(*FAKE, *lives))
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        patience.until((folder / "up").exists, "the group to run")
        os.close(ours)
        process.send_signal(signal.SIGHUP)  # from the kernel, if it were its session's terminal
        patience.wait(process)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [one["signal"] for one in events if one["event"] == "drain_began"] == ["SIGHUP"]
    assert [one["ending"] for one in events if one["event"] == "group_ended"] == ["drained"]


def test_a_job_that_ends_while_it_is_drained_is_done(folder: Path) -> None:
    with fakes(folder, lives=("leave:0 steps:1 made:up mute",)) as running:
        running.until_file("up")
        running.process.send_signal(signal.SIGTERM)
        assert running.status() == 0, running.text()


@pytest.mark.parametrize("again", [True, False])
def test_a_group_that_does_not_leave_is_killed(folder: Path, again: bool) -> None:
    """By the second signal, or after --drain-timeout-s."""
    timeout_s = "600" if again else "0.5"
    with fakes(folder, "--drain-timeout-s", timeout_s, lives=("deaf made:up mute",)) as running:
        running.until_file("up")
        (pid,) = running.pids()
        running.process.send_signal(signal.SIGTERM)
        if again:
            running.until("drain_began")
            running.process.send_signal(signal.SIGTERM)
        assert running.status() == 75, running.text()
    assert not is_alive(pid)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminal_that_is_closed_during_a_drain_does_not_end_it(
    folder: Path, first: signal.Signals
) -> None:
    with fakes(folder, lives=("finishes:go made:up mute",)) as running:
        running.until_file("up")
        (pid,) = running.pids()
        running.process.send_signal(first)
        running.until("drain_began")
        running.process.send_signal(signal.SIGHUP)
        patience.until(lambda: not _pending(running.process.pid, signal.SIGHUP), "the signal to arrive")
        (folder / "go").touch()
        running.status()
    assert (folder / "finished").exists()
    assert "ends all groups" not in running.text()
    assert not is_alive(pid)


def _pending(pid: int, number: int) -> bool:
    (line,) = (
        one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("ShdPnd")
    )
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_a_group_of_which_one_rank_is_done_and_the_other_was_killed_is_not_done(folder: Path) -> None:
    lives = ("deaf 0=exit:0 made:up mute",)
    with fakes(folder, "--nproc", "2", "--drain-timeout-s", "0", lives=lives) as running:
        running.until_file("up")
        first, _ = running.pids()
        patience.until(lambda: not is_alive(first), "rank 0 to end")
        running.process.send_signal(signal.SIGTERM)
        assert running.status() == 75, running.text()
    assert running.events("group_ended")[0]["ending"] == "killed"


def test_a_group_that_waits_for_its_restart_leaves_at_once(folder: Path) -> None:
    with fakes(folder, "--max-restarts", "100", lives=("exit:75",)) as running:
        running.until("group_restarts", 3)  # the next is in 3 to 4 s
        running.process.send_signal(signal.SIGTERM)
        assert running.status() == 75, running.text()


@pytest.mark.parametrize("end", ["kill", "exit:75", "exit:0"])
def test_what_a_process_has_started_ends_with_it(folder: Path, end: str) -> None:
    """A loader of data that stays behind keeps its memory, its ports and perhaps a device from the next life."""

    def left() -> list[int]:
        file = folder / "left"
        return list(map(int, file.read_text().split())) if file.exists() else []

    lives = (f"steps:1 starts:left gate:left {end}", "steps:3 made:second gate:go exit:0")
    with fakes(folder, lives=lives) as running:
        if end != "exit:0":
            running.until_file("second")
            assert [is_alive(pid) for pid in left()] == [False]
            (folder / "go").touch()
        assert running.status() == 0, running.text()
    assert [is_alive(pid) for pid in left()] == [False]


def test_no_process_outlives_a_launcher_that_is_killed(folder: Path) -> None:
    lives = ("deaf made:up-{rank} mute",)
    with fakes(folder, "--nproc", "2", lives=lives) as running:
        for rank in range(2):
            running.until_file(f"up-{rank}")
        pids = running.pids()
        running.process.kill()
        patience.until(lambda: not any(map(is_alive, pids)), "the ranks to end")


def test_the_coordinator_is_started_and_restarted_with_its_memory(folder: Path) -> None:
    lives = ("steps:1 made:up-{group} gate:go exit:0",)
    with launch(folder, "--no-warm", program=(*FAKE, *lives)) as running:
        running.until_file("up-group-0")
        first = running.until("coordinator_started")
        os.kill(first["pid"], signal.SIGKILL)
        second = running.until("coordinator_started", 2)
        (folder / "go").touch()
        assert running.status() == 0, running.text()
    (ended,) = running.events("coordinator_ended")
    assert (ended["pid"], ended["status"]) == (first["pid"], -9)
    assert (second["address"], second["pid"] != first["pid"]) == (first["address"], True)
    assert (folder / "coordinator" / "log").exists()


@pytest.mark.long
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit of Linux")
def test_a_launcher_without_a_free_descriptor_goes_on(folder: Path) -> None:
    """As on a machine where other programs have used up all: what ends meanwhile is started once there is one."""
    lives = ("steps:1 made:up-{group} mute",)
    with launch(
        folder, "--no-warm", "--groups", "2", "--max-restarts", "1000", program=(*FAKE, *lives)
    ) as running:
        for group in ("group-0", "group-1"):
            running.until_file(f"up-{group}")
        (victim,), coordinator = running.pids("group-0"), running.until("coordinator_started")["pid"]
        launcher = running.process.pid
        soft, hard = resource.prlimit(launcher, resource.RLIMIT_NOFILE)
        resource.prlimit(launcher, resource.RLIMIT_NOFILE, (3, hard))
        os.kill(victim, signal.SIGKILL)
        os.kill(coordinator, signal.SIGKILL)
        running.until("coordinator_ended")
        patience.until(
            lambda: "the coordinator cannot be started: [Errno 24]" in running.text(),
            "a start that fails",
            context=running.text,
        )
        resource.prlimit(launcher, resource.RLIMIT_NOFILE, (soft, hard))
        running.until("coordinator_started", 2)
        assert running.until("group_started", 3)["group"] == "group-0"
        assert is_alive(running.pids("group-1")[0])
        # At the end, too.
        resource.prlimit(launcher, resource.RLIMIT_NOFILE, (3, hard))
        running.process.terminate()
        assert running.status() == 75, running.text()
    assert "Traceback" not in running.text()


@pytest.mark.long
def test_a_coordinator_that_is_stopped_is_replaced(folder: Path) -> None:
    """It holds its port and its store, and the groups would wait for it until they give up, one and all."""
    words = ("--no-warm", "--deadlines", "silence=12")
    with launch(folder, *words, program=(*FAKE, "steps:1 made:up alive")) as running:
        running.until_file("up")
        first = running.until("coordinator_started")
        os.kill(first["pid"], signal.SIGSTOP)
        second = running.until("coordinator_started", 2)
        (ended,) = running.events("coordinator_ended")
        assert (ended["pid"], ended["status"]) == (first["pid"], -9)
        assert second["address"] == first["address"]
        log = folder / "coordinator.1.log"
        patience.until(lambda: "leads as" in log.read_text(), "it to take over", context=log.read_text)
    said = "has been silent for 5 s (a third of --deadlines silence=..., 5 s at least): it is killed"
    assert f"the coordinator (pid {first['pid']}) {said}" in running.text()


# Its coordinator hangs before it listens, as on a file server that does not answer.
HANGS = """
import sys
from pathlib import Path
from jaxft._cli import exit_with_status_of
from jaxft._launch._options import LaunchOptions
from jaxft._launch.launch import run_launch

coordinator = ("sh", "-c", 'trap "" TERM; touch "$0"; exec sleep 3600', sys.argv[2])
exit_with_status_of(
    lambda: run_launch(LaunchOptions(folder=Path(sys.argv[1])), ["true"], coordinator=coordinator)
)
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
def test_a_signal_counts_while_the_coordinator_starts(
    folder: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    command = [sys.executable, "-c", HANGS, str(folder), str(tmp_path / "up")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        patience.until((tmp_path / "up").exists, "the coordinator's process")
        process.send_signal(number)
        said, errors = patience.communicate(process)
    assert (process.returncode, errors) == (status, "")
    assert f"got {number.name} while the coordinator started: no group was started" in said
    assert (folder / "events.jsonl").read_text() == ""


def test_a_second_launch_in_a_folder_gives_its_own_coordinator_and_passes_on_its_own_lines(
    folder: Path,
) -> None:
    for count in (1, 2):
        lives = ("env:JAXFT_COORDINATOR exit:0",)
        with launch(folder, "--no-warm", program=(*FAKE, *lives)) as running:
            assert running.status() == 0, running.text()
        log = (folder / "coordinator.log").read_text()
        ports = re.findall(r"\(port (\d+)\)", log)
        assert len(ports) == count
        said = [line for line in running.text().splitlines() if line.startswith("[group-0]")]
        assert said == [f"[group-0] JAXFT_COORDINATOR=localhost:{ports[-1]}"]


def test_one_group_of_an_array(folder: Path) -> None:
    with fakes(folder, "--group", "7", lives=("say:{group} exit:0",)) as running:
        assert running.status() == 0, running.text()
    assert "[group-7] group-7" in running.text()


@pytest.mark.parametrize(
    ("words", "program", "said"),
    [
        (["--group", "1"], ["true"], "--group starts one group of a job, so it needs the job's coordinator"),
        (
            ["--http", "localhost:1", "--coordinator", "head:7"],
            ["true"],
            "--http is for a coordinator that the launcher starts, but the job's coordinator is head:7",
        ),
        ([], [], "Name the program to train, after two dashes: jaxft launch -- python my_train.py"),
        ([], ["no-such-program"], "There is no program 'no-such-program' to run"),
        (["--deadlines", "bake=1"], ["true"], "there is no phase 'bake'"),
    ],
)
def test_what_cannot_run_is_said_before_anything_starts(
    folder: Path, words: list[str], program: list[str], said: str
) -> None:
    with launch(folder, *words, program=tuple(program)) as running:
        assert running.status() == 1
    assert re.search(re.escape(said), running.text())
    assert not folder.exists()


def test_a_second_launch_in_a_folder_is_refused_before_it_changes_anything(folder: Path) -> None:
    """Their logs and events would be mixed, and the second coordinator would stand by without a word."""
    lives = ("made:up gate:go exit:0",)
    with launch(folder, "--no-warm", program=(*FAKE, *lives)) as first:
        first.until_file("up")
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        command = launch_command(folder, "--groups", "2", "--no-warm", program=(*FAKE, *lives))
        second = patience.run(command, capture_output=True, text=True)
        after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        (folder / "go").touch()
        assert first.status() == 0, first.text()
    assert second.returncode == 75
    assert second.stdout == ""
    assert second.stderr == (
        f"jaxft: Another `jaxft launch` (pid {first.process.pid} on {socket.gethostname()}) runs group-0 in --folder "
        f"{folder}: name another folder, or end that launch first.\n"
    )
    assert after == before


def test_a_folder_is_free_again_once_its_launcher_was_killed(folder: Path) -> None:
    with fakes(folder, lives=("made:up mute",)) as running:
        running.until_file("up")
        running.process.kill()
        running.process.wait()
        with fakes(folder, lives=("exit:0",)) as again:
            assert again.status() == 0, again.text()


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (("--group", "0"), ("--group", "1"), 0),
        (("--group", "0"), ("--group", "0"), 75),
        (("--groups", "2"), ("--group", "1"), 75),
        (("--group", "1"), ("--groups", "2"), 75),
    ],
)
def test_launches_of_different_groups_may_share_a_folder(
    folder: Path, first: tuple[str, ...], second: tuple[str, ...], status: int
) -> None:
    """As those of a Slurm array. On NFS a lock counts for all hosts."""
    with fakes(folder, *first, lives=("made:up-{group} gate:go exit:0",)) as running:
        running.until_file(f"up-group-{'1' if '1' in first else '0'}")
        with fakes(folder, *second, lives=("exit:0",)) as beside:
            assert beside.status() == status, beside.text()
        assert running.process.poll() is None


def test_the_nodes_of_a_group_may_share_a_folder(folder: Path) -> None:
    words = ("--group", "0", "--nodes", "2", "--meet", "localhost:1", "--node")
    with fakes(folder, *words, "0", lives=("made:up gate:go exit:0",)) as running:
        running.until_file("up")
        for node, status in (("1", 0), ("0", 75)):
            with fakes(folder, *words, node, lives=("exit:0",)) as beside:
                assert beside.status() == status, beside.text()


def test_a_coordinator_that_cannot_be_started_is_an_error_without_a_traceback(folder: Path) -> None:
    (folder / "coordinator.log").mkdir(parents=True)
    with launch(folder, program=("true",)) as running:
        assert running.status() == 1
    log = f"{folder}/coordinator.log"
    assert (
        f"jaxft: The coordinator cannot be started: [Errno 21] Is a directory: '{log}'.\n" in running.text()
    )
    assert "Traceback" not in running.text()


@pytest.mark.parametrize("command", ["launch", "chaos"])
def test_a_current_folder_that_was_removed_is_said(tmp_path: Path, command: str) -> None:
    here = tmp_path / "here"
    here.mkdir()
    words = [
        "sh",
        "-c",
        'rmdir "$PWD"; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "jaxft._cli",
        command,
        "--",
        "true",
    ]
    ended = patience.run(
        words, capture_output=True, text=True, cwd=here, env={**os.environ, "PYTHONPATH": ABSOLUTE}
    )
    assert ended.returncode == 1
    assert (
        ended.stderr == "jaxft: The current folder does not exist any more. Change to one that does: cd ...\n"
    )


@pytest.mark.parametrize(
    ("first", "why"),
    [("#!/bin/sh\r\n", "No such file or directory"), ("true\n", "Exec format error")],
)
def test_a_script_that_cannot_be_run_says_why(folder: Path, tmp_path: Path, first: str, why: str) -> None:
    """Such as one with the line ends of Windows: the kernel finds no interpreter of that name."""
    script = tmp_path / "train"
    script.write_bytes(first.encode())
    script.chmod(0o755)
    with launch(folder, *NOWHERE, "--max-restarts", "0", program=(str(script),)) as running:
        assert running.status() == 1
    assert (folder / "group-0.0.log").read_text() == (
        f"jaxft cannot run {str(script)!r}: {why}. The first line of a script must name a program that is there, and "
        "end as on Unix.\n"
    )


def test_a_machine_without_a_folder_for_temporary_files_is_told_what_to_do(folder: Path) -> None:
    """As in a container whose file system cannot be written, but for one volume. No file may have a byte here."""
    limited = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); os.execv(sys.argv[1], sys.argv[1:])"
    python = (sys.executable, "-c", f"import os, resource, sys; {limited}")
    command = [*python, *launch_command(folder, *NOWHERE, program=("true",))]
    ended = patience.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "jaxft: There is no folder for temporary files: " in ended.stderr
    assert ended.stderr.endswith(". Set TMPDIR to one on this machine.\n")


@pytest.mark.parametrize("made", ["run", "run/events.jsonl/"])
def test_a_folder_that_cannot_be_used_is_named(folder: Path, made: str) -> None:
    path = folder.parent / made
    if made.endswith("/"):
        path.mkdir(parents=True)
    else:
        path.touch()
    with fakes(folder, lives=("exit:0",)) as running:
        assert running.status() == 1
    assert f"jaxft: --folder {folder} cannot hold logs and events: " in running.text()
    assert "Traceback" not in running.text()


def test_a_token_reaches_the_groups_of_a_coordinator_that_was_given(folder: Path) -> None:
    show = ("sh", "-c", 'echo "token=$JAXFT_TOKEN coordinator=$JAXFT_COORDINATOR"')
    with launch(folder, program=show, JAXFT_TOKEN="secret", JAXFT_COORDINATOR="head:7") as running:
        assert running.status() == 0, running.text()
    assert "[group-0] token=secret coordinator=head:7" in running.text()
    assert not list(folder.glob("*.warm.log"))  # a shell is not forked from a warm process


@pytest.mark.parametrize("elsewhere", [True, False])
def test_certificates_are_for_a_coordinator_that_was_given(folder: Path, elsewhere: bool) -> None:
    """The launcher's own has no TLS: a group that asks for it would not be admitted."""
    show = ("sh", "-c", 'echo "tls=$JAXFT_TLS_CA,$JAXFT_TLS_CERT,$JAXFT_TLS_KEY."')
    environment = {"JAXFT_TLS_CA": "ca.pem", "JAXFT_TLS_CERT": "group.pem", "JAXFT_TLS_KEY": "group.key"}
    environment |= {"JAXFT_COORDINATOR": "head:7"} if elsewhere else {}
    with launch(folder, program=show, **environment) as running:
        assert running.status() == 0, running.text()
    assert f"[group-0] tls={'ca.pem,group.pem,group.key' if elsewhere else ',,'}." in running.text()


def test_groups_that_stay_after_the_job_is_done_have_a_deadline(folder: Path) -> None:
    lives = ("steps:1 made:up-{group} group-0=gate:go group-0=exit:0 mute",)
    with fakes(folder, "--groups", "2", "--deadlines", "end=0.3", lives=lives) as running:
        running.until_file("up-group-1")
        pids = running.pids("group-1")
        running.file("go").touch()
        assert running.status() == 0, running.text()
    assert len(running.events("group_started")) == 2
    assert "group-1 did not end in time: it is killed" in running.text()
    assert not any(map(is_alive, pids))


def test_a_group_that_fails_after_the_job_is_done_ends_as_a_whole_and_is_not_restarted(folder: Path) -> None:
    """Without a deadline for the end: otherwise a slow rank of the group that is done would have one too."""
    lives = ("steps:1 made:up-{group}-{rank} group-0=gate:go group-0=exit:0 mute",)
    with fakes(folder, "--groups", "2", "--nproc", "2", "--deadlines", "end=0", lives=lives) as running:
        for rank in range(2):
            running.until_file(f"up-group-1-{rank}")
        pids = running.pids("group-1")
        running.file("go").touch()
        assert running.until("group_ended")["ending"] == "done"
        os.kill(pids[1], signal.SIGKILL)
        assert running.status() == 0, running.text()
    assert len(running.events("group_started")) == 2
    assert not any(map(is_alive, pids))
