"""Compares this machine's clock with the coordinator's, over its HTTP port."""

import time
from dataclasses import dataclass
from pathlib import Path

from jaxft_launch.client._port import PortError, ask

# The shortest of some exchanges says most. A busy machine stretches single ones.
_MOST_EXCHANGES = 5
_GOOD_ENOUGH_S = 0.01
# All exchanges together, so that a slow coordinator does not hold up a reading of `jaxft launch --health`.
_BUDGET_S = 3.0


@dataclass(frozen=True, slots=True)
class ClockDifference:
    """How this machine's clock and the coordinator's differ.

    The coordinator reads its clock at an unknown moment between a request and its answer, so the true difference lies
    within `uncertainty_s` of `ahead_s`: half of the round trip.

    Attributes:
        ahead_s: how much this machine's clock is ahead; negative if it is behind.
        uncertainty_s: how much the true difference may differ from that.
    """

    ahead_s: float
    uncertainty_s: float

    @property
    def least_s(self) -> float:
        """The least difference that the measurement allows, without its sign."""
        return max(0.0, abs(self.ahead_s) - self.uncertainty_s)

    @property
    def most_s(self) -> float:
        """The greatest difference that the measurement allows, without its sign."""
        return abs(self.ahead_s) + self.uncertainty_s

    def __str__(self) -> str:
        side = "ahead of" if self.ahead_s > 0 else "behind"
        return f"{abs(self.ahead_s):.3f} s {side} the coordinator's (give or take {self.uncertainty_s:.3f} s)"


def clock_difference(url: str, *, ca: Path | None = None) -> ClockDifference:
    """Measure how the two clocks differ.

    Args:
        url: the address of the coordinator's HTTP port.
        ca: the authority of its certificate, as for `ask`.

    Raises:
        PortError: the coordinator gives no answer, or does not tell its time.
    """
    began_s = time.monotonic()
    found: list[ClockDifference] = []
    while len(found) < _MOST_EXCHANGES and time.monotonic() - began_s < _BUDGET_S:
        found.append(_exchange(url, ca))
        if found[-1].uncertainty_s <= _GOOD_ENOUGH_S:
            break
    return min(found, key=lambda one: one.uncertainty_s)


def _exchange(url: str, ca: Path | None) -> ClockDifference:
    # A clock that is set back meanwhile must not make the round trip negative.
    before_s, asked_s = time.time(), time.monotonic()
    told = ask(url, "coordinator", ca=ca)
    half_s = (time.monotonic() - asked_s) / 2
    if not isinstance(its_s := told.get("time"), int | float):
        raise PortError(
            f"the coordinator at {url}, of version {told.get('version')}, does not tell its time. Install "
            "the version of jaxft-coordinator that belongs to this jaxft."
        )
    return ClockDifference(before_s + half_s - its_s, half_s)
