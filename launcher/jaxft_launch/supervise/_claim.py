"""A lock on each group of a launch in its folder: two launches of one would mix their logs and events."""

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.supervise.core.values import AGAIN


class FolderTaken(LaunchError):
    """Another launch has it. That may be about to end, so a scheduler tries again."""

    status = AGAIN


@contextlib.contextmanager
def claimed(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Hold these names in a folder until this process ends in any way, or the block does.

    Raises:
        FolderTaken: another launch holds such a name.
        OSError: there can be no file, or no lock.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            file = stack.enter_context((folder / f"{name}.lock").open("ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderTaken(
                    f"Another `jaxft launch` runs {name} in --folder {folder}: name another folder, or end that "
                    "launch first."
                ) from None
        yield
