"""The mesh ladder of a group: on how many of its devices it starts. Pure.

A group whose devices do not all come back within some time starts again on the next rung, with fewer of them, and
climbs when they are back. Its program makes its mesh of the devices that JAX shows it, so it is recompiled.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Ladder:
    """The rungs of one group, and since when devices are missing.

    Attributes:
        devices: all devices of the group.
        rungs: numbers of devices, falling; the first is the number of `devices`.
        patience_s: how long the group waits for missing devices before it starts on a lower rung, and how long
            devices must have been back before it climbs.
        missing_since_s: since when a device does not work.
        more_since_s: since when enough devices for a higher rung work.
    """

    devices: tuple[str, ...]
    rungs: tuple[int, ...]
    patience_s: float
    missing_since_s: float | None = None
    more_since_s: float | None = None

    def look(self, working: Set[str], now_s: float, *, used: Sequence[str] = ()) -> "Ladder":
        """Note which of the machine's devices work now. `used`: the group runs on these."""
        count = len(self._able(working))
        missing = count < len(self.devices)
        more = self._rung(count) > len(used)
        return replace(
            self,
            missing_since_s=_since(self.missing_since_s, now_s) if missing else None,
            more_since_s=_since(self.more_since_s, now_s) if more else None,
        )

    def start(self, working: Set[str], now_s: float) -> tuple[str, ...]:
        """Return the devices to start on now; none: wait for more."""
        able = self._able(working)
        if self.missing_since_s is not None and now_s - self.missing_since_s < self.patience_s:
            return ()
        return able[: self._rung(len(able))]

    def missing(self, working: Set[str]) -> tuple[str, ...]:
        """Return the group's devices that do not work."""
        return tuple(device for device in self.devices if device not in working)

    def may_climb(self, now_s: float) -> bool:
        """Whether enough devices for a higher rung have worked for long enough."""
        return self.more_since_s is not None and now_s - self.more_since_s >= self.patience_s

    def _able(self, working: Set[str]) -> tuple[str, ...]:
        return tuple(device for device in self.devices if device in working)

    def _rung(self, count: int) -> int:
        return next((rung for rung in self.rungs if rung <= count), 0)


def _since(before_s: float | None, now_s: float) -> float:
    return now_s if before_s is None else before_s
