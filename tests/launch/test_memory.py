"""The launcher says if a process may have been killed by the kernel, for lack of memory."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxft_launch.supervise._memory_kills import memory_kills, memory_text
from tests.launch.launches import NOWHERE, fakes, launch

pytestmark = pytest.mark.processes

CGROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 64 << 20
# Enters the group of processes with the limit, and takes ever more.
HOG = """
import os, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
taken = []
while True:
    taken.append(b"x" * (8 << 20))
"""


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A cgroup, of either version, whose processes have little memory."""
    version_1 = (CGROUPS / "memory").is_dir()
    made = (CGROUPS / "memory" if version_1 else CGROUPS) / f"jaxft-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(LIMIT_BYTES))
    except OSError as error:
        if made.is_dir():
            made.rmdir()
        pytest.skip(f"cannot limit the memory of a process here: {error}")
    yield made
    made.rmdir()


def test_a_lack_of_memory_is_said(folder: Path, little_memory: Path) -> None:
    program = (sys.executable, "-S", "-c", HOG, str(little_memory / "cgroup.procs"))
    with launch(folder, *NOWHERE, "--no-warm", "--max-restarts", "0", program=program) as running:
        assert running.status() != 0
    assert "ended with exit status -9 (killed). While it ran, the kernel killed" in running.text()
    assert "of this machine for lack of memory" in running.text()


def test_one_that_was_killed_by_hand_has_no_such_text(folder: Path) -> None:
    before = memory_kills()
    with fakes(folder, "--max-restarts", "0", lives=("kill",)) as running:
        running.until("group_ended")
        assert "ended with exit status -9 (killed)" in running.text()
        # Unless another program of this machine ran out of memory just now.
        assert memory_kills() > before or "for lack of memory" not in running.text()


@pytest.mark.parametrize(
    ("kills", "text"), [(-1, ""), (0, ""), (1, "killed a process of"), (3, "killed 3 processes of")]
)
def test_the_text_counts(kills: int, text: str) -> None:
    assert text in memory_text(kills)
    assert bool(memory_text(kills)) == (kills > 0)
