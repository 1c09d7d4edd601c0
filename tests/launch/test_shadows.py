"""A working folder whose modules have the names of others: only a program that imports them meets them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxft_launch.processes._coordinator import Coordinator
from jaxft_launch.processes._processes import Processes
from jaxft_launch.processes._warm import with_statuses
from tests import patience

pytestmark = pytest.mark.processes
CPU = {"JAX_PLATFORMS": "cpu"}
# Of the standard library, and of what jaxft needs.
NAMES = ("ast", "copy", "grpc", "jax", "json", "numpy", "queue", "random", "token", "types")
# A user has the program in one folder, and starts it in another.
PROGRAM = """
import sys
import random, jax, jaxft
print(sys.path[0], random.random() < 1, jax.__version__ == sys.argv[1], jaxft.JaxftError.__name__)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shadows = tmp_path / "shadows"
    shadows.mkdir()
    for name in NAMES:
        (shadows / f"{name}.py").write_text(f"raise ImportError('{name} of the working folder')")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text(PROGRAM)
    return shadows


@pytest.fixture
def processes(tmp_path: Path, folder: Path) -> Iterator[Processes]:
    logs = tmp_path / "logs"
    logs.mkdir()
    with Processes(logs, cwd=folder) as made:
        yield made


@pytest.mark.parametrize("warm", [False, True])
def test_a_program_elsewhere_does_not_meet_them(processes: Processes, folder: Path, *, warm: bool) -> None:
    import jax

    script = folder.parent / "source" / "train.py"
    command = [sys.executable, str(script), jax.__version__]
    forked_from = processes.start_warm("warm", environment=CPU) if warm else None
    assert forked_from is None or forked_from.until_ready(), (processes.folder / "warm.log").read_text()
    child = processes.start(
        "child", command if warm else with_statuses(command), environment=CPU, warm=forked_from
    )
    assert child.wait(patience.FAR_S)
    assert child.warm == warm
    assert child.log.read_text() == f"{script.parent} True True JaxftError\n"


def test_a_coordinator_does_not_meet_them(processes: Processes) -> None:
    assert Coordinator(processes).port
