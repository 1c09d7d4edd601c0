"""Files of lines, one JSON object each, which programs read while they grow."""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

# Lines that wait for a slow disk. The oldest are dropped then, and counted.
MAX_WAITING = 20_000
WRITE_EVERY_S = 0.2
MENTION_EVERY_S = 60.0
CLOSE_TIMEOUT_S = 5.0


def append(path: Path, text: str) -> None:
    """Append whole lines, all or none: a disk that is full does not keep the beginning of one.

    The file is opened for each call, so that it may be moved away at any time.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        with contextlib.suppress(OSError):  # it is no regular file
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise


def _started(run: Callable[[], None], *, name: str) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class LineFile:
    """A file of events that a thread writes, so that no thread waits for the disk.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(
        self, path: Path, log: logging.Logger, *, start: Callable[..., threading.Thread] = _started
    ) -> None:
        self._path = path.absolute()  # the program may change its working folder
        self._log = log
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque()
        self._untaken = 0
        self.lost = 0  # lines
        self._why = ""  # the last ones were lost
        self._mentioned = 0  # lost lines that the log knows of
        self._mention_s = 0.0
        self._closing = threading.Event()
        append(self._path, "")
        self._thread = start(self._write_until_closed, name="jaxft-events")

    def put(self, line: str) -> None:
        """Write a line soon."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self._lose(1, "the disk was too slow for them")
            self._waiting.append(line)

    def take_lost(self) -> int:
        """Return how many lines were lost since the last call."""
        with self._lock:
            lost, self._untaken = self._untaken, 0
        return lost

    def close(self) -> None:
        """Write what waits; give up after a few seconds if the disk does not answer."""
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._log.warning("the last events are not written to %s: the disk does not answer", self._path)
        elif self.lost > self._mentioned:
            self._log.warning("%d events in all could not be written to %s", self.lost, self._path)

    def _write_until_closed(self) -> None:
        while not self._closing.wait(WRITE_EVERY_S):
            self._write()
        self._write()

    def _write(self) -> None:
        with self._lock:
            lines, self._waiting = self._waiting, deque()
        if lines:
            try:
                append(self._path, "".join(f"{line}\n" for line in lines))
            except Exception as error:  # top level of the thread: later lines may be written
                with self._lock:
                    self._lose(len(lines), str(error))
        self._mention()

    def _lose(self, lines: int, why: str) -> None:
        self.lost += lines
        self._untaken += lines
        self._why = why

    def _mention(self) -> None:
        """Log lost lines, if there are more than the log knows of, and the last message is old enough."""
        if self.lost == self._mentioned or time.monotonic() < self._mention_s:
            return
        self._mention_s = time.monotonic() + MENTION_EVERY_S
        self._mentioned = self.lost
        self._log.error(
            "%d events so far could not be written to %s: %s. Training is not affected",
            *(self.lost, self._path, self._why),
        )
