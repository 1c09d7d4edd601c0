"""Appends lines to a file without making the training thread wait for the disk."""

import logging
import threading
import time
from collections import deque
from pathlib import Path

from jaxft_protocol.host.lines import append

from jaxft._base._room import start_thread

_log = logging.getLogger("jaxft")

# Lines that wait for a slow disk. The oldest are dropped then, and counted.
MAX_WAITING = 20_000
WRITE_EVERY_S = 0.2
MENTION_EVERY_S = 60.0
CLOSE_TIMEOUT_S = 5.0


class LineFile:
    """A file that a thread writes, opened for each write, so that it may be moved away at any time.

    Args:
        path: the file; new lines go to its end. Its folder is created.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()  # the program may change its working folder
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque()
        self._dropped = 0
        self._failed_lines = 0
        self._mentioned_lines = 0
        self._mention_s = 0.0
        self._closing = threading.Event()
        path.parent.mkdir(parents=True, exist_ok=True)
        append(path, "")
        self._thread = start_thread(self._write_until_closed, name="jaxft-events")

    def put(self, line: str) -> None:
        """Write a line soon."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(line)

    def take_dropped(self) -> int:
        """Return how many lines were dropped since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        return dropped

    def close(self) -> None:
        """Write what waits; give up after a few seconds if the disk does not answer."""
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("the last events are not written to %s: the disk does not answer", self._path)
        elif self._failed_lines > self._mentioned_lines:
            _log.warning("%d events in all could not be written to %s", self._failed_lines, self._path)

    def _write_until_closed(self) -> None:
        while not self._closing.wait(WRITE_EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        with self._lock:
            lines, self._waiting = self._waiting, deque()
        if not lines:
            return
        try:
            append(self._path, "".join(f"{line}\n" for line in lines))
        except Exception as error:  # top level of the thread: later lines may be written
            self._failed(len(lines), error)

    def _failed(self, lines: int, error: Exception) -> None:
        with self._lock:
            self._dropped += lines
        self._failed_lines += lines
        if time.monotonic() >= self._mention_s:
            self._mention_s = time.monotonic() + MENTION_EVERY_S
            self._mentioned_lines = self._failed_lines
            _log.error(
                "%d events so far could not be written to %s: %s. Training is not affected",
                *(self._failed_lines, self._path, error),
            )
