"""A command of the user that is run again and again: `--probe` and `--check`."""

import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from jaxft_launch.processes._processes import kill_beside, start_beside

TIMEOUT_S = 60.0
# After SIGKILL.
REAP_TIMEOUT_S = 1.0
MOST_OUTPUT_BYTES = 65_536
# The status when there is no answer, as in Nagios.
UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """The status and the output of a command, and when it was started."""

    status: int
    text: str
    asked_s: float


class Asking:
    """Call `poll` often: it never waits. A command that cannot be run, or hangs, answers UNKNOWN with the reason."""

    def __init__(
        self, words: Sequence[str], *, every_s: float, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start nothing yet."""
        self._words = tuple(words)
        self._every_s = every_s
        self._environment = dict(os.environ if environment is None else environment)
        self._due_s = -math.inf
        self._began_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def poll(self, now_s: float) -> Answer | None:
        """Return an answer that has come, and ask again when it is time."""
        if self._process is None:
            if now_s < self._due_s:
                return None
            self._due_s, self._began_s = now_s + self._every_s, now_s
            return self._ask()
        status = self._process.poll()
        if status is not None:
            return self._take(status)
        if now_s - self._began_s > TIMEOUT_S:
            self.end()
            return self._unknown(f"did not end within {TIMEOUT_S:g} s, and was killed")
        return None

    def hurry(self, within_s: float = 0.0) -> None:
        """Ask soon: at once, or this long after the last time."""
        self._due_s = min(self._due_s, self._began_s + within_s)

    def end(self) -> None:
        """End the command if it runs."""
        process, self._process = self._process, None
        if process is not None:
            kill_beside(process)
            try:
                process.wait(REAP_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # its driver hangs: the kernel ends it later
                pass
        if self._output is not None:
            self._output.close()
            self._output = None

    def _ask(self) -> Answer | None:
        if shutil.which(self._words[0]) is None:
            return self._unknown("is no program that can be run")
        try:
            self._output = tempfile.TemporaryFile()
            self._process = start_beside(
                self._words, self._output, stderr=subprocess.STDOUT, environment=self._environment
            )
        except (OSError, RuntimeError) as error:  # no descriptor, process or disk is free
            self.end()
            return self._unknown(f"cannot be started: {error}")
        return None

    def _take(self, status: int) -> Answer:
        assert self._output is not None
        self._output.seek(0)
        text = self._output.read(MOST_OUTPUT_BYTES).decode(errors="replace").strip()
        self.end()
        return Answer(status, text, self._began_s)

    def _unknown(self, problem: str) -> Answer:
        return Answer(UNKNOWN, f"{self._words[0]} {problem}", self._began_s)
