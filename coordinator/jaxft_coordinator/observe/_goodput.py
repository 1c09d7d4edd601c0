"""Goodput: the productive part of a job's time, and the sources of loss.

Time here is wall time of the job as a whole, as its coordinator sees it, from when its first group connects. It is
either productive or lost to one `Source`; the names come from ml-goodput where possible. A step that is committed
at its first attempt is productive from its start to its last vote; the rest of its time, in which members were away
(evaluating, saving, loading data between two calls), the coordinator was suspended, or its store did not answer, is
OTHER. A step that had to be retried is productive for as long as such a step usually takes; the rest of it is the
price of the failure. Contributions survive a failed attempt, so counting whole attempts as lost would count too much.

The time in which no coordinator runs, in which an operator has paused the job, and after the job has finished, is not
counted.
"""

import enum
import statistics
from collections import deque

# Clean steps whose median is the usual step time.
_REMEMBERED = 32


class Source(enum.Enum):
    """What time was lost to."""

    STARTUP = "PROGRAM_STARTUP"
    RECOVERY = "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"
    WASTED = "WASTED_PROGRESS_FROM_DISRUPTION"
    OTHER = "OTHER"


class Standing(enum.Enum):
    """The activity of a job."""

    STARTING = "starting"  # groups connect and compile; there has been no quorum yet
    TRAINING = "training"  # there is a quorum
    WAITING = "waiting"  # there has been a quorum, and there is none now
    PAUSED = "paused"  # there is none now, because an operator wants it
    HALTED = "halted"
    FINISHED = "finished"


_LOST_TO = {
    Standing.STARTING: Source.STARTUP,
    Standing.WAITING: Source.RECOVERY,
    Standing.HALTED: Source.RECOVERY,
}


class Account:
    """One job's account of time, in seconds."""

    def __init__(self, now_s: float) -> None:
        self.standing = Standing.STARTING
        self.good_s = 0.0
        self.lost_s = dict.fromkeys(Source, 0.0)
        self._since_s = now_s
        self._step_s = 0.0  # time under a quorum since the last commit
        self._retried = False
        self._clean_s: deque[float] = deque(maxlen=_REMEMBERED)

    def moves_to(self, standing: Standing, now_s: float) -> None:
        """The job does something else from now on."""
        self._close(now_s)
        self.standing = standing

    def retries(self) -> None:
        """The current step needs another attempt."""
        self._retried = True

    def commits(self, took_s: float, now_s: float) -> None:
        """The current step is committed.

        Args:
            took_s: how long its last attempt took, without the time in which a member was away or the coordinator
                suspended.
            now_s: the time.
        """
        self._close(now_s)
        total_s, self._step_s = self._step_s, 0.0
        took_s = min(total_s, took_s)
        if not self._retried:
            self._clean_s.append(took_s)
            self._book(total_s, took_s, Source.OTHER)
            return
        self._retried = False
        self._book(total_s, min(total_s, max(took_s, self.usual_step_s)), Source.WASTED)

    @property
    def usual_step_s(self) -> float:
        """The median of the last steps that succeeded at once; 0 if there was none."""
        return statistics.median(self._clean_s) if self._clean_s else 0.0

    def seconds(self, now_s: float) -> tuple[float, dict[Source, float]]:
        """Return productive and lost seconds up to now. A step in progress is not counted before its commit."""
        lost_s = dict(self.lost_s)
        if (source := _LOST_TO.get(self.standing)) is not None:
            lost_s[source] += max(0.0, now_s - self._since_s)
        return self.good_s, lost_s

    def ratio(self, now_s: float) -> float | None:
        """Return the productive part of the time so far, 0 to 1; None before any time has passed."""
        good_s, lost_s = self.seconds(now_s)
        total_s = good_s + sum(lost_s.values())
        return good_s / total_s if total_s > 0 else None

    def _book(self, total_s: float, good_s: float, rest: Source) -> None:
        self.good_s += good_s
        self.lost_s[rest] += total_s - good_s

    def _close(self, now_s: float) -> None:
        passed_s, self._since_s = max(0.0, now_s - self._since_s), now_s
        if self.standing is Standing.TRAINING:
            self._step_s += passed_s
        elif (source := _LOST_TO.get(self.standing)) is not None:
            self.lost_s[source] += passed_s
