"""Real processes: killed while they save, or out of disk."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxft._checkpoints import Checkpoints
from tests import patience

from .saver import state_at
from .states import PATIENCE_S, names, restored, same

pytestmark = pytest.mark.processes
SAVER = Path(__file__).with_name("saver.py")


def start(what: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SAVER), what, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
def test_killed_while_it_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seed = random.randrange(1 << 30)
    chance, torn, last, kills = random.Random(seed), 0, 0, 0
    while kills < 3 or not torn:
        kills += 1
        assert kills <= 30, f"seed {seed}: no save was caught in the middle"
        saver = start("endless", tmp_path)
        with saver:
            assert saver.stdout is not None
            cancel = patience.alarm(patience.LIMIT_S, saver.kill)
            printed = int(saver.stdout.readline())  # the first is complete; the next is being written
            try:
                # Not to wait for something: the process is killed at a random moment.
                saver.wait(chance.uniform(0.0, 0.3))
            except subprocess.TimeoutExpired:
                saver.send_signal(signal.SIGKILL)
            cancel()
            later = [int(line) for line in saver.stdout.read().split()]
        assert saver.returncode == -signal.SIGKILL
        torn += len(list(tmp_path.glob(".unfinished-*")))
        found = restored(Checkpoints(tmp_path), state_at(0))
        assert found.step in {max([printed, *later]), max([printed, *later]) + 1}, f"seed {seed}"
        assert found.step > last, f"seed {seed}"
        assert same(found.state, state_at(found.step)), f"seed {seed}"
        last = found.step
    # All the whole ones were read without complaint, and the next save clears up.
    assert not [record for record in caplog.records if record.name == "jaxft"], f"seed {seed}"
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(last + 1, state_at(last + 1), job="docs", history=0)
    checkpoints.finish(PATIENCE_S)
    assert names(tmp_path) == {str(last + 1)}


def test_a_full_disk(tmp_path: Path) -> None:
    done = start("full", tmp_path)
    try:
        printed, errors = patience.communicate(done)
    finally:
        done.kill()
    assert printed.splitlines() == ["1 [1]", "2 [1]", "3 [1, 3]"], errors
    (line,) = [line for line in errors.splitlines() if line.startswith("jaxft ERROR")]
    assert "The checkpoint of step 2 was not written" in line
    assert "has space" in line
    found = restored(Checkpoints(tmp_path), state_at(0))
    assert same(found.state, state_at(3))
    assert names(tmp_path) == {"1", "3"}
