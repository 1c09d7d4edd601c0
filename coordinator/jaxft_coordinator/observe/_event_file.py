"""Writes events to a file, one JSON object a line, without making the event loop wait for the disk."""

import asyncio
import logging
import time
from collections import deque
from pathlib import Path

from jaxft_protocol.host.lines import append

_log = logging.getLogger("jaxft_coordinator.observe")

# Lines that wait for a slow disk. The oldest are dropped then, and counted.
MAX_WAITING = 20_000
WRITE_EVERY_S = 0.2
MENTION_EVERY_S = 60.0


class EventFile:
    """A file of events. It is opened for each write, so that it may be moved away at any time.

    Args:
        path: the file; new lines go to its end.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[str] = deque(maxlen=MAX_WAITING)
        self._mention_s = 0.0
        self._mentioned = 0  # lost lines that the log has been told of
        self._why = ""  # the last ones were lost
        self.lost = 0  # lines
        append(path, "")

    def put(self, job: str, number: int, text: str) -> None:
        """Write an event soon."""
        if len(self._waiting) == MAX_WAITING:
            self._lose(1, "the disk was too slow for them")
        self._waiting.append(text)

    async def run(self) -> None:
        """Write, until cancelled."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            if not self._waiting:
                continue
            lines = list(self._waiting)
            self._waiting.clear()
            try:
                await asyncio.to_thread(append, self._path, "".join(f"{line}\n" for line in lines))
            except OSError as error:
                self._lose(len(lines), str(error))
            self._mention()

    def close(self) -> None:
        """Write what waits."""
        try:
            append(self._path, "".join(f"{line}\n" for line in self._waiting))
        except OSError as error:
            self._lose(len(self._waiting), str(error))
            self._mention()
        if self.lost > self._mentioned:
            _log.warning("%d events in all could not be written to %s", self.lost, self._path)

    def _lose(self, lines: int, why: str) -> None:
        self.lost += lines
        self._why = why

    def _mention(self) -> None:
        """Tell the log of lost lines, if there are more than it knows of, and the last message is old enough."""
        if self.lost == self._mentioned or time.monotonic() < self._mention_s:
            return
        self._mention_s = time.monotonic() + MENTION_EVERY_S
        self._mentioned = self.lost
        _log.error(
            "%d events so far could not be written to %s: %s. Training is not affected",
            *(self.lost, self._path, self._why),
        )
