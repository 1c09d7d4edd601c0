"""`jaxft launch` as the first process of a container, here of a process namespace."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience
from tests.launch.launches import FAKE, NOWHERE, launch_command

CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*CONTAINER, "true"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not _can_unshare(), reason="needs unshare of util-linux, and user namespaces"),
]
# Leaves a process behind in each life, and says how many such have ended and wait for their parent.
LEAVES = """
import subprocess, sys
from pathlib import Path

def state_of(file):
    try:
        return file.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""

states = [state_of(file) for file in Path("/proc").glob("[0-9]*/stat")]
print("defunct", states.count("Z"), flush=True)
subprocess.Popen(["sh", "-c", "sleep 3600 & wait"])
sys.exit(75)
"""


def children_of(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.long
def test_what_the_programs_leave_behind_does_not_pile_up(tmp_path: Path) -> None:
    """A container may have so many processes, and one that has ended counts until its parent asks for its status."""
    program = tmp_path / "leaves.py"
    program.write_text(LEAVES)
    words = (*NOWHERE, "--no-warm", "--max-restarts", "2")
    command = launch_command(tmp_path / "run", *words, program=("python3", "-I", "-S", str(program)))
    ended = patience.run([*CONTAINER, *command], capture_output=True, text=True)
    assert ended.returncode == 75, ended.stderr
    said = [line for line in ended.stdout.splitlines() if line.startswith("[group-0] defunct")]
    assert said == ["[group-0] defunct 0"] * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_first_process_drains_once(tmp_path: Path, number: signal.Signals) -> None:
    """Docker and the kubelet signal that process alone. A terminal's Ctrl-C reaches it and not the launcher too."""
    folder = tmp_path / "run"
    command = launch_command(folder, *NOWHERE, "--no-warm", program=(*FAKE, "leave:75 made:up mute"))
    with subprocess.Popen(
        [*CONTAINER, *command], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        patience.until((folder / "up").exists, "the group")
        (first,) = children_of(process.pid)
        (launcher,) = children_of(first)
        assert os.getpgid(launcher) != os.getpgid(first)
        os.kill(first, number)
        said, _ = patience.communicate(process)
    assert process.returncode == (130 if number == signal.SIGINT else 75), said
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [one["signal"] for one in events if one["event"] == "drain_began"] == [number.name]
    assert "again: ends all groups" not in said


def test_the_launcher_that_is_killed_ends_the_container(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    suicide = "import os, signal; os.kill(os.getppid(), signal.SIGKILL); signal.pause()"
    command = launch_command(folder, *NOWHERE, "--no-warm", program=(sys.executable, "-c", suicide))
    ended = patience.run([*CONTAINER, *command], capture_output=True, text=True)
    assert ended.returncode == 137
