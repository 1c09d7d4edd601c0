"""Which group saves the last state of a run: the first that comes to it, and another if that one dies meanwhile.

The others wait until it is saved. Otherwise they would have left the job, with their states, by the time that the one
that saves dies. A group that saves holds a lock on a file beside the checkpoints, which the kernel releases when its
process dies.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxft._base._room import start_thread
from jaxft._checkpoints._readers import locked
from jaxft._checkpoints._written import wait_while_written

_log = logging.getLogger("jaxft")

_POLL_S = 0.05
_NAME = ".saver"
# The end of its thread is not waited for any longer, if the disk hangs.
_END_S = 5.0
# The one that saves a due state does so before it comes to its end.
HEAD_START_S = 1.0


class SaverLock:
    """The lock of one process that saves, or may have to.

    Args:
        folder: that of the checkpoints.
        is_saved: whether what this process would save is there; an exception says that it may not be saved there.
        head_start_s: for how long another process may take the lock first.
    """

    def __init__(self, folder: Path, is_saved: Callable[[], bool], *, head_start_s: float = 0.0) -> None:
        self._folder, self._is_saved, self._head_start_s = folder, is_saved, head_start_s
        self._file = folder / _NAME
        self._lock: int | None = None
        self._over = threading.Event()
        self._swapping = threading.Lock()  # two threads may close it, and each descriptor once
        self.needless = False  # it is saved
        self.error: Exception | None = None  # why there is no lock
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Take the lock, as soon as no other process has it, and until it is closed."""
        # In a thread: a disk that hangs must not hold up the program.
        self._thread = start_thread(self._take, name="jaxft-checkpoint-saver")

    def wait(self, step: int, timeout_s: float) -> bool:
        """Wait until this process has the lock or needs none; return False if the one that has it gets no further.

        Args:
            step: of the state, for the log.
            timeout_s: for how long nothing may have been written.
        """

        def say(waited_s: float, megabytes: float) -> None:
            _log.info(
                "waiting %.0f s for another group to save the last state, of step %d: %.0f MB are written",
                *(waited_s, step, megabytes),
            )

        assert self._thread is not None, "it has begun"
        if wait_while_written(self._thread, self._folder, timeout_s, say):
            return True
        _log.warning(
            "Another group saves the last state, of step %d, and nothing of it was written for %.0f s: ends without "
            "it. Check the disk of %s, and that group.",
            *(step, timeout_s, self._folder),
        )
        self.close()
        return False

    def close(self) -> None:
        """Let another process save. Idempotent."""
        self._over.set()
        self._release()
        if self._thread is not None:
            self._thread.join(_END_S)  # it may have taken the lock just now

    def _release(self) -> None:
        with self._swapping:
            lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
            os.close(lock)

    def _take(self) -> None:
        first_s = time.monotonic() + self._head_start_s
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while not self._over.is_set() and not self._is_saved():
                if time.monotonic() >= first_s:
                    self._lock = self._try()
                if self._lock is not None:
                    self.needless = self._is_saved()  # perhaps by the one that has just released it
                    return
                self._over.wait(_POLL_S)
            self.needless = True
        except Exception as error:  # the disk has no locks, or is read-only
            self.error = error
        finally:
            if self._over.is_set():
                self._release()

    def _try(self) -> int | None:
        descriptor = locked(self._file)
        if descriptor is None:
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), self._file.stat()):
                return descriptor
        os.close(descriptor)  # of a file that its last holder has deleted meanwhile
        return None
