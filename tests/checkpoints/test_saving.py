"""A save runs in the background of the training, and no fault of it stops the training."""

import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxft._checkpoints import Checkpoints, _checkpoints, _folder, _orbax
from tests import patience
from tests.shortages import no_thread_at_first

from .states import PATIENCE_S, names, of_optax, restored, same, save, saved


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every save waits, just before it writes, until this is set."""
    gate, write = threading.Event(), _orbax.write

    def waiting(*arguments: object) -> None:
        assert gate.wait(PATIENCE_S)
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(_orbax, "write", waiting)
    yield gate
    gate.set()


def test_old_ones_are_deleted_only_once_the_new_one_is_complete(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.set()
    checkpoints = saved(tmp_path, 5, keep=1)
    before: list[list[int]] = []
    retire = _folder.retire

    def watched(folder: Path, step: int, work: Path) -> None:
        before.append(_folder.steps(folder))
        retire(folder, step, work)

    monkeypatch.setattr(_folder, "retire", watched)
    save(checkpoints, 10)
    assert before == [[5, 10]]
    assert checkpoints.steps() == [10]


def test_a_moment_without_a_thread_costs_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = no_thread_at_first(monkeypatch)
    checkpoints = Checkpoints(tmp_path, every_steps=5)
    save(checkpoints, 5)
    assert checkpoints.steps() == [5]
    assert {"jaxft-checkpoint", "jaxft-checkpoint-size"} <= refused


def test_a_save_is_left_out_while_one_runs(
    tmp_path: Path, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, of_optax(5), job="docs", history=7)
    checkpoints.save(10, of_optax(10), job="docs", history=7)
    assert "Skipped the checkpoint of step 10: the checkpoint of step 5 is still being written" in caplog.text
    checkpoints.finish(0.01)
    assert (
        "step 5 is not complete, and nothing of it was written for 0 s: if this process ends" in caplog.text
    )
    assert checkpoints.steps() == []
    caplog.set_level(logging.INFO, "jaxft")
    gate.set()
    checkpoints.finish(PATIENCE_S)
    checkpoints.finish(PATIENCE_S)
    assert checkpoints.steps() == [5]
    assert f"saved step 5 in {tmp_path}" in caplog.text
    save(checkpoints, 15)
    assert checkpoints.steps() == [5, 15]


def assert_saved_without_a_warning(folder: Path, timeout_s: float, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(5, of_optax(), job="docs", history=0)
    checkpoints.finish(timeout_s)
    assert caplog.messages == []
    assert checkpoints.steps() == [5]


def test_a_save_is_waited_for_as_long_as_its_bytes_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A large state takes longer to write than any failure may take."""
    monkeypatch.setattr("jaxft._checkpoints._sharing.LOOK_S", 0.01)
    timeout_s, write = patience.stretched(0.5), _orbax.write

    def write_bit_by_bit(path: Path, *arguments: object) -> None:
        with (path.parent / "bits").open("wb", buffering=0) as file:
            for _ in range(16):
                file.write(bytes(64))
                time.sleep(timeout_s / 8)
        write(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(_orbax, "write", write_bit_by_bit)
    assert_saved_without_a_warning(tmp_path, timeout_s, caplog)


def test_a_step_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    again = Checkpoints(tmp_path)
    save(again, 5, of_optax(6))
    found = restored(again)
    assert found.history == 7
    assert same(found.state, of_optax(5))


def test_a_folder_of_two_jobs_is_an_error_of_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both began when it was empty. The second would find none that is its own when it needs one."""
    saved(tmp_path, 5)
    other = Checkpoints(tmp_path)
    other.save(5, of_optax(6), job="other", history=0)
    other.finish(PATIENCE_S)
    (text,) = (record.message for record in caplog.records if record.name == "jaxft")
    assert text.startswith("The checkpoint of step 5 was not written")
    assert f"'{tmp_path / '5'}' is a checkpoint of the job 'docs', and this is the job 'other'" in text


def test_two_writers_at_once(tmp_path: Path, gate: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    one, two = Checkpoints(tmp_path), Checkpoints(tmp_path)
    one.save(5, of_optax(5), job="docs", history=1)
    two.save(5, of_optax(5), job="docs", history=2)
    gate.set()
    one.finish(PATIENCE_S)
    two.finish(PATIENCE_S)
    assert not [record for record in caplog.records if record.name == "jaxft"]
    assert names(tmp_path) == {"5"}
    found = restored(one)
    assert found.history in (1, 2)
    assert same(found.state, of_optax(5))


def test_what_a_dead_writer_left_is_deleted_and_a_living_one_is_let_be(tmp_path: Path) -> None:
    dead, living = tmp_path / ".unfinished-dead", tmp_path / ".unfinished-living"
    for work in (dead, living):
        (work / "5.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
        (work / ".lock").touch()
    with (living / ".lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        saved(tmp_path, 5)
        assert names(tmp_path) == {"5", ".unfinished-living"}
        assert (living / "5.orbax-checkpoint-tmp" / "state").is_dir()
    saved(tmp_path, 10)
    assert names(tmp_path) == {"5", "10"}


def test_a_living_writer_is_let_be_where_only_files_have_locks_between_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, which locks only files that are open for writing, and keeps the folder of an open file."""
    flock, rmtree = fcntl.flock, shutil.rmtree

    def of_nfs(descriptor: int, operation: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            return  # another host would not know of it
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, operation)

    def keeping_open_ones(path: Path, **_: object) -> None:
        for entry in path.iterdir():
            if entry.name == ".lock":
                entry.unlink()
            else:
                rmtree(entry)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    monkeypatch.setattr(shutil, "rmtree", keeping_open_ones)
    with _folder.unfinished(tmp_path) as work:
        (work / "5").mkdir()
        _folder.sweep(tmp_path)
        saved(tmp_path, 10)
        assert (work / "5").is_dir()
    assert names(tmp_path) == {"10"}


def test_a_writer_makes_another_folder_if_a_sweeper_takes_its_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment before it has the lock."""
    opened, swept = _folder._opened_lock, list[Path]()

    def late(work: Path) -> int:
        if not swept:
            swept.append(work)
            _folder.sweep(tmp_path)
        elif len(swept) == 1 and work != swept[0]:
            swept.append(work)
            descriptor = opened(work)
            _folder.sweep(tmp_path)
            return descriptor
        return opened(work)

    monkeypatch.setattr(_folder, "_opened_lock", late)
    with _folder.unfinished(tmp_path) as work:
        assert len(swept) == 2
        assert work not in swept
        assert names(tmp_path) == {work.name}


def test_a_state_that_cannot_be_copied_is_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = RuntimeError("RESOURCE_EXHAUSTED")

    def failing(_state: object) -> None:
        raise error

    monkeypatch.setattr(_checkpoints, "HostCopy", failing)
    checkpoints = saved(tmp_path / "saved", 5)
    (record,) = [record for record in caplog.records if record.name == "jaxft"]
    assert record.levelname == "ERROR"
    text = (
        f"The checkpoint of step 5 was not written to {tmp_path / 'saved'}: {type(error).__name__}: {error}"
    )
    assert record.getMessage().startswith(text)
    assert "Training continues" in record.getMessage()
    assert not names(tmp_path / "saved")
    monkeypatch.undo()
    save(checkpoints, 10)
    assert checkpoints.steps() == [10]
