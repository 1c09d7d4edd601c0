"""The mesh ladder of a group: on how many of its devices it starts. Reads no clock.

A group whose devices do not all come back within some time starts again on the next rung, with fewer of them, and
climbs when they are back. Its program makes its mesh of the devices that JAX shows it, so it is recompiled.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field


@dataclass
class Ladder:
    """The rungs of one group, and since when devices are missing.

    Args:
        devices: all devices of the group.
        rungs: numbers of devices, falling; the first is that of `devices`.
        patience_s: how long the group waits for missing devices before it starts on a lower rung, and how long
            devices must have been back before it climbs.
    """

    devices: tuple[int, ...]
    rungs: tuple[int, ...]
    patience_s: float
    _missing_s: float | None = field(default=None, init=False)
    _more_s: float | None = field(default=None, init=False)

    def look(self, working: Set[int], now_s: float, *, used: Sequence[int] = ()) -> None:
        """Note which of the machine's devices work now. `used`: those that the group runs on."""
        count = len(self._able(working))
        if count == len(self.devices):
            self._missing_s = None
        elif self._missing_s is None:
            self._missing_s = now_s
        if self._rung(count) <= len(used):
            self._more_s = None
        elif self._more_s is None:
            self._more_s = now_s

    def start(self, working: Set[int], now_s: float) -> tuple[int, ...]:
        """Return the devices to start on now; none: wait for more."""
        able = self._able(working)
        if self._missing_s is not None and now_s - self._missing_s < self.patience_s:
            return ()
        return able[: self._rung(len(able))]

    def missing(self, working: Set[int]) -> tuple[int, ...]:
        """Return the group's devices that do not work."""
        return tuple(device for device in self.devices if device not in working)

    def may_climb(self, now_s: float) -> bool:
        """Whether enough devices for a higher rung have worked for long enough."""
        return self._more_s is not None and now_s - self._more_s >= self.patience_s

    def _able(self, working: Set[int]) -> tuple[int, ...]:
        return tuple(device for device in self.devices if device in working)

    def _rung(self, count: int) -> int:
        return next((rung for rung in self.rungs if rung <= count), 0)
