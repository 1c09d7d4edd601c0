"""The difference to the coordinator's clock, over a real port and with slow exchanges."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from jaxft_coordinator.http import _views

from jaxft_launch.check._readings import Level
from jaxft_launch.check._rules import rule_of
from jaxft_launch.check._sources import Place, source_of
from jaxft_launch.client import _clock
from jaxft_launch.client._clock import ClockDifference, clock_difference
from jaxft_launch.client._port import PortError
from tests.coordinator.test_server import run
from tests.health.test_sources import PLACE
from tests.operate.test_http import serving


@pytest.mark.parametrize("ahead_s", [3600.0, 0.0, -3600.0])
def test_the_difference_to_a_coordinator(monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    other = SimpleNamespace(time=lambda: time.time() - ahead_s, monotonic=time.monotonic)
    monkeypatch.setattr(_views, "time", other)
    rule = rule_of({"name": "clock", "source": "clock", "action": "warn", "warning": 1, "critical": 1800})

    async def scenario() -> None:
        async with serving() as (_, _, _, web):
            found = await asyncio.to_thread(clock_difference, web.url)
            assert abs(found.ahead_s - ahead_s) <= found.uncertainty_s
            assert found.least_s <= abs(ahead_s) <= found.most_s
            place = Place(group="a", devices=(), environment={}, folder=PLACE.folder, http=web.url)
            reading = await asyncio.to_thread(source_of(rule, place).read)
            assert reading is not None
            assert reading.level is (Level.CRITICAL if ahead_s else Level.OK), reading
            assert reading.text.startswith("this machine's clock is ")

    run(scenario)


class Exchanges:
    """A coordinator whose clock is right, and whose answers take given times in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *lasts_s: float) -> None:
        self.now_s = 1000.0
        self.left = list(lasts_s)
        monkeypatch.setattr(_clock, "time", SimpleNamespace(time=self._now, monotonic=self._now))
        monkeypatch.setattr(_clock, "ask", self._ask)

    def _now(self) -> float:
        return self.now_s

    def _ask(self, url: str, path: str, *, ca: object) -> Any:
        its_s = self.now_s  # at once, so that all of the round trip is on the way back
        self.now_s += self.left.pop(0)
        return {"time": its_s}


def test_the_shortest_of_five_exchanges_counts_and_a_good_one_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Exchanges(monkeypatch, 0.5, 0.125, 0.25, 0.5, 0.5, 9.0)
    assert clock_difference("http://x") == ClockDifference(0.0625, 0.0625)
    assert slow.left == [9.0]
    good = Exchanges(monkeypatch, 0.5, 0.015625, 9.0)
    assert clock_difference("http://x").uncertainty_s == 0.0078125
    assert good.left == [9.0]


def test_a_coordinator_that_answers_slowly_is_not_taken_for_one_with_another_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Exchanges(monkeypatch, 8.0, 1.0)
    found = clock_difference("http://x")
    assert (found.least_s, found.most_s) == (0.0, 8.0)
    assert slow.left == [1.0]  # enough time was spent


def test_a_coordinator_that_does_not_tell_its_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_clock, "ask", lambda *_, **__: {"version": "0.0.9"})
    with pytest.raises(PortError, match=r"of version 0\.0\.9, does not tell its time\. Install the version"):
        clock_difference("http://x")
