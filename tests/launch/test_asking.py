"""The commands of the user for devices and health."""

import shlex
import sys
import time
from pathlib import Path

import pytest

from jaxft_launch.supervise import _asking
from jaxft_launch.supervise._asking import UNKNOWN, Answer, Asking
from tests import patience
from tests.launch.launches import is_alive


def answer(asking: Asking) -> Answer:
    try:
        return patience.until(lambda: asking.poll(time.monotonic()), "an answer")
    finally:
        asking.end()


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("printf '0,1\\n'", 0, "0,1"),
        ("sh -c 'echo GPU 3 >&2; exit 2'", 2, "GPU 3"),
        ("no-such-program", UNKNOWN, "no-such-program is no program that can be run"),
    ],
)
def test_an_answer_is_a_status_and_a_text(command: str, status: int, text: str) -> None:
    found = answer(Asking(shlex.split(command), every_s=0.0))
    assert (found.status, found.text) == (status, text)


def test_a_command_is_asked_when_it_is_due_or_in_a_hurry() -> None:
    asking = Asking(["true"], every_s=1000.0)
    first = answer(asking)
    assert asking.poll(first.asked_s + 999.0) is None
    asking.hurry(5.0)
    assert asking.poll(first.asked_s + 4.0) is None
    assert answer(asking).asked_s >= first.asked_s


def test_a_command_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_asking, "TIMEOUT_S", 0.5)
    file = tmp_path / "pid"
    command = 'sleep 1000 & echo $! > "$1.new"; mv "$1.new" "$1"; wait'
    asking = Asking(["sh", "-c", command, "sh", str(file)], every_s=0.0)
    asking.poll(0.0)
    patience.until(file.exists, "its child")
    found = asking.poll(1.0)
    assert found == Answer(UNKNOWN, "sh did not end within 0.5 s, and was killed", 0.0)
    pid = int(file.read_text())
    patience.until(lambda: not is_alive(pid), "the child to end")


def test_a_command_does_not_get_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXFT_TOKEN", "0" * 64)
    code = "import os; print('JAXFT_TOKEN' in os.environ)"
    assert answer(Asking([sys.executable, "-c", code], every_s=0.0)).text == "False"
