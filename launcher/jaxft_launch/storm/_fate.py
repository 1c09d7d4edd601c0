"""The shared fate of a group's processes: as soon as one fails, the others are ended."""

import math
import signal
import time
from collections.abc import Sequence

from jaxft_launch.processes._processes import Child
from jaxft_launch.supervise.core.values import DONE, Ending, ending_of, reason_of

# A process beside one that failed may still say why: one whose own error has ended the others ends after them.
# One beside a process that was killed hangs in a collective.
LAST_WORDS_S = 1.0
# JAX ends a rank so, within a tenth of a second, when rank 0 has ended: the reason is that of rank 0.
ABORTED = (-signal.SIGABRT, 128 + signal.SIGABRT)


class Fate:
    """Watches the processes of one life of a group.

    As soon as one ends with another status than 0, all others are ended by SIGKILL: what they wait for will never
    come.
    """

    def __init__(self, children: Sequence[Child]) -> None:
        """`children`: the processes on this machine, in the order of their ranks."""
        self.statuses: dict[int, int] = {}  # of processes that ended before we ended the group, by index
        # The index of the first that failed, or of one seen later that is the reason for that.
        self.failed: int | None = None
        self.settled = False  # `failed` stays as it is
        self.killed = False
        self.killed_s = math.inf  # when that was, by time.monotonic
        self._children = tuple(children)
        self._kill_at_s: float | None = None

    @property
    def over(self) -> bool:
        """Whether all processes have ended."""
        return all(child.exit_code() is not None for child in self._children)

    def result(self) -> tuple[Ending, int]:
        """Return how the group ended, and the exit status that says so. Call it once it is over."""
        return reason_of(list(self.statuses.values()))

    def watch(self, *, shared: bool = True) -> None:
        """See which processes have ended. With `shared`, one that failed ends the others."""
        over = self.over  # asked first: none of them then ends unseen
        for index, child in enumerate(self._children):
            status = child.exit_code()
            if status is None or index in self.statuses or self.killed:
                continue
            if self.failed is not None and status in ABORTED:
                continue
            self.statuses[index] = status
            if status != DONE and self.failed is None:
                last_words_s = 0.0 if ending_of(status) is Ending.KILLED else LAST_WORDS_S
                self.fail(index, within_s=last_words_s if shared else None)
            elif self._explains(status):
                self.failed = index
        if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
            self.kill()
        self.settled = self.failed is not None and (over or self.killed or self._kill_at_s is None)

    def _explains(self, status: int) -> bool:
        """Whether a process that ended so is the reason for the end of the one that failed first."""
        if self.settled or self.failed not in self.statuses:
            return False
        first = self.statuses[self.failed]
        return reason_of([first, status]) != reason_of([first])

    def fail(self, index: int, *, within_s: float | None) -> None:
        """A process has failed: the group ends after `within_s`, or (None) by itself."""
        self.failed = index
        self._kill_at_s = None if within_s is None else time.monotonic() + within_s

    def kill(self) -> None:
        """Send SIGKILL to all that still run."""
        if not self.killed:
            self.killed, self.killed_s = True, time.monotonic()
        for child in self._children:
            if child.exit_code() is None:
                child.kill()
