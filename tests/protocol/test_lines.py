"""Files of lines: a line is written whole or not at all, and no thread waits for the disk."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from jaxft_protocol.host import lines
from jaxft_protocol.host.lines import MAX_WAITING, MENTION_EVERY_S, LineFile

from tests import patience

LOG = logging.getLogger("a test")
# The kernel writes as much as fits, and refuses the rest, as on a full disk.
SCRIPT = """
import resource, sys
from pathlib import Path
from jaxft_protocol.host.lines import append

path = Path(sys.argv[1])
append(path, "one\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (6, resource.RLIM_INFINITY))
try:
    append(path, "two\\nthree\\n")
except OSError:
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, resource.RLIM_INFINITY))
    append(path, "four\\n")
"""


def broken(path: Path) -> LineFile:
    """A file that cannot be written any more, as on a full disk."""
    file = LineFile(path, LOG)
    path.unlink()
    path.mkdir()
    return file


def lose(file: LineFile, lines: int) -> None:
    """Each in its own write."""
    for _ in range(lines):
        before = file.lost
        file.put("lost")
        patience.until(lambda before=before: file.lost > before, "the loss")


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    patience.run([sys.executable, "-c", SCRIPT, str(path)], check=True, stderr=subprocess.PIPE, text=True)
    assert path.read_text() == "one\nfour\n"


def test_lines_are_appended_in_order_and_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    for start in (0, 100):
        file = LineFile(path, LOG)
        for number in range(start, start + 100):
            file.put(str(number))
        file.close()
    assert path.read_text().split() == [str(number) for number in range(200)]
    assert not caplog.messages


def test_a_file_that_is_moved_away_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = LineFile(path, LOG)
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
    file = LineFile(Path("events.jsonl"), LOG)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    file.put("after")
    file.close()
    assert (tmp_path / "events.jsonl").read_text() == "after\n"


def test_a_disk_that_fails_costs_lines_that_are_counted_and_one_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    file = broken(path)
    lose(file, 3)
    path.rmdir()
    file.put("kept")
    file.close()
    assert file.take_lost() == 3
    assert file.take_lost() == 0
    assert path.read_text() == "kept\n"
    first, last = caplog.messages
    assert first.startswith(f"1 events so far could not be written to {path}: ")
    assert first.endswith("Training is not affected")
    assert last == f"3 events in all could not be written to {path}"


def test_a_loss_is_said_again_after_a_minute_with_its_own_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(lines.time, "monotonic", lambda: now_s[0])
    path = tmp_path / "events.jsonl"
    file = broken(path)
    file.put("lost")
    file._write()
    file.put("lost")
    file._write()
    path.rmdir()
    now_s[0] += MENTION_EVERY_S
    file._write()
    first, second = caplog.messages
    assert second == first.replace("1 events", "2 events")
    assert "directory" in first
    file.close()


def test_a_slow_disk_costs_the_oldest_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "WRITE_EVERY_S", patience.FAR_S)
    file = LineFile(tmp_path / "events.jsonl", LOG)
    for number in range(MAX_WAITING + 5):
        file.put(str(number))
    assert file.take_lost() == 5
    file.close()
    assert (tmp_path / "events.jsonl").read_text().split()[0] == "5"
    assert "the disk was too slow for them" in caplog.messages[0]
