"""Clocks that are not set: each process's runs from any start, a little too fast or too slow."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .world import World


class Clock:
    def __init__(self, world: "World") -> None:
        drift = world.setting.drift
        self._world = world
        self._offset_s = world.between(0.0, 1000.0) if drift else 0.0
        self._rate = 1.0 + world.between(-drift, drift) if drift else 1.0

    @property
    def now_s(self) -> float:
        """Its time."""
        return self._offset_s + self._rate * self._world.now_s

    def real(self, seconds: float) -> float:
        """How long it really takes until it has gone on by `seconds`."""
        return seconds / self._rate
