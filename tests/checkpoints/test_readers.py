"""When all begin again at once a few read, whatever becomes of them."""

import errno
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from jaxft._checkpoints._readers import turn
from tests import patience

PATIENCE_S = patience.FAR_S
SPAWN = multiprocessing.get_context("spawn")


class Group(threading.Thread):
    """Takes part in its own thread; reads until the test says that it is done."""

    def __init__(self, folder: Path, readers: int = 2) -> None:
        super().__init__(daemon=True)
        self.folder, self.readers = folder, readers
        self.knows, self.done = threading.Event(), threading.Event()
        self.mine = False
        self.start()

    def run(self) -> None:
        with turn(self.folder, timeout_s=PATIENCE_S, readers=self.readers) as self.mine:
            self.knows.set()
            if self.mine:
                self.done.wait(PATIENCE_S)

    def reads(self) -> bool:
        assert self.knows.wait(PATIENCE_S), "no word"
        return self.mine


@pytest.fixture
def waiting(caplog: pytest.LogCaptureFixture) -> Callable[[int], None]:
    """Wait until so many groups have found no slot, and know the marks that are there."""
    caplog.set_level(logging.INFO, "jaxft")
    text = "Waiting for other groups that are reading a checkpoint"

    def until_they_wait(count: int) -> None:
        patience.until(lambda: caplog.text.count(text) == count, f"{count} groups to wait")

    return until_they_wait


def test_two_of_four_read_and_the_others_do_not(tmp_path: Path, waiting: Callable[[int], None]) -> None:
    readers = [Group(tmp_path), Group(tmp_path)]
    assert all(reader.reads() for reader in readers)
    others = [Group(tmp_path), Group(tmp_path)]
    waiting(2)
    assert not any(other.knows.wait(0.3) for other in others), "they wait while others read"
    readers[0].done.set()
    assert not any(other.reads() for other in others)
    readers[1].done.set()


def read_for_ever(folder: str, pipe: Connection) -> None:
    with turn(Path(folder), timeout_s=0, readers=1) as mine:
        pipe.send(mine)
        pipe.recv()


@pytest.mark.processes
def test_one_that_waits_reads_if_the_reader_dies(tmp_path: Path, waiting: Callable[[int], None]) -> None:
    ours, theirs = SPAWN.Pipe()
    reader = SPAWN.Process(target=read_for_ever, args=(str(tmp_path), theirs), daemon=True)
    reader.start()
    assert ours.poll(PATIENCE_S)
    assert ours.recv()
    other = Group(tmp_path, readers=1)
    waiting(1)
    assert not other.knows.wait(0.3)
    os.kill(reader.pid or 0, signal.SIGKILL)
    assert other.reads()
    other.done.set()
    reader.join(PATIENCE_S)


def test_one_that_waits_reads_when_it_has_waited_long_enough(tmp_path: Path) -> None:
    with turn(tmp_path, timeout_s=0) as first, turn(tmp_path, timeout_s=0) as second:
        with turn(tmp_path, timeout_s=0.2) as third:
            assert [first, second, third] == [True, True, True]


def test_marks_of_an_earlier_time_count_for_nothing(tmp_path: Path) -> None:
    for _ in range(3):
        with turn(tmp_path, timeout_s=0) as mine:
            assert mine
    with turn(tmp_path, timeout_s=0), turn(tmp_path, timeout_s=0), turn(tmp_path, timeout_s=0.2) as third:
        assert third


def test_a_reading_that_fails_leaves_no_mark(tmp_path: Path) -> None:
    waiting: list[Group] = []

    def read_what_is_damaged() -> None:
        with turn(tmp_path, timeout_s=0, readers=1):
            waiting.append(Group(tmp_path, readers=1))
            raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        read_what_is_damaged()
    assert waiting[0].reads()
    waiting[0].done.set()


def test_a_full_disk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with turn(tmp_path, timeout_s=PATIENCE_S, readers=1) as first:
        assert first
        other = Group(tmp_path, readers=1)
        monkeypatch.setattr(os, "pwrite", full)
    assert other.reads(), "the first could not say that it has"
    other.done.set()


def test_a_disk_that_may_not_be_written_to_is_read(tmp_path: Path) -> None:
    with turn(tmp_path / "no such folder", timeout_s=PATIENCE_S) as mine:
        assert mine
