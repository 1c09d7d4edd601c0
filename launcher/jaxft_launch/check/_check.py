"""One rule over one life of a group: takes readings at intervals, and never makes its caller wait."""

import queue
import threading
import time

from jaxft_launch.check._readings import Level, Reading
from jaxft_launch.check._rules import Rule
from jaxft_launch.check._sources import Source

# A reading that takes so much longer than its timeout hangs in a driver or a file system.
GRACE_S = 5.0


class Check:
    """Call `poll` often. A reading is taken in a thread, because a driver may hang forever."""

    def __init__(self, rule: Rule, source: Source) -> None:
        self.rule = rule
        self._source = source
        self._answers: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._began_s: float | None = None
        self._due_s = time.monotonic()

    def poll(self) -> Reading | None:
        """Return a new reading, if there is one, and begin the next when it is due."""
        now_s = time.monotonic()
        if self._began_s is not None:
            try:
                reading = self._answers.get_nowait()
            except queue.Empty:
                return self._late(now_s)
            self._began_s = None
            return reading
        if now_s >= self._due_s:
            self._due_s = now_s + self.rule.interval_s
            return self._begin(now_s)
        return None

    def end(self) -> None:
        """End what is under way. Its reading is not used."""
        self._source.end()

    def _begin(self, now_s: float) -> Reading | None:
        try:
            threading.Thread(target=self._read, name=f"health-{self.rule.name}", daemon=True).start()
        except RuntimeError as error:  # the machine, or the container, has no thread left
            return Reading(Level.UNKNOWN, f"the reading cannot be started: {error}")
        self._began_s = now_s
        return None

    def _late(self, now_s: float) -> Reading | None:
        """Report a reading that hangs, once in each interval. No further one is begun beside it."""
        assert self._began_s is not None
        lasts_s = now_s - self._began_s
        if now_s < self._due_s or lasts_s < self.rule.timeout_s + GRACE_S:
            return None
        self._due_s = now_s + self.rule.interval_s
        return Reading(Level.UNKNOWN, f"a reading has not ended for {lasts_s:.0f} s")

    def _read(self) -> None:
        try:
            self._answers.put(self._source.read())
        except Exception as error:
            # The top of a thread. What it could not do is an event of the launch, and the next reading tries again.
            self._answers.put(Reading(Level.UNKNOWN, f"the reading failed: {type(error).__name__}: {error}"))
