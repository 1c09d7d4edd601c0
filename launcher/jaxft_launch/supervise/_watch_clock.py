"""A clock that counts only the time in which the launcher itself could look."""

import time

# The launcher looks twice a second. A longer pause is not of what it watches but its own: the machine slept, or a
# scheduler has suspended the whole job.
LONGEST_PAUSE_S = 2.0


class WatchClock:
    """Seconds from 0, of which a pause between two looks adds `LONGEST_PAUSE_S` at most.

    What was stopped together with the launcher is so not taken for dead when both go on. It follows no changes of the
    machine's time of day.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._last_s = time.monotonic()

    def look(self) -> float:
        """Go on, and return the time."""
        last_s, self._last_s = self._last_s, time.monotonic()
        self.now_s += min(self._last_s - last_s, LONGEST_PAUSE_S)
        return self.now_s
