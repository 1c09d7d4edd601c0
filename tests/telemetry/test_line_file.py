"""The file of a group's events: nothing of it makes training wait or fail."""

import logging
from pathlib import Path

import pytest

from jaxft._telemetry import _line_file
from jaxft._telemetry._line_file import LineFile
from tests import patience
from tests.shortages import no_thread_at_first


def test_lines_are_appended_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "events.jsonl"
    for start in (0, 100):
        file = LineFile(path)
        for number in range(start, start + 100):
            file.put(str(number))
        file.close()
    assert path.read_text().split() == [str(number) for number in range(200)]


def test_a_moment_without_a_thread_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = no_thread_at_first(monkeypatch)
    file = LineFile(tmp_path / "events.jsonl")
    file.put("a line")
    file.close()
    assert (tmp_path / "events.jsonl").read_text() == "a line\n"
    assert "jaxft-events" in refused


def test_a_file_that_is_moved_away_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = LineFile(path)
    file.put("before")
    patience.until(lambda: path.read_text() == "before\n", "the first line")
    path.rename(tmp_path / "old")
    file.put("after")
    file.close()
    assert path.read_text() == "after\n"


def test_a_program_that_changes_its_folder_moves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = LineFile(Path("events.jsonl"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    file.put("after")
    file.close()
    assert (tmp_path / "events.jsonl").read_text() == "after\n"


def test_a_disk_that_fails_costs_lines_that_are_counted_and_one_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    file = LineFile(path)
    path.unlink()
    path.mkdir()
    lost = 0
    for _ in range(3):
        file.put("lost")
        patience.until(lambda: file._dropped, "a failed write")
        lost += file.take_dropped()
    path.rmdir()
    file.put("kept")
    file.close()
    assert lost == 3
    assert path.read_text() == "kept\n"
    [said] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert said.getMessage().startswith("1 events so far could not be written to")
    assert said.getMessage().endswith("Training is not affected")


def test_lines_that_were_lost_after_the_last_message_are_counted_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    file = LineFile(path)
    path.unlink()
    path.mkdir()
    for _ in range(3):
        file.put("lost")
        patience.until(file.take_dropped, "a failed write")
    file.close()
    assert caplog.messages[0].startswith("1 events so far could not be written to")
    assert caplog.messages[1:] == [f"3 events in all could not be written to {path}"]


def test_a_slow_disk_costs_the_oldest_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_line_file, "MAX_WAITING", 10)
    monkeypatch.setattr(_line_file, "WRITE_EVERY_S", patience.FAR_S)
    file = LineFile(tmp_path / "events.jsonl")
    for number in range(25):
        file.put(str(number))
    assert file.take_dropped() == 15
    file.close()
    assert (tmp_path / "events.jsonl").read_text().split() == [str(number) for number in range(15, 25)]
