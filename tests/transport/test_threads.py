"""A team of threads: no thread works on once `end` has returned, whatever interrupts the waiting thread."""

import signal
import threading
from collections.abc import Iterator

import pytest

from jaxft._base import _room
from jaxft._transport._threads import Team
from tests import patience
from tests.interrupts import interrupt, interrupted


def test_all_have_ended_after_a_wait() -> None:
    done: list[int] = []
    team = Team()
    for number in range(3):
        team.start(f"jaxft-{number}", lambda number=number: done.append(number))
    team.wait()
    assert sorted(done) == [0, 1, 2]


@pytest.fixture
def taken() -> Iterator[list[int]]:
    """The signals of Ctrl-C that the main thread has taken."""
    found: list[int] = []

    def take(number: int, _: object) -> None:
        found.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, take)
    yield found
    signal.signal(signal.SIGINT, before)


def ended_by_ctrl_c(team: Team, interrupter: threading.Thread) -> None:
    try:
        interrupter.start()
        team.wait()
    except BaseException:
        team.end()
        raise


@pytest.mark.parametrize("more", [0, 1, 3])
def test_ctrl_c_once_or_more_often_leaves_no_thread_at_work(more: int, taken: list[int]) -> None:
    may_end, ended = threading.Event(), []
    team = Team()

    def work() -> None:
        patience.until(may_end.is_set, "all signals to be sent")
        ended.append(1)

    def interrupts() -> None:
        interrupt()
        patience.until(lambda: team._closed, "the team to be ended")
        for _ in range(more):
            interrupt()
        may_end.set()

    team.start("jaxft-work", work)
    interrupter = threading.Thread(target=interrupts)
    with interrupted():
        ended_by_ctrl_c(team, interrupter)
    assert ended
    assert len(taken) == (2 if more else 1), "the others are taken once, and late"
    patience.join(interrupter)


def cannot_start(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_start_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team()
    with monkeypatch.context() as patch:
        patch.setattr(_room, "TIMEOUT_S", 0.0)
        patch.setattr(threading.Thread, "start", cannot_start)
        with pytest.raises(RuntimeError):
            team.start("jaxft-work", lambda: None)
    team.end()


def test_a_thread_that_begins_after_the_end_does_nothing() -> None:
    done: list[int] = []
    team = Team()
    team.end()
    team.start("jaxft-late", lambda: done.append(1))
    team.wait()
    assert not done
