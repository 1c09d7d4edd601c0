"""A program that runs as another user, as under `sudo -u`: the launcher may not signal it.

The launcher runs as root, without the right to signal the processes of others.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import patience
from tests.launch.launches import HERE, NOWHERE, Launch, is_alive, launch_command

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv of util-linux"
    ),
]
NOT_ALLOWED = ("setpriv", "--bounding-set=-kill", "--inh-caps=-kill")
# group-0 runs as another user, and the other groups as the launcher's.
OTHER = "setpriv --reuid=65534 --clear-groups"
STAYS = "echo up; exec sleep 3600"
STORM = """
import sys
from pathlib import Path
from jaxft_launch.storm._display import PlainDisplay
from jaxft_launch.storm._job import Job, Program
from jaxft_launch.processes._processes import Processes
from jaxft_launch.storm._run import run_job

class Storm:
    planned_kills = 1
    def tell(self, job): pass
    def strike(self, job):
        if "up" in job.current("group-0").child.output():
            job.kill("group-0")

with Processes(Path(sys.argv[1]), cwd=Path.cwd()) as processes:
    job = Job("job", ("group-0",), Program(words=tuple(sys.argv[2:])), coordinator=None, processes=processes)
    print(run_job(job, PlainDisplay(sys.stdout, name="storm"), Storm(), title="storm").problems)
    print("left", job.current("group-0").child.pid)
"""
PROGRAM = ("sh", "-c", f"test {{group}} != group-0 || exec {OTHER} sh -c '{STAYS}'; {STAYS}")


@contextlib.contextmanager
def launch(folder: Path, *words: str, program: tuple[str, ...] = PROGRAM) -> Iterator[Launch]:
    """Run it, and end what it may have left."""
    out = folder.with_name("out")
    command = [*NOT_ALLOWED, *launch_command(folder, *NOWHERE, "--no-warm", *words, program=program)]
    with (
        out.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, cwd=HERE.parents[1]) as process,
    ):
        running = Launch(process, folder, out)  # pyright: ignore[reportArgumentType]
        try:
            yield running
        finally:
            process.kill()
            for event in running.events("group_started"):
                for pid in event["pids"]:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)


def until_up(running: Launch, *groups: str) -> None:
    for group in groups:
        patience.until(lambda group=group: f"[{group}] up" in running.text(), group, context=running.text)


def end_by_itself(pid: int) -> None:
    """The test has the right that the launcher lacks."""
    os.killpg(pid, signal.SIGKILL)


def test_a_drain_reaches_the_other_groups_and_waits_for_this_one(tmp_path: Path) -> None:
    with launch(tmp_path / "run", "--groups", "2") as running:
        until_up(running, "group-0", "group-1")
        (pid,) = running.pids("group-0")
        running.process.send_signal(signal.SIGTERM)
        assert running.until("group_ended")["group"] == "group-1"
        assert is_alive(pid)
        end_by_itself(pid)
        assert running.status() == 75, running.text()
    assert running.text().count("runs as another user") == 1
    assert (
        f"group-0 (pid {pid}) runs as another user, so this launcher may not signal it: it is neither drained nor "
        "killed, and goes on until it ends by itself. Start the launcher as that user instead: sudo -u USER jaxft "
        "launch ..."
    ) in running.text()
    assert "Traceback" not in running.text()


@pytest.mark.parametrize("again", [True, False])
def test_a_launch_ends_without_what_it_cannot_end(tmp_path: Path, again: bool) -> None:
    """At the second signal, or after --drain-timeout-s."""
    with launch(tmp_path / "run", "--drain-timeout-s", "600" if again else "0.5") as running:
        until_up(running, "group-0")
        (pid,) = running.pids()
        running.process.send_signal(signal.SIGTERM)
        if again:
            running.until("drain_began")
            running.process.send_signal(signal.SIGTERM)
        assert running.status() == 75, running.text()
        assert is_alive(pid)
    assert (
        f"It runs as another user, still runs, and could not be ended. To end it: sudo kill -9 {pid}\n"
        in running.text()
    )
    assert len(running.events("group_given_up")) == 1
    assert "Traceback" not in running.text()


@pytest.mark.long
def test_one_that_does_not_move_is_waited_for_and_then_restarted(tmp_path: Path) -> None:
    with launch(tmp_path / "run", "--groups", "2", "--deadlines", "boot=0.5") as running:
        until_up(running, "group-0", "group-1")
        (pid,) = running.pids("group-0")
        said = f"group-0 (pid {pid}) runs as another user"
        patience.until(lambda: said in running.text(), "the deadline", context=running.text)
        patience.until(
            lambda: [event["group"] for event in running.events("group_started")].count("group-1") > 1,
            "the other group's restart",
            context=running.text,
        )
        assert is_alive(pid)
        end_by_itself(pid)
        patience.until(
            lambda: [event["group"] for event in running.events("group_started")].count("group-0") > 1,
            "its restart",
            context=running.text,
        )
    assert running.text().count(said) == 1


@pytest.mark.long
def test_what_a_program_leaves_behind_as_another_user_is_named(tmp_path: Path) -> None:
    program = ("sh", "-c", f"{OTHER} sh -c '{STAYS}' & until grep -q up {{folder}}/*.log; do :; done")
    with launch(tmp_path / "run", program=program) as running:
        assert running.status() == 0, running.text()
        text = running.text()
        assert "runs as another user, so this launcher may not kill it" in text
        pid = int(text.partition("To end it: sudo kill -9 ")[2].split()[0])
        assert is_alive(pid)


@pytest.mark.long
def test_no_fault_is_counted_that_could_not_strike(tmp_path: Path) -> None:
    command = [*NOT_ALLOWED, sys.executable, "-c", STORM, str(tmp_path), *OTHER.split(), "sh", "-c", STAYS]
    ended = patience.run(command, stdout=subprocess.PIPE, text=True)
    problem, left = ended.stdout.splitlines()[-2:]
    pid = int(left.split()[1])
    assert problem == (
        f"('job.group-0.0 (pid {pid}) runs as another user, so no fault can strike it: start this command as that "
        "user',)"
    )
    end_by_itself(pid)
