"""`jaxft launch` with real processes that do not train: restarts, fates, deadlines and the coordinator."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience
from tests.launch.launches import FAKE, NOWHERE, fakes, is_alive, launch, launch_command

pytestmark = pytest.mark.processes


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


def test_all_ranks_of_a_group_say_where_they_stand_before_it_is_killed(folder: Path) -> None:
    """One that waits for another in a collective is as late as that one."""
    lives = ("shows steps:2 phase:compute:2 alive", "exit:0")
    with fakes(folder, "--nproc", "2", "--deadlines", "compute=0.3", lives=lives) as running:
        late = running.until("rank_overdue")
        assert running.until("group_ended")["ending"] == "killed"
        assert "its group is killed. It may wait for another" in running.text()
    assert late["phase"] == "compute"
    for rank in range(2):
        assert "in do" in (folder / f"group-0.0.{rank}.log").read_text()


@pytest.mark.long
def test_a_rank_that_is_stopped_is_not_said_to_wait_for_another(folder: Path) -> None:
    lives = ("steps:2 phase:vote:2 1=stop alive", "exit:0")
    with fakes(folder, "--nproc", "2", "--deadlines", "silence=3", lives=lives) as running:
        late = running.until("rank_overdue")
        running.until("group_ended")
        assert "its group is killed" in running.text()
        assert "It may wait for another" not in running.text()
    assert (late["rank"], late["phase"]) == (1, "silence")


def test_one_that_waits_for_the_others_is_left_alone(folder: Path) -> None:
    deadlines = "compute=0.3,apply=0.3,silence=600"
    with fakes(folder, "--deadlines", deadlines, lives=("phase:vote:1 gate:go exit:0",)) as running:
        running.until_file("group-0.0.starts")
        began_s = patience.machine_s()
        patience.until(lambda: patience.machine_s() > began_s + 0.7, "time in which it could be killed")
        (folder / "go").touch()
        assert running.status() == 0, running.text()
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
