"""Which of several processes saves the last state: one, and another if that one gives up or dies."""

import fcntl
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxft._checkpoints._last import LastTurn
from tests import patience


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def turn(folder: Path) -> LastTurn:
    return LastTurn(folder, 7, otherwise=False)


def test_the_first_saves_and_the_others_wait_until_it_is_saved(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    folder = tmp_path / "new"
    first = turn(folder)
    assert first.wait(patience.FAR_S)
    others = [pool.submit(turn(folder).wait, patience.FAR_S) for _ in range(2)]
    (folder / "7").mkdir()
    assert [other.result() for other in others] == [False, False], "although the first still holds its lock"
    first.close()
    assert not turn(folder).wait(patience.FAR_S)


def test_another_saves_once_the_first_has_ended_without(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    first, second, third = turn(tmp_path), turn(tmp_path), turn(tmp_path)
    assert first.wait(patience.FAR_S)
    others = {pool.submit(one.wait, patience.FAR_S): one for one in (second, third)}
    first.close()
    patience.until(lambda: any(other.done() for other in others), "another to have its turn")
    (saves,) = (other for other in others if other.done())
    assert saves.result()
    others.pop(saves).close()
    (last,) = others
    assert last.result()


def test_one_that_saves_nothing_is_not_waited_for_without_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = turn(tmp_path), turn(tmp_path)
    assert first.wait(patience.FAR_S)
    with caplog.at_level(logging.WARNING, "jaxft"):
        assert not second.wait(0.01)
    (said,) = caplog.messages
    assert said.startswith(
        "Another group saves the last state, of step 7, and nothing of it was written for 0 s: ends"
    )
    first.close()
    assert turn(tmp_path).wait(patience.FAR_S), "the one that gave up took no lock"


@pytest.mark.parametrize("writer", [True, False])
def test_without_locks_the_writer_saves(
    writer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    assert LastTurn(tmp_path, 7, otherwise=writer).wait(patience.FAR_S) == writer
