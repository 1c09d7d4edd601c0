"""The commands where their input or an output is closed (`>&-`), as some process managers start them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience
from tests.launch.launches import FAKE, NOWHERE, launch_command

ALL = "<&- >&- 2>&-"
COORDINATOR = (sys.executable, "-m", "jaxft_coordinator")
JAXFT = (sys.executable, "-m", "jaxft_launch")

# Printed by a program whose streams were closed: the files behind 0 to 2, the streams, and the number of a new file.
OPENED = """
import os, sys
from jaxft_protocol.host.commands import open_closed_streams
open_closed_streams()
print("for no one")
sys.stderr.write("for no one")
assert sys.stdin.read() == ""
with open(sys.argv[1], "w") as file:
    print(*(os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)), file.fileno() > 2, file=file)
"""


def run(closed: str, *command: str) -> "subprocess.CompletedProcess[str]":
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    return patience.run(words, capture_output=True, text=True)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    found = tmp_path / "found"
    assert run(ALL, sys.executable, "-c", OPENED, str(found)).returncode == 0
    assert found.read_text() == "/dev/null /dev/null /dev/null True\n"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_an_open_stream_stays(tmp_path: Path) -> None:
    found = tmp_path / "found"
    ended = run(">&-", sys.executable, "-c", OPENED.replace('assert sys.stdin.read() == ""', ""), str(found))
    assert (ended.returncode, ended.stderr) == (0, "for no one")
    _, output, errors, new = found.read_text().split()
    assert (output, errors.partition(":")[0], new) == ("/dev/null", "pipe", "True")


@pytest.mark.parametrize(
    "closed", [ALL, *(pytest.param(each, marks=pytest.mark.long) for each in (">&-", "2>&-"))]
)
@pytest.mark.parametrize(
    ("command", "status"),
    [
        ((*COORDINATOR, "--version"), 0),
        ((*COORDINATOR, "--bind", "nonsense"), 1),
        ((*JAXFT, "launch", "--group", "1", "--", "true"), 1),
        ((*JAXFT, "status", "--http", "http://localhost:1", "--json"), 1),
        ((*JAXFT, "no-such-command"), 2),
    ],
)
def test_a_command_ends_as_with_dev_null(closed: str, command: tuple[str, ...], status: int) -> None:
    ended = run(closed, *command)
    assert ended.returncode == status
    assert "Traceback" not in ended.stderr


@pytest.mark.processes
def test_a_launch_runs_without_any_stream(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = launch_command(folder, *NOWHERE, "--no-warm", program=(*FAKE, "say:hello steps:2 exit:0"))
    assert run(ALL, *words).returncode == 0
    lines = (folder / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == [
        *("launch_began", "group_started", "group_ended", "launch_ended")
    ]
    assert (folder / "group-0.0.log").read_text() == "hello\n"


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ((*JAXFT, "--help"), 0),
        ((*JAXFT, "launch", "--help"), 0),
        ((*COORDINATOR, "--help"), 0),
        pytest.param((*JAXFT, "doctor"), 141, marks=pytest.mark.long),
    ],
)
def test_a_reader_that_has_enough_is_no_error(command: tuple[str, ...], status: int) -> None:
    """As `jaxft doctor | head -1`. The status is as after SIGPIPE, unless the command was done."""
    ours, theirs = os.pipe()
    os.close(ours)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = patience.run([*command], stdout=theirs, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (status, "")


def test_an_interrupt_while_a_command_is_imported_is_no_error(tmp_path: Path) -> None:
    """JAX takes seconds."""
    slow = tmp_path / "jax.py"
    slow.write_text("import pathlib, time; pathlib.Path('up').touch(); time.sleep(3600)")
    path = os.pathsep.join([str(tmp_path), *map(os.path.abspath, sys.path)])
    with subprocess.Popen(
        [*JAXFT, "doctor"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        patience.until((tmp_path / "up").exists, "the import")
        process.send_signal(signal.SIGINT)
        _, errors = patience.communicate(process)
    assert (process.returncode, errors) == (130, "jaxft: interrupted\n")
