"""A disk of the checkpoints that does not answer is named by the group whose training thread waits for it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxft._checkpoints import Checkpoints, _beginning, _folder
from jaxft._checkpoints._beginning import Beginning
from tests import patience

BEGUN = Beginning("job", 5, 0, 7)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_folder, "SLOW_WAIT_S", 0.02)


@pytest.mark.parametrize(
    ("held", "call", "what"),
    [
        ("sync", lambda folder: _beginning.write(folder, BEGUN), "note with which state the job begins"),
        ("steps", lambda folder: _beginning.read(folder), "say with which state the job began"),
        ("steps", lambda folder: Checkpoints(folder).steps(), "list them"),
    ],
    ids=["a note", "a note to be read", "a list"],
)
def test_a_call_of_the_disk_that_does_not_return_is_said_once(
    held: str,
    call: Callable[[Path], object],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, line = getattr(_folder, held), f"{str(tmp_path)!r}, to {what} after"

    def held_up(*arguments: Any) -> Any:
        patience.until(lambda: line in caplog.text, "the line", context=lambda: caplog.text)
        return real(*arguments)

    monkeypatch.setattr(_folder, held, held_up)
    call(tmp_path)
    assert caplog.text.count("Still waiting for the disk") == 1


def test_a_disk_that_answers_is_not_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_folder, "SLOW_WAIT_S", 3600.0)
    before = threading.active_count()
    _beginning.write(tmp_path, BEGUN)
    assert _beginning.read(tmp_path) == BEGUN
    assert Checkpoints(tmp_path).steps() == []
    assert not caplog.records
    patience.until(lambda: threading.active_count() <= before, "the timers to end")
