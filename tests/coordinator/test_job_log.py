"""What one job can write to the coordinator's log."""

import logging

import pytest
from jaxft_coordinator.shell import limits
from jaxft_coordinator.shell._server import Server
from jaxft_protocol.coordinator.job import Log, Options


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Clock:
    monkeypatch.setattr(limits, "BURST", 3)
    monkeypatch.setattr(limits, "LINES_PER_S", 2.0)
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    caplog.set_level(logging.INFO, "jaxft_coordinator")
    return clock


def flood(server: Server, job: str, lines: int) -> None:
    server.do([Log(f"[{job}] line {number}") for number in range(lines)])


def test_a_job_that_logs_without_end_is_bounded_and_the_others_are_not(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server("localhost:0", Options())
    flood(server, "loud", 10)
    flood(server, "calm", 2)
    assert caplog.messages == [*(f"[loud] line {n}" for n in range(3)), "[calm] line 0", "[calm] line 1"]
    caplog.clear()
    clock.now_s += 1.0
    flood(server, "loud", 10)
    assert caplog.messages == [
        "[loud] line 0 (7 lines of this job before this one were dropped)",
        "[loud] line 1",
    ]
    caplog.clear()
    clock.now_s += 3600.0
    flood(server, "loud", 10)
    assert len(caplog.messages) == 3
    assert "(8 lines" in caplog.messages[0]


@pytest.mark.usefixtures("clock")
def test_what_is_kept_of_jobs_is_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_JOBS", 2)
    server = Server("localhost:0", Options())
    for job in ("a", "b", "c"):
        flood(server, job, 3)
    caplog.clear()
    flood(server, "c", 1)
    assert caplog.messages == []
    flood(server, "a", 1)  # was forgotten
    assert caplog.messages == ["[a] line 0"]
