"""Readings that fail or hang, in the thread that takes them."""

import threading
from unittest.mock import Mock

import pytest

from jaxft_launch.check import _check
from jaxft_launch.check._check import Check
from jaxft_launch.check._readings import Level, Reading
from tests import patience
from tests.health.rules import command_rule


class Gated:
    """A source whose readings wait for `go`, or raise `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go = threading.Event()
        self.error = error
        self.reads = 0

    def read(self) -> Reading | None:
        self.reads += 1
        if self.error is not None:
            raise self.error
        self.go.wait(patience.FAR_S)
        return Reading(Level.OK, "fine")

    def end(self) -> None:
        self.go.set()


def test_a_reading_that_raises_is_unknown_and_the_next_one_is_taken() -> None:
    source = Gated(ValueError("broken"))
    check = Check(command_rule("true", interval_s=0.1), source)
    for _ in range(2):
        reading = patience.until(check.poll, "a reading")
        assert reading == Reading(Level.UNKNOWN, "the reading failed: ValueError: broken")
    assert source.reads == 2


def test_a_poll_does_not_wait_and_no_second_reading_begins_beside_the_first() -> None:
    source = Gated()
    check = Check(command_rule("true", interval_s=0.1, timeout_s=patience.FAR_S), source)
    for _ in range(100):
        assert check.poll() is None  # would hang if it waited
    patience.until(lambda: source.reads, "the reading to begin")
    began_s = patience.machine_s()
    patience.until(lambda: check.poll() or patience.machine_s() > began_s + 0.3, "some intervals")
    assert source.reads == 1
    source.go.set()
    assert patience.until(check.poll, "the reading") == Reading(Level.OK, "fine")


def test_a_reading_that_hangs_is_unknown_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_check, "GRACE_S", 0.0)
    source = Gated()
    check = Check(command_rule("true", interval_s=0.1, timeout_s=0.1), source)
    for _ in range(2):
        reading = patience.until(check.poll, "the report of a hang")
        assert reading.level is Level.UNKNOWN
        assert reading.text.startswith("a reading has not ended for")
    check.end()
    patience.until(lambda: check.poll() == Reading(Level.OK, "fine"), "the reading")
    assert source.reads == 1


def test_a_reading_for_which_there_is_no_thread_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's limit of processes counts threads, too. A launch must not end for it."""
    source = Gated(ValueError("broken"))
    check = Check(command_rule("true", interval_s=0.1), source)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        assert check.poll() == Reading(Level.UNKNOWN, "the reading cannot be started: can't start new thread")
        assert check.poll() is None  # until the next is due
    assert patience.until(check.poll, "the next reading").text.startswith("the reading failed")
