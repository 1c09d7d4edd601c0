"""A real process that is ordered to die in a phase, and dies there by a real SIGKILL."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import jaxft
from jaxft._supervised._phase_file import Word, orders_beside, read_word, words_beside
from tests import patience

HERE = Path(__file__).parent
PATIENCE_S = 60.0
# The wrapper without `jaxft/__init__.py`, and so without the seconds that JAX takes to import.
WRAPPER = (
    "import sys, types\n"
    "sys.modules['jaxft'] = types.ModuleType('jaxft')\n"
    f"sys.modules['jaxft'].__path__ = [{str(Path(jaxft.__file__).parent)!r}]\n"
    "from fake_training import main\n"
    "main()\n"
)


@contextmanager
def victim(folder: Path, *, steps: int) -> Iterator[subprocess.Popen[bytes]]:
    flags = ["--events", str(folder / "events.jsonl"), "--steps", str(steps)]
    orders = orders_beside(folder / "events.jsonl")
    os.mkfifo(orders)
    with (
        subprocess.Popen(
            [sys.executable, "-c", WRAPPER, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PYTHONPATH": str(HERE)},
        ) as process,
        orders.open("r+b", buffering=0),
    ):
        try:
            yield process
        finally:
            process.kill()


def order(folder: Path, text: bytes) -> None:
    with orders_beside(folder / "events.jsonl").open("r+b", buffering=0) as pipe:
        pipe.write(text)


def word_of(folder: Path) -> Word:
    word = read_word(words_beside(folder / "events.jsonl"))
    assert word is not None
    return word


@pytest.mark.parametrize("phase", ["heal", "vote"])
def test_it_dies_where_the_ordered_phase_begins(tmp_path: Path, phase: str) -> None:
    with victim(tmp_path, steps=10**6) as process:
        order(tmp_path, f"die {phase} 0.0\n".encode())
        patience.communicate(process)
    assert process.returncode == -signal.SIGKILL
    word = word_of(tmp_path)
    assert word.phase == phase
    assert word.dies_t_s is not None
    assert word.first_t_s <= word.t_s <= word.dies_t_s


def test_an_order_that_cannot_be_carried_out_ends_it_with_an_error(tmp_path: Path) -> None:
    with victim(tmp_path, steps=10**6) as process:
        order(tmp_path, b"die vote soon\n")
        output, _ = patience.communicate(process)
    assert process.returncode == os.EX_SOFTWARE
    assert b"Traceback" in output
