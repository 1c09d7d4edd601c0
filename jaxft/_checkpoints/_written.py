"""How much of the unfinished checkpoints in a folder is written, for the one that waits for a save."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from jaxft._base._room import start_thread
from jaxft._checkpoints import _folder

LOOK_S = 1.0
_JOIN_S = 0.5
_FIRST_MENTION_S = 5.0


class Written:
    """Looks again and again, in a thread: a disk that hangs would hold up the caller."""

    def __init__(self, folder: Path) -> None:
        self.size_bytes = 0
        self._folder = folder
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._thread = start_thread(self._look, name="jaxft-checkpoint-size")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def _look(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError):  # of a disk that is away: nothing is written meanwhile
                self.size_bytes = _folder.unfinished_bytes(self._folder)
            self._over.wait(LOOK_S)


def wait_while_written(
    thread: threading.Thread,
    folder: Path,
    timeout_s: float,
    say: Callable[[float, float], None],
    *,
    got_on: Callable[[], int] = int,
) -> bool:
    """Wait for the end of a thread as long as checkpoints are written; return whether it has come.

    Args:
        thread: it writes one, or waits for another process that does.
        folder: that of the checkpoints.
        timeout_s: for how long nothing may have been written.
        say: called with the seconds waited and the megabytes written so far, after 5 s, 10 s, 20 s, ...
        got_on: a number that changes when the thread gets on in another way.
    """
    began_s = since_s = time.monotonic()
    say_s, seen = _FIRST_MENTION_S, (0, got_on())
    with Written(folder) as written:
        while thread.is_alive():
            thread.join(min(timeout_s, _JOIN_S))
            now_s, now = time.monotonic(), (written.size_bytes, got_on())
            if now != seen:
                since_s, seen = now_s, now
            if not thread.is_alive():
                break
            if now_s - since_s >= timeout_s:
                return False
            if now_s - began_s >= say_s:
                say(now_s - began_s, written.size_bytes / 1e6)
                say_s *= 2
    return True
