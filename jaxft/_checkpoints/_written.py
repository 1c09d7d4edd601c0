"""How much of the unfinished checkpoints in a folder is written, for the one that waits for a save."""

import contextlib
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from jaxft._checkpoints import _folder

LOOK_S = 1.0


class Written:
    """Looks again and again, in a thread: a disk that hangs would hold up the caller."""

    def __init__(self, folder: Path) -> None:
        self.size_bytes = 0
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="jaxft-checkpoint-size", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
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
