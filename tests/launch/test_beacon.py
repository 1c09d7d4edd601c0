"""The signs of life that a real process gives its supervisor."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxft._supervised._beacon import Beacon
from jaxft._supervised._phase_file import Word, read_word
from tests import patience

PROGRAM = Path(__file__).with_name("beacon_program.py")
pytestmark = pytest.mark.processes


@contextlib.contextmanager
def program(folder: Path, *words: str, file: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *words],
            stdout=log,
            stderr=log,
            env={**os.environ, "JAXFT_PHASE_FILE": str(file or folder / "phase")},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def log(folder: Path) -> str:
    return (folder / "log").read_text()


def until_phase(folder: Path, phase: str) -> Word:
    def in_phase() -> Word | None:
        word = read_word(folder / "phase")
        return word if word is not None and word.phase == phase else None

    found = patience.until(in_phase, f"phase {phase}", context=lambda: log(folder))
    assert found is not None
    return found


def test_it_tells_phases_and_keeps_its_file_young(tmp_path: Path) -> None:
    with program(tmp_path, "hang"):
        word = until_phase(tmp_path, "compute")
        assert (word.step, word.members, word.first_t_s <= word.t_s) == (0, 0, True)
        before = (tmp_path / "phase").stat().st_mtime
        patience.until(lambda: (tmp_path / "phase").stat().st_mtime > before, "a touch")


def test_what_it_healed_to_is_not_what_it_has_committed(tmp_path: Path) -> None:
    with program(tmp_path, "heals"):
        word = until_phase(tmp_path, "vote")
    assert (word.step, word.committed) == (8, 0)


def test_it_tells_that_its_main_thread_has_ended(tmp_path: Path) -> None:
    """Python waits for the other thread forever, with no line and no exit status."""
    with program(tmp_path, "over"):
        until_phase(tmp_path, "end")


def test_it_tells_that_it_waits_in_vain_for_as_long_as_it_does(tmp_path: Path) -> None:
    with program(tmp_path, "in-vain"):
        until_phase(tmp_path, "stranded")
        (tmp_path / "held").touch()
        until_phase(tmp_path, "wait")


def test_a_group_that_ends_without_a_state_keeps_its_last_word(tmp_path: Path) -> None:
    with program(tmp_path, "stranded"):
        until_phase(tmp_path, "stranded")
        before = (tmp_path / "phase").stat().st_mtime
        patience.until(lambda: (tmp_path / "phase").stat().st_mtime > before + 2.0, "two touches")
        until_phase(tmp_path, "stranded")


@pytest.mark.parametrize("stderr", ["", "text"])
def test_on_sigusr2_it_says_where_it_stands(tmp_path: Path, stderr: str) -> None:
    """Whatever the program has put in the place of sys.stderr."""
    with program(tmp_path, "hang", stderr) as process:
        until_phase(tmp_path, "compute")

        def asked() -> bool:
            """Asked again, because it may have written the phase and not have begun with it."""
            process.send_signal(signal.SIGUSR2)
            return "in forever" in log(tmp_path)

        patience.until(asked, "its stack")
        assert process.poll() is None


def test_a_program_that_joins_as_another_group_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JAXFT_COORDINATOR", "localhost:1")
    monkeypatch.setenv("JAXFT_GROUP", "group-0")
    Beacon.joins("localhost:1", "group-0")
    assert caplog.messages == []
    for joined in (("localhost:2", "group-0"), ("localhost:1", "mine")):
        Beacon.joins(*joined)
        assert f"but it joins {joined[0]} as {joined[1]!r}." in caplog.messages.pop()
        caplog.clear()


@pytest.mark.parametrize(
    ("what", "file", "why"),
    [
        ("train", "/dev/full", ""),  # who may not touch that gets another error first
        ("broken", "phase", "Bad file descriptor"),
    ],
)
def test_a_beacon_that_cannot_write_says_so_once_and_training_goes_on(
    tmp_path: Path, what: str, file: str, why: str
) -> None:
    with program(tmp_path, what, file=tmp_path / file) as process:
        patience.until(
            lambda: "took step 7" in log(tmp_path) or process.poll() is not None,
            "steps",
            context=lambda: log(tmp_path),
        )
        assert process.poll() is None, log(tmp_path)
    (line,) = [each for each in log(tmp_path).splitlines() if "cannot write to" in each]
    assert why in line
    assert "Traceback" not in log(tmp_path)
