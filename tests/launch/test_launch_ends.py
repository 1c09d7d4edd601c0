"""How groups and their processes end: signals, drains, a closed terminal, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience
from tests.launch.launches import FAKE, NOWHERE, fakes, is_alive, launch, launch_command

pytestmark = pytest.mark.processes


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


def test_a_group_whose_job_was_finished_without_it_does_not_end_the_others(folder: Path) -> None:
    """They may be in the second phase of their program, with another job."""
    lives = ("group-0=phase:late:0 group-0=exit:0 steps:1 gate:go kill", "exit:0")
    with fakes(folder, "--groups", "2", lives=lives) as running:
        ended = running.until("group_ended")
        assert (ended["group"], ended["ending"], ended["status"]) == ("group-0", "done", 0)
        running.file("go").touch()
        assert running.status() == 0, running.text()
    assert [event["group"] for event in running.events("group_restarts")] == ["group-1"]
    assert [event["ending"] for event in running.events("group_ended")] == ["done", "killed", "done"]
    assert "group-0 is done: its job was finished without it\n" in running.text()


def test_a_launch_whose_groups_all_came_back_too_late_is_not_done(folder: Path) -> None:
    """Each was killed in the second phase of the program, and was kept from it by the first, which is finished."""
    lives = ("steps:3 kill", "phase:late:0 exit:0")
    with launch(folder, "--groups", "2", "--no-warm", program=(*FAKE, *lives)) as running:
        assert running.status() == 1, running.text()
    assert "no program has ended well: each group ended unexpectedly" in running.text()
    assert running.text().count("is done: its job was finished without it") == 2


@pytest.mark.parametrize(
    "lives",
    [
        # The program of one has run to its end.
        pytest.param(
            ("group-0=gate:late group-0=exit:0 steps:3 kill", "made:late phase:late:0 exit:0"), id="one-ran"
        ),
        # The job was finished before this launch.
        pytest.param(("phase:late:0 exit:0",), id="before"),
    ],
)
def test_a_launch_is_done_if_its_groups_need_not_come_back(folder: Path, lives: tuple[str, ...]) -> None:
    with launch(folder, "--groups", "2", "--no-warm", program=(*FAKE, *lives)) as running:
        assert running.status() == 0, running.text()
    assert "no program has ended" not in running.text()


def test_a_launch_on_one_host_of_several_does_not_know_whether_others_have_ended_well(folder: Path) -> None:
    with fakes(folder, "--groups", "2", lives=("steps:3 kill", "phase:late:0 exit:0")) as running:
        assert running.status() == 0, running.text()


STRANDED = "phase:stranded:0 exit:75"


def test_a_job_whose_state_nothing_holds_is_given_up(folder: Path) -> None:
    """With the log of the life that ended it, and while its groups still wait: they would find nothing."""
    lives = ("say:the-cause steps:3 exit:75", "phase:stranded:0 alive")
    with launch(folder, "--groups", "2", "--no-warm", program=(*FAKE, *lives)) as running:
        assert running.status() == 1, running.text()
    given_up = running.events("group_given_up")
    assert sorted(event["group"] for event in given_up) == ["group-0", "group-1"]
    assert [event["life"] for event in running.events("group_started")] == [0, 0, 1, 1]
    for event in given_up:
        assert event["why"].startswith("No group holds the job's state any more")
    told = running.text().partition("is given up")[2]
    assert "-0.0.log) ---" in told
    assert "the-cause" in told


def test_groups_that_do_not_wait_at_the_same_time_find_no_state_either(folder: Path) -> None:
    """One compiles for longer than another waits."""
    lives = ("steps:3 exit:75", f"group-1=gate:waits {STRANDED}", "made:waits phase:wait:0 alive")
    with launch(folder, "--groups", "2", "--no-warm", program=(*FAKE, *lives)) as running:
        assert running.status() == 1, running.text()
    lives_of_one = [event["life"] for event in running.events("group_started") if event["group"] == "group-1"]
    assert lives_of_one[:2] == [0, 1]
    assert len(running.events("group_given_up")) == 2


def test_a_group_that_finds_no_state_while_another_trains_does_not_end_that(folder: Path) -> None:
    lives = ("steps:3 group-1=gate:over exit:75", STRANDED)
    words = ("--groups", "2", "--no-warm", "--max-restarts", "2")
    with launch(folder, *words, program=(*FAKE, *lives)) as running:
        given_up = running.until("group_given_up")
        running.file("over").touch()
        assert running.until("group_ended", 5)["group"] == "group-1"
    assert given_up["group"] == "group-0"
    assert given_up["why"] == "It ended 3 times in a row without a new step (--max-restarts 2)."


def test_only_a_launch_with_a_coordinator_knows_that_nothing_holds_the_state(folder: Path) -> None:
    with fakes(
        folder, "--groups", "2", "--max-restarts", "2", lives=("steps:3 exit:75", STRANDED)
    ) as running:
        assert running.status() == 75, running.text()
    given_up = running.events("group_given_up")
    assert sorted(event["group"] for event in given_up) == ["group-0", "group-1"]
    for event in given_up:
        assert event["why"].startswith("It ended 3 times in a row without a new step")


def test_a_group_that_is_done_without_a_step_says_so(folder: Path) -> None:
    """Its program may have forgotten the Manager, or ended too early with status 0: the others are not restarted."""
    with fakes(folder, "--groups", "2", lives=("group-0=exit:0 steps:1 exit:0",)) as running:
        assert running.status() == 0, running.text()
    assert "group-0 is done, but its program has called no step: does it come to" in running.text()
    assert "group-1 is done\n" in running.text()


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


# Its coordinator hangs before it listens, as on a file server that does not answer.
HANGS = """
import sys
from pathlib import Path
from jaxft_launch.__main__ import exit_with_status_of
from jaxft_launch.supervise._options import LaunchOptions
from jaxft_launch.supervise.launch import run_launch

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
