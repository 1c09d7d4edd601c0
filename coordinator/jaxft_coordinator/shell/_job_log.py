"""What the state machines log, bounded for each job.

A client that joins in a loop causes 70 KB of them a second: the owner of one job's token could fill the disk, where
the decisions of all jobs may be.
"""

import logging
import time

from jaxft_coordinator.shell import limits

_log = logging.getLogger("jaxft_coordinator")

# A burst is more than founding a job of two thousand groups takes.
BURST = 8000
LINES_PER_S = 20.0


class JobLog:
    """Logs lines that begin with the name of their job, as in "[my-job] ...". Each job has its own allowance."""

    def __init__(self) -> None:
        # Of each job: how many lines it may still log, as of when, and how many were dropped since its last one.
        self._allowance: dict[str, tuple[float, float, int]] = {}

    def say(self, text: str) -> None:
        """Log a line, or count it if its job has logged too many."""
        now_s = time.monotonic()
        job = text.partition("] ")[0]
        left, since_s, dropped = self._allowance.pop(job, (BURST, now_s, 0))
        left = min(BURST, left + LINES_PER_S * (now_s - since_s))
        said = left >= 1
        if said:
            more = f" ({dropped} lines of this job before this one were dropped)" if dropped else ""
            _log.info("%s%s", text, more)
        self._allowance[job] = (left - 1, now_s, 0) if said else (left, now_s, dropped + 1)
        if len(self._allowance) > limits.MAX_JOBS:
            del self._allowance[next(iter(self._allowance))]  # the one that has logged nothing for longest
