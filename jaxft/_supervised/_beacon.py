"""The signs of life that a process of a group gives its supervisor, which is another process.

It writes its current phase to the file that the environment names (JAXFT_PHASE_FILE), and touches the file every
second as long as its threads run; at its end, also that its group was drained. On SIGUSR2 it prints where its threads
stand, which its supervisor wants to know before it kills it.
"""

import faulthandler
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxft._supervised._phase_file import DRAINED, LATE, STRANDED, Word, WordFile
from jaxft._telemetry._call import WAIT, Call

VARIABLE = "JAXFT_PHASE_FILE"
# Between two calls of the step, in the user's own code.
OUTSIDE = "outside"
# The main thread has ended, and another one keeps the process alive.
END = "end"
# Applying a step that was committed with the vote of this process.
APPLY = "apply"
TOUCH_EVERY_S = 1.0

_log = logging.getLogger("jaxft")


@functools.cache
def beacon_of_process() -> "Beacon | None":
    """Return the beacon of this process, or None if no supervisor asks for one."""
    file = os.environ.get(VARIABLE)
    return Beacon(Path(file)) if file else None


class Beacon:
    """Observes the steps of this process, and reports them to the supervisor until the process ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._words: WordFile | None = None
        self._has_failed = threading.Lock()  # taken at the first failure, and never released
        self._first_t_s = time.time()
        self._members = 0
        self._applies: int | None = None  # the step that it applies
        self._committed = 0
        self._phase = ""
        self._waits_alone: Callable[[], bool] = lambda: False
        # So that the last entered phase is the last written phase. A signal handler may announce, too.
        self._telling = threading.RLock()
        _say_stacks_on_sigusr2()
        self._try(WordFile.touch)
        threading.Thread(target=self._touch, name="beacon", daemon=True).start()

    @staticmethod
    def joins(coordinator: str, group: str) -> None:
        """Warn if the program joins as another group, or elsewhere, than its supervisor expects."""
        expected = (os.environ.get("JAXFT_COORDINATOR", coordinator), os.environ.get("JAXFT_GROUP", group))
        if (coordinator, group) != expected:
            _log.warning(
                "[jaxft] `jaxft launch` started this program as group %r of the coordinator %s, but it joins %s as "
                "%r. Groups of one name evict one another, and the launcher's coordinator is left without groups. "
                "Leave both arguments out of jaxft.Manager(...), or pass them to the program as {coordinator} and "
                "{group} in its command.",
                *(expected[1], expected[0], coordinator, group),
            )

    def begins(self, step: int) -> None:
        """Tell that a call of the step begins."""
        self._tell(WAIT, step)

    def enters(self, phase: str, step: int) -> None:
        self._tell(phase, step)

    def called(self, call: Call) -> None:
        """Tell that a call of the step has ended."""
        self._members = len(call.report.members)
        self._tell(OUTSIDE, call.report.step)

    def close(self, reason: str) -> None:
        """The beacon lives until the process ends."""

    def drained(self, step: int) -> None:
        """Tell that the group was drained: its status 0 does not mean that the job is done."""
        self._tell(DRAINED, step)

    def late(self) -> None:
        """Tell that the job was finished without this group: its status 0 does not mean that its program is done."""
        self._tell(LATE, 0)

    def stranded(self) -> None:
        """Tell that the group found no other that holds the job's state, and ends."""
        self.stranded_while(lambda: True)
        self._tell(STRANDED, 0)

    def stranded_while(self, waits_alone: Callable[[], bool]) -> None:
        """Tell that the group has found none yet, while `waits_alone` returns true: it is asked every second."""
        self._waits_alone = waits_alone

    def _tell(self, phase: str, step: int) -> None:
        with self._telling:
            self._tell_now(phase, step)

    def _tell_now(self, phase: str, step: int) -> None:
        if self._applies is not None and step > self._applies:
            self._committed = step
        self._applies = step if phase == APPLY else None
        self._phase = phase
        word = Word(
            phase=phase,
            step=step,
            t_s=time.time(),
            first_t_s=self._first_t_s,
            members=self._members,
            committed=self._committed,
        )
        self._try(lambda words: words.write(word))

    def _touch(self) -> None:
        while True:
            self._tell_if_alone()
            self._tell_if_over()
            self._try(WordFile.touch)
            time.sleep(TOUCH_EVERY_S)

    def _tell_if_alone(self) -> None:
        with self._telling:
            alone, announced = self._waits_alone(), self._phase == STRANDED
            if alone and not announced:
                self._tell_now(STRANDED, 0)
            elif announced and not alone:
                self._tell_now(WAIT, 0)

    def _tell_if_over(self) -> None:
        """Python waits for all threads, so an endless thread would keep the process for good."""
        with self._telling:
            if not threading.main_thread().is_alive() and self._phase not in (
                "",
                END,
                DRAINED,
                LATE,
                STRANDED,
            ):
                self._tell_now(END, 0)

    def _try(self, act: Callable[[WordFile], None]) -> None:
        """Write to the file. A disk that is full ends no training: only the supervisor reads it."""
        try:
            if self._words is None:
                self._words = WordFile(self._file)
            act(self._words)
        except OSError as error:
            if self._has_failed.acquire(blocking=False):
                _log.warning(
                    "[jaxft] cannot write to %s, this process's phase for its supervisor: %s. It continues. "
                    "The supervisor restarts it if that lasts longer than --deadlines allows.",
                    *(self._file, error),
                )


def _say_stacks_on_sigusr2() -> None:
    """Print them to the stream that the process began with: the program may have put another in its place."""
    stream = sys.__stderr__
    if stream is None or stream.closed or signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return
    faulthandler.register(signal.SIGUSR2, file=stream, all_threads=True)
