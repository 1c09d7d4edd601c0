"""The environment of a command: a folder for its files, and a clean shutdown on any signal that can be caught."""

import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from jaxft_launch.processes._checks import check_new_folder


@contextlib.contextmanager
def run_folder(keep: Path | None, *, name: str) -> Iterator[Path]:
    """Yield the folder for logs and event files: a new one that is kept, or a temporary one.

    Raises:
        LaunchError: `keep` exists and is not an empty folder.
    """
    if keep is not None:
        check_new_folder(keep)
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix=name) as folder:
        yield Path(folder)


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C: leave every `with` block, to end processes and remove files."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    # While a parent's choice to ignore it is inherited, the kernel keeps no exit status: all of them would be 0.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
