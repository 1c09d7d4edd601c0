"""What a check finds, and when it counts. Pure functions and values."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How healthy a reading is, in the order of Nagios's exit statuses."""

    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"
    # The check itself has failed. It never leads to an action: a broken check must not end a healthy group.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reading:
    """What one check has found. `text` is for people."""

    level: Level
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From which values on a measurement is a warning, or critical.

    Attributes:
        warning: a limit, or None.
        critical: a limit, or None.
        high_is_bad: values above the limits are bad; otherwise values below them.
    """

    warning: float | None = None
    critical: float | None = None
    high_is_bad: bool

    def level_of(self, value: float) -> Level:
        """Return the level of a value. A value at a limit is beyond it."""
        if self._beyond(value, self.critical):
            return Level.CRITICAL
        return Level.WARNING if self._beyond(value, self.warning) else Level.OK

    def _beyond(self, value: float, limit: float | None) -> bool:
        if limit is None:
            return False
        return value >= limit if self.high_is_bad else value <= limit


@dataclass(frozen=True, slots=True)
class Standing:
    """The settled level of a rule for a group: it changes after some equal readings in a row.

    Attributes:
        level: the settled level.
        latest: the level of the last reading.
        count: how many readings in a row had that level.
    """

    level: Level = Level.OK
    latest: Level = Level.OK
    count: int = 0

    def after(self, latest: Level, *, consecutive: int) -> "Standing":
        """Return the standing after one more reading; `consecutive` equal ones settle the level."""
        count = self.count + 1 if latest is self.latest else 1
        return Standing(latest if count >= consecutive else self.level, latest, count)

    def in_new_life(self) -> "Standing":
        """Return the standing of a group that has been restarted: the level stays, the count begins again."""
        return Standing(self.level)

    def calls_for_action(self, *, consecutive: int) -> bool:
        """Whether the last `consecutive` readings of this life were critical."""
        return self.latest is Level.CRITICAL and self.count >= consecutive
