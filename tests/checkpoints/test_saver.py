"""Which of several processes saves the last state: one, and another if that one gives up or dies."""

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxft import CannotRestore, Checkpoints
from jaxft._checkpoints import _checkpoints, _saver, _writer, _written
from tests import patience

from .states import PATIENCE_S, of_optax, saved

LAST = 7
EVERY_STEPS = 7


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def made(folder: Path) -> Checkpoints:
    return Checkpoints(folder, every_steps=EVERY_STEPS)


def saves_last(checkpoints: Checkpoints, step: int = LAST + 1, *, timeout_s: float = 0.0, **how: Any) -> bool:
    timeout_s = timeout_s or patience.FAR_S
    return checkpoints.saves_last(step, **{"job": "docs", "writer": False} | how, timeout_s=timeout_s)


def is_locked(file: Path) -> bool:
    if (descriptor := _saver.locked(file)) is None:
        return True
    os.close(descriptor)
    return False


def test_the_first_saves_and_the_others_wait_until_it_is_saved(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    folder = tmp_path / "new"
    first = made(folder)
    assert saves_last(first)
    others = [pool.submit(saves_last, made(folder)) for _ in range(2)]
    (folder / str(LAST + 1)).mkdir()
    assert [other.result() for other in others] == [False, False], "although the first still holds its lock"
    first.finish(PATIENCE_S)
    assert not saves_last(made(folder))


def test_another_saves_once_the_first_has_ended_without(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    first, second, third = made(tmp_path), made(tmp_path), made(tmp_path)
    assert saves_last(first)
    others = {pool.submit(saves_last, one): one for one in (second, third)}
    first.finish(PATIENCE_S)
    patience.until(lambda: any(other.done() for other in others), "another to have its turn")
    (saves,) = (other for other in others if other.done())
    assert saves.result()
    others.pop(saves).finish(PATIENCE_S)
    (last,) = others
    assert last.result()


def test_a_state_that_was_due_is_written_once(
    tmp_path: Path,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other groups come to their end while it is written, or before that has begun."""
    monkeypatch.setattr(_written, "_FIRST_MENTION_S", 0.01)
    monkeypatch.setattr(_written, "_JOIN_S", 0.01)
    caplog.set_level(logging.INFO, "jaxft")
    held = (tmp_path / "hold").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    real = _writer._orbax.write

    def write(*arguments: Any) -> None:
        with (tmp_path / "hold").open() as waits:
            fcntl.flock(waits, fcntl.LOCK_EX)
        real(*arguments)

    monkeypatch.setattr(_writer._orbax, "write", write)
    folder = tmp_path / "saved"
    said = f"for another group to save the last state, of step {LAST}: "
    monkeypatch.setattr(_checkpoints, "HEAD_START_S", patience.FAR_S)
    before = pool.submit(saves_last, made(folder), LAST)
    patience.until(lambda: said in caplog.text, "one to wait")
    writer = made(folder)
    writer.save(LAST, of_optax(LAST), job="docs", history=0)
    patience.until(lambda: is_locked(folder / _saver._NAME), "the writer to have the lock")
    monkeypatch.setattr(_checkpoints, "HEAD_START_S", 0.0)
    caplog.clear()
    during = pool.submit(saves_last, made(folder), LAST)
    patience.until(lambda: said in caplog.text, "the other to wait")
    assert not before.done()
    assert not during.done()
    held.close()
    assert (before.result(), during.result()) == (False, False)
    writer.finish(PATIENCE_S)
    assert not saves_last(writer, LAST, writer=True)
    assert [path.name for path in folder.iterdir()] == [str(LAST)]


def test_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, LAST)
    for file in (tmp_path / str(LAST)).glob("state/ocdbt.process_0/d/*"):
        file.write_bytes(b"")
    assert not saves_last(checkpoints, LAST), "it is not known to be damaged"
    checkpoints.finish(PATIENCE_S)
    with pytest.raises(CannotRestore, match=f"{LAST}"):
        checkpoints.restore(of_optax(), job="docs")
    assert saves_last(checkpoints, LAST)


@pytest.mark.parametrize("last", [True, False])
def test_a_last_state_that_is_not_saved_is_not_said_to_be_followed_by_another(
    last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*arguments: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(_writer._orbax, "write", failing)
    checkpoints = made(tmp_path)
    if last:
        assert saves_last(checkpoints)
    checkpoints.save(LAST + 1, of_optax(LAST + 1), job="docs", history=0)
    checkpoints.finish(PATIENCE_S)
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert ("It is the last state: unless another group saves it" in said) is last
    assert ("the next due step is saved" in said) is not last


@pytest.mark.parametrize("writer", [True, False])
def test_the_writer_says_that_another_job_is_in_its_folder(writer: bool, tmp_path: Path) -> None:
    """With the error of the save that it then tries."""
    saved(tmp_path, LAST)
    assert saves_last(made(tmp_path), LAST, job="another", writer=writer) == writer


def test_one_that_saves_nothing_is_not_waited_for_without_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = made(tmp_path), made(tmp_path)
    assert saves_last(first)
    with caplog.at_level(logging.WARNING, "jaxft"):
        assert not saves_last(second, timeout_s=0.01)
    (said,) = caplog.messages
    assert said.startswith(
        f"Another group saves the last state, of step {LAST + 1}, and nothing of it was written for 0 s: ends"
    )
    first.finish(PATIENCE_S)
    assert saves_last(made(tmp_path)), "the one that gave up took no lock"


@pytest.mark.parametrize("writer", [True, False])
def test_without_locks_the_writer_saves(
    writer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    assert saves_last(made(tmp_path), writer=writer) == writer


def test_a_lock_on_a_file_that_its_last_holder_has_deleted_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, descriptors = _saver.locked, list[int]()

    def overtaken(file: Path) -> int | None:
        """The first time, the holder deletes the file just before this process locks it."""
        descriptor = real(file)
        if not descriptors:
            file.unlink()
        descriptors.append(descriptor or 0)
        return descriptor

    monkeypatch.setattr(_saver, "locked", overtaken)
    lock = _saver.SaverLock(tmp_path, lambda: False)
    lock.begin()
    assert lock.wait(LAST, patience.FAR_S)
    monkeypatch.undo()
    assert is_locked(tmp_path / _saver._NAME)
    assert len(descriptors) == 2
    lock.close()
    assert not list(tmp_path.iterdir())


def test_one_that_is_closed_while_it_takes_the_lock_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taking, goes_on = _saver.locked, threading.Event(), threading.Event()

    def slowly(file: Path) -> int | None:
        descriptor = real(file)
        taking.set()
        goes_on.wait(PATIENCE_S)
        return descriptor

    monkeypatch.setattr(_saver, "locked", slowly)
    monkeypatch.setattr(_saver, "_END_S", PATIENCE_S)
    lock = _saver.SaverLock(tmp_path, lambda: False)
    lock.begin()
    assert taking.wait(PATIENCE_S)
    threading.Timer(0.05, goes_on.set).start()
    lock.close()
    assert not list(tmp_path.iterdir())
