"""Which group saves the last state of a run: the first that comes to it, and another if that one dies meanwhile.

The others wait until it is saved. Otherwise they would have left the job, with their states, by the time that the one
that saves dies. It holds a lock on a file beside the checkpoints, which the kernel releases when it dies.
"""

import logging
import os
import threading
import time
from pathlib import Path

from jaxft._checkpoints import _folder
from jaxft._checkpoints._readers import locked
from jaxft._checkpoints._written import Written

_log = logging.getLogger("jaxft")

_POLL_S = 0.05
_LOOK_S = 0.5
_NAME = ".last"


class LastTurn:
    """Whether this process saves the last state, and its lock.

    Args:
        folder: that of the checkpoints.
        step: the number of committed steps behind the last state.
        otherwise: the answer if the disk has no locks.
    """

    def __init__(self, folder: Path, step: int, *, otherwise: bool) -> None:
        self._folder, self._step, self._otherwise = folder, step, otherwise
        self._mine = False
        self._lock: int | None = None
        self._over = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        """Wait until this process may save it, or another has; return whether to save it.

        Args:
            timeout_s: for how long nothing may have been written.
        """
        # A disk that hangs must not hold up the end of the program.
        thread = threading.Thread(target=self._take, name="jaxft-checkpoint-last", daemon=True)
        thread.start()
        since_s, seen = time.monotonic(), 0
        with Written(self._folder) as written:
            while thread.is_alive():
                thread.join(min(timeout_s, _LOOK_S))
                if written.size_bytes != seen:
                    since_s, seen = time.monotonic(), written.size_bytes
                if thread.is_alive() and time.monotonic() - since_s >= timeout_s:
                    _log.warning(
                        "Another group saves the last state, of step %d, and nothing of it was written for %.0f s: "
                        "ends without it. Check the disk of %s, and that group.",
                        *(self._step, timeout_s, self._folder),
                    )
                    self.close()
                    return False
        return self._mine

    def close(self) -> None:
        """Let another process save it, if it is not complete."""
        self._over.set()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _take(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while not self._over.is_set() and self._step not in _folder.steps(self._folder):
                self._lock = locked(self._folder / _NAME)
                if self._lock is not None:
                    self._mine = self._step not in _folder.steps(self._folder)
                    return
                self._over.wait(_POLL_S)
        except Exception:  # the disk has no locks, or is read-only: the save says what is wrong
            self._mine = self._otherwise
        finally:
            if self._over.is_set():
                self.close()
