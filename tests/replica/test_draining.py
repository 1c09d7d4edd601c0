"""SIGTERM asks for a drain, if the program has no handler for it."""

import signal
import threading
from collections.abc import Iterator

import pytest

from jaxft._replica._draining import Drained, SigtermDrains


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_each_sigterm_drains_and_none_ends_the_process() -> None:
    asked: list[None] = []
    SigtermDrains(lambda: asked.append(None))
    for _ in range(2):  # under Slurm one comes from Slurm and one from the launcher
        signal.raise_signal(signal.SIGTERM)
    assert len(asked) == 2


def test_the_default_is_back_after_the_job() -> None:
    handler = SigtermDrains(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    handler.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_program_is_kept() -> None:
    def own(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGTERM, own)
    SigtermDrains(lambda: None).close()
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    handler = SigtermDrains(lambda: None)
    signal.signal(signal.SIGTERM, own)
    handler.close()
    assert signal.getsignal(signal.SIGTERM) is own


def test_outside_the_main_thread_it_stays_as_it_is() -> None:
    made: list[SigtermDrains] = []
    thread = threading.Thread(target=lambda: made.append(SigtermDrains(lambda: None)))
    thread.start()
    thread.join()
    made[0].close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_drained_group_ends_with_status_0_and_is_not_an_exception_of_the_step() -> None:
    assert Drained("group-0", 3).code == 0
    assert not isinstance(Drained("group-0", 3), Exception)
