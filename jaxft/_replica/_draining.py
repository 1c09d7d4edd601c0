"""SIGTERM drains a group: it finishes its step, hands over its place, and ends with status 0."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class Drained(SystemExit):
    """This group was drained: it takes part in no further step. Its process ends with status 0.

    Like any `SystemExit`, it passes through `except Exception`, and runs `finally` blocks and `with` blocks.
    """

    def __init__(self, group: str, step: int) -> None:
        super().__init__(os.EX_OK)
        self.text = (
            f"is drained: takes part in no step after state {step}, and serves joiners until it may go"
        )
        self.group = group


class SigtermDrains:
    """Handles SIGTERM, if the program has no handler for it.

    A second SIGTERM changes nothing: under Slurm one comes from Slurm and one from the launcher. Python allows
    handlers only in the main thread. Elsewhere SIGTERM stays as it is.
    """

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain
        in_main = threading.current_thread() is threading.main_thread()
        self._ours = in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._ours:
            signal.signal(signal.SIGTERM, self._on_term)

    def close(self) -> None:
        """Restore the default, unless the program has set a handler since."""
        if self._ours and signal.getsignal(signal.SIGTERM) == self._on_term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_term(self, _number: int, _frame: FrameType | None) -> None:
        self._drain()
