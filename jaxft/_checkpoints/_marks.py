"""Marks in damaged checkpoints, so that every group knows what one of them has found.

The group that reads a damaged checkpoint is seldom the one that writes the next. A writer replaces a marked one when
it saves that step again, and does not count it among those kept. A mark is only advice to writers: readers still try
a marked checkpoint, and remove the mark if it is intact, for the fault may have been that of one host.

A mark is a file in the folder of the checkpoint. It is made by a descriptor that was opened before the checkpoint was
read, so it cannot get into a folder that a writer has put there since.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jaxft._checkpoints import _folder

_MARK = ".damaged"
_CHUNK_BYTES = 1 << 20

# What tells a folder from one that replaces it: its inode, which may be used again, and when its names changed.
Seen = tuple[int, int]


@contextlib.contextmanager
def held(folder: Path) -> Iterator[int | None]:
    """A descriptor of the folder of a checkpoint; None if it cannot be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # reading it fails too, and says why
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def seen(folder: int) -> Seen:
    """Raises OSError."""
    return _seen(os.stat(folder))


def _seen(found: os.stat_result) -> Seen:
    return found.st_ino, found.st_mtime_ns


def unreadable(folder: int | None, got_on: Callable[[], None], *, rank: int, size: int) -> str:
    """Why this host cannot read the files of a checkpoint; "" if it can: then the damage is in what they hold.

    Args:
        folder: from `held`.
        got_on: called again and again.
        rank: of this process. Each reads its share of the files, and the first bytes of the others.
        size: the number of processes.
    """
    if folder is None:
        return "its folder cannot be opened"
    try:
        for number, descriptor in enumerate(_files(folder)):
            while os.read(descriptor, _CHUNK_BYTES) and number % size == rank:
                got_on()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _files(folder: int) -> Iterator[int]:
    """A descriptor of each file, in the order of their names. Raises OSError."""
    for _, folders, names, below in os.fwalk(".", onerror=_raised, dir_fd=folder):
        folders.sort()
        for name in sorted(names):
            descriptor = os.open(name, os.O_RDONLY, dir_fd=below)
            try:
                yield descriptor
            finally:
                os.close(descriptor)


def _raised(error: OSError) -> None:
    raise error


def mark(folder: int) -> None:
    """Mark a checkpoint as damaged."""
    # A disk that is read-only, or a folder that another group has deleted: advice that cannot be given is not needed.
    with contextlib.suppress(OSError):
        os.close(os.open(_MARK, os.O_WRONLY | os.O_CREAT, 0o666, dir_fd=folder))


def unmark(folder: int) -> None:
    """Remove the mark of a checkpoint that was read after all."""
    with contextlib.suppress(OSError):  # nearly always there is none; and see `mark`
        os.unlink(_MARK, dir_fd=folder)


def damaged(folder: Path, known: Mapping[int, Seen]) -> frozenset[int]:
    """The steps whose checkpoints are marked, or are still the folders that this group could not read.

    Args:
        folder: of the job's checkpoints.
        known: what this group could not read.
    """
    return frozenset(
        step for step in _folder.steps(folder) if _is_damaged(folder / str(step), known.get(step))
    )


def _is_damaged(folder: Path, known: Seen | None) -> bool:
    if (folder / _MARK).exists():
        return True
    try:
        return known is not None and known == _seen(folder.stat())
    except FileNotFoundError:  # another writer has deleted it
        return False
