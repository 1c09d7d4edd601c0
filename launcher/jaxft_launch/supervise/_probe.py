"""Asks a command of the user, again and again, which of this machine's devices work."""

import math
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO

from jaxft_launch.processes._processes import kill_beside, start_beside

MOST_EVERY_S, LEAST_EVERY_S = 10.0, 0.2
# While a group waits for devices.
WAITING_EVERY_S = 1.0
TIMEOUT_S = 60.0
# After SIGKILL; the launcher waits for it.
REAP_TIMEOUT_S = 1.0
MOST_OUTPUT_BYTES = 65_536
_NUMBERS = re.compile(r"[\s,]*(\d{1,9}([\s,]+\d{1,9})*)?[\s,]*")


class Probe:
    """Call `poll` often: it never waits. An answer that cannot be read changes nothing, and is reported.

    Attributes:
        working: the devices of the last answer.
        asked_s: when the command of the last answer was started (`time.monotonic`).
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        say: Callable[[str], None],
        patience_s: float,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Start nothing yet.

        Args:
            command: prints the numbers of the devices that work, and ends with status 0.
            say: gets what people should read.
            patience_s: for how long a device must have worked, or not, before it matters.
            timeout_s: the longest time that the command may take.
        """
        self.working: frozenset[int] = frozenset()
        self.asked_s = -math.inf
        self._command = tuple(command)
        self._say = say
        self._every_s = min(MOST_EVERY_S, max(LEAST_EVERY_S, patience_s / 4))
        self._timeout_s = timeout_s
        self._due_s = time.monotonic()
        self._began_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._problem = ""

    def poll(self) -> None:
        """Take an answer, and ask again when it is time."""
        now_s = time.monotonic()
        if self._process is None:
            if now_s >= self._due_s:
                self._due_s = now_s + self._every_s
                self._ask(now_s)
            return
        status = self._process.poll()
        if status is not None:
            self._take(status)
        elif now_s - self._began_s > self._timeout_s:
            self.end()
            self._report(f"did not end within {self._timeout_s:g} s, and was killed")

    def hurry(self) -> None:
        """Ask at once, or as soon as the command that runs has ended."""
        self._due_s = time.monotonic()

    def group_waits(self) -> None:
        """Ask often. Call this for as long as a group waits for devices."""
        self._due_s = min(self._due_s, self._began_s + WAITING_EVERY_S)

    def end(self) -> None:
        """End the command if it runs."""
        process, self._process = self._process, None
        if process is not None:
            kill_beside(process)
            try:
                process.wait(REAP_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # the kernel ends it when the driver lets it
                self._say(f"--probe (pid {process.pid}) was killed, and has not ended: its driver hangs")
        if self._output is not None:
            self._output.close()
            self._output = None

    def _ask(self, now_s: float) -> None:
        if shutil.which(self._command[0]) is None:
            self._report("is no program that can be run")
            return
        self._began_s = now_s
        try:
            self._output = tempfile.TemporaryFile()
            self._process = start_beside(
                self._command, self._output, stderr=subprocess.DEVNULL, environment=os.environ
            )
        except (OSError, RuntimeError) as error:  # no descriptor, process or disk is free
            self.end()
            self._report(f"cannot be started: {error}")

    def _take(self, status: int) -> None:
        assert self._output is not None
        self._output.seek(0)
        said = self._output.read(MOST_OUTPUT_BYTES).decode(errors="replace")
        self.end()
        if status != 0:
            self._report(f"ended with status {status}")
        elif not _NUMBERS.fullmatch(said):
            self._report(f"printed {said.strip()[:80]!r}, which are not numbers of devices")
        else:
            self._problem = ""
            self.asked_s = self._began_s
            self.working = frozenset(map(int, re.findall(r"\d+", said)))

    def _report(self, problem: str) -> None:
        """Say once what is wrong, until there is an answer or another problem."""
        if problem != self._problem:
            self._problem = problem
            self._say(f"--probe {self._command[0]} {problem}. Groups that are due wait for its next answer.")
