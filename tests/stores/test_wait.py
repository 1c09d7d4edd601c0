"""The lines in the log about a wait for the store: reason, length and number."""

import logging
import re
from types import SimpleNamespace

import pytest
from jaxft_coordinator.stores import _store


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(_store, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    caplog.set_level(logging.INFO)
    return clock


def logged_s(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The seconds in the lines of the log."""
    return [int(seconds) for seconds in re.findall(r"\(for (\d+) s\)", caplog.text)]


@pytest.mark.parametrize(
    ("at_once", "expected"), [(True, [0, 5, 10, 20, 40, 80]), (False, [5, 10, 20, 40, 80])]
)
def test_a_wait_is_said_again_each_time_it_has_doubled(
    *, at_once: bool, expected: list[int], clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A standby waits for as long as the leader lives."""
    wait = _store.Wait(at_once=at_once)
    for _ in range(100):
        wait.say("stands by: a leads")
        clock.now_s += 1.0
    assert logged_s(caplog) == expected


def test_the_time_of_a_wait_is_of_what_it_waits_for_now(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """An hour of standing by is no outage of etcd."""
    wait = _store.Wait(at_once=True)
    for _ in range(3600):
        wait.say("stands by: a leads")
        clock.now_s += 1.0
    caplog.clear()
    for second in range(20):
        wait.say("waiting for etcd", f"member {second % 3} does not answer")
        clock.now_s += 1.0
    assert logged_s(caplog) == [0, 5, 10]
    assert "waiting for etcd: member 2 does not answer (for 5 s)" in caplog.text
