"""`jaxft launch` with real processes that do not train: what only processes can show. Decisions: test_core_*.py."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience
from tests.launch.launches import (
    FAKE,
    HERE,
    NOWHERE,
    fakes,
    is_alive,
    launch,
    launch_command,
)

pytestmark = pytest.mark.processes
ABSOLUTE = os.pathsep.join(
    str(HERE.parents[1] / name) for name in ("", "protocol", "coordinator", "launcher")
)


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


def test_exit_statuses_count_where_the_parent_ignores_ended_children(folder: Path) -> None:
    """As some process managers leave it. A program that was killed would otherwise count as done."""
    ignores = "signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    parent = (sys.executable, "-c", f"import os, signal, sys; {ignores}")
    command = launch_command(folder, *NOWHERE, program=(*FAKE, "exit:78"))
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


def test_all_ranks_of_a_group_say_where_they_stand_before_it_is_killed(folder: Path) -> None:
    """A rank that waits for another in a collective is as late as the other."""
    lives = ("shows steps:2 phase:compute:2 alive", "exit:0")
    with fakes(folder, "--nproc", "2", "--deadlines", "compute=0.3", lives=lives) as running:
        late = running.until("rank_overdue")
        assert running.until("group_ended")["ending"] == "killed"
        assert "its group is killed. It may wait for another" in running.text()
    assert late["phase"] == "compute"
    for rank in range(2):
        assert "in do" in (folder / f"group-0.0.{rank}.log").read_text()


def test_the_coordinator_is_started_and_restarted_with_its_memory(folder: Path) -> None:
    lives = ("steps:1 made:up-{group} gate:go exit:0",)
    with launch(folder, program=(*FAKE, *lives)) as running:
        running.until_file("up-group-0")
        first = running.until("coordinator_started")
        os.kill(first["pid"], signal.SIGKILL)
        second = running.until("coordinator_started", 2)
        (folder / "go").touch()
        assert running.status() == 0, running.text()
    (ended,) = running.events("coordinator_ended")
    assert (ended["pid"], ended["status"]) == (first["pid"], -9)
    assert (second["address"], second["pid"] != first["pid"]) == (first["address"], True)
    assert list((folder / "coordinator").iterdir())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGUSR2, 75), (signal.SIGINT, 130)])
def test_a_signal_drains_the_groups(folder: Path, number: int, status: int) -> None:
    with fakes(folder, "--groups", "2", lives=("drains:3 steps:1 made:up-{group} mute",)) as running:
        for name in ("group-0", "group-1"):
            running.until_file(f"up-{name}")
        running.process.send_signal(number)
        assert running.status() == status, running.text()
    assert [event["signal"] for event in running.events("drain_began")] == [signal.Signals(number).name]
    assert [event["ending"] for event in running.events("group_ended")] == ["drained", "drained"]
    assert running.text().count("was drained, at step 3") == 2


def test_a_process_that_is_stopped_is_replaced(folder: Path) -> None:
    lives = ("steps:2 phase:vote:2 stop", "steps:3 exit:0")
    with fakes(folder, "--deadlines", "silence=1", lives=lives) as running:
        late = running.until("rank_overdue")
        running.until("group_started", 2)
    assert late["phase"] == "silence"
    assert not is_alive(late["pid"])


SHARES = """
import os, time
from multiprocessing import shared_memory
from pathlib import Path
block = shared_memory.SharedMemory(create=True, size=1 << 20)
Path(os.environ["BLOCK"]).write_text(block.name)
time.sleep(3600)
"""


def test_a_kill_leaves_no_shared_memory_behind(folder: Path, tmp_path: Path) -> None:
    """Python's tracker of shared memory is a process that the program has started: it frees that after a kill."""
    script, block = tmp_path / "shares.py", tmp_path / "block"
    script.write_text(SHARES)
    words = (*NOWHERE, "--no-warm", "--drain-timeout-s", "0")
    with launch(folder, *words, program=(sys.executable, str(script)), BLOCK=str(block)) as running:
        patience.until(lambda: block.exists() and block.read_text(), "its memory", context=running.text)
        memory = Path("/dev/shm") / block.read_text()
        assert memory.exists()
        running.process.send_signal(signal.SIGTERM)
        running.status()
    assert not memory.exists()


# Its coordinator hangs before it listens, as on a file server that does not answer.
HANGS = """
import os, sys
from pathlib import Path
from jaxft_launch.__main__ import exit_with_status_of
from jaxft_launch.supervise._options import LaunchOptions
from jaxft_launch.supervise._plan import plan
from jaxft_launch.supervise.launch import run

coordinator = ("sh", "-c", 'trap "" TERM; touch "$0"; exec sleep 3600', sys.argv[2])
planned = plan(LaunchOptions(folder=Path(sys.argv[1])), ["true"], {})
exit_with_status_of(lambda: run(planned, coordinator=coordinator))
"""


def test_a_signal_counts_while_the_coordinator_starts(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGS, str(folder), str(tmp_path / "up")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        patience.until((tmp_path / "up").exists, "the coordinator's process")
        process.send_signal(signal.SIGTERM)
        text, errors = patience.communicate(process)
    assert (process.returncode, errors) == (75, "")
    assert "got SIGTERM while the coordinator started: no group was started" in text
    assert (folder / "events.jsonl").read_text() == ""


def test_a_page_whose_port_is_taken_stops_no_launch(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with launch(folder, "--no-warm", "--http", address, program=(*FAKE, "steps:1 exit:0")) as running:
            assert running.status() == 0, running.text()
    assert f"there is no page at http://{address}/: [Errno 98] Address already in use" in running.text()
    assert "the page is at" not in running.text()


def test_a_critical_check_drains_a_group_until_it_is_well(folder: Path, tmp_path: Path) -> None:
    """The first answer comes at once, and counts before the group's next life."""
    sick = tmp_path / "group-1.sick"
    sick.touch()
    words = (
        "sh",
        "-c",
        'test ! -e "$1/$JAXFT_GROUP.sick" || { echo no fabric; exit 2; }',
        "sh",
        str(tmp_path),
    )
    lives = ("drains:4 steps:3 group-0=gate:go group-0=exit:0 mute", "gate:go exit:0")
    with fakes(folder, "--groups", "2", "--check", shlex.join(words), lives=lives) as running:
        drains = running.until("check_drains")
        ended = running.until("group_ended")
        assert (drains["group"], drains["text"]) == ("group-1", "no fabric")
        assert (ended["group"], ended["ending"]) == ("group-1", "drained")
        running.file("go").touch()
        assert running.status() == 0, running.text()
    assert len(running.events("group_started")) == 2
    assert "group-1 is not started here until its check is OK: no fabric" in running.text()


def test_groups_agree_on_the_order_of_a_set(folder: Path, tmp_path: Path) -> None:
    """A step that iterates over a set of names must be the same program in each group."""
    program = tmp_path / "program.py"
    program.write_text("print('hash', hash('a'))")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    words = (*NOWHERE, "--groups", "2")
    command = launch_command(folder, *words, program=("python", str(program)))
    ended = patience.run(command, env=environment, capture_output=True, text=True)
    seed = {"PYTHONHASHSEED": "0"}
    alone = patience.run([sys.executable, str(program)], env=seed, capture_output=True, text=True)
    assert re.findall(r"hash -?\d+", ended.stdout + ended.stderr) == [alone.stdout.strip()] * 2


def test_a_second_launch_of_a_group_in_a_folder_is_refused_before_it_changes_anything(folder: Path) -> None:
    """Launchers of different groups may share a folder, as in a Slurm array."""
    lives = ("made:up gate:go exit:0",)
    with fakes(folder, "--group", "0", lives=lives) as first:
        first.until_file("up")
        with fakes(folder, "--group", "1", lives=("exit:0",)) as other:
            assert other.status() == 0, other.text()
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        command = launch_command(folder, *NOWHERE, "--group", "0", program=(*FAKE, *lives))
        second = patience.run(command, capture_output=True, text=True)
        assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
        (folder / "go").touch()
        assert first.status() == 0, first.text()
    assert (second.returncode, second.stdout) == (75, "")
    assert second.stderr == (
        f"jaxft: Another `jaxft launch` runs group-0 in --folder {folder}: name another folder, or end that launch "
        "first.\n"
    )


@pytest.mark.parametrize("coordinator", ["head:7", ""])
def test_credentials_are_for_a_coordinator_that_was_given(folder: Path, coordinator: str) -> None:
    """The launcher's own has neither a token nor TLS: a group that asks for TLS would not be admitted."""
    show = ("sh", "-c", 'echo "has $JAXFT_TOKEN,$JAXFT_TLS_CA,$JAXFT_TLS_CERT,$JAXFT_TLS_KEY."')
    files = {"JAXFT_TLS_CA": "ca.pem", "JAXFT_TLS_CERT": "group.pem", "JAXFT_TLS_KEY": "group.key"}
    environment = {**files, "JAXFT_TOKEN": "secret", "JAXFT_COORDINATOR": coordinator}
    with launch(folder, program=show, **environment) as running:
        assert running.status() == 0, running.text()
    assert f"[group-0] has {'secret,ca.pem,group.pem,group.key' if coordinator else ',,,'}." in running.text()
    assert not list(folder.glob("*.warm.log"))  # a shell is not forked from a warm process
