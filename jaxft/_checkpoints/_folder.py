"""The folder of a job's checkpoints: one folder per step, and what is not finished.

A checkpoint is written in a folder of its own, `.unfinished-...`, and moved to its place, which is atomic: whatever
goes by a step's name is complete. Its bytes are on the disk before it is moved, and its name is before an older one
is taken away: a machine that stops at any moment leaves a whole checkpoint behind. An old one goes the opposite way
before it is deleted.

Several writers may be at work at once: the role moves to another group when its holder is thought dead. Each holds a
lock on its unfinished folder, which the kernel releases when it dies, so that a living writer's folder is told from a
dead one's.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_UNFINISHED = ".unfinished-"
_TRIES = 10


def steps(folder: Path) -> list[int]:
    """The steps that have a complete checkpoint, ascending; none if there is no such folder."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """A folder to write in, which is deleted in the end, with whatever is left in it. Raises OSError."""
    work, descriptor = _made_and_locked(folder)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(descriptor)


def publish(written: Path, folder: Path, step: int) -> None:
    """Move a written checkpoint to its place for good, unless another writer's has come there."""
    for below, _, files in os.walk(written, topdown=False):
        for name in files:
            _sync(Path(below, name))
        _sync(Path(below))
    try:
        written.rename(folder / str(step))
    except OSError:
        if not (folder / str(step)).is_dir():
            raise
    # Another writer's as well: its bytes were synced before it came there, its name perhaps not yet.
    _sync(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def retire(folder: Path, step: int, work: Path) -> None:
    """Take a step's checkpoint out of its place into `work`, to be deleted with that."""
    with contextlib.suppress(FileNotFoundError):  # another writer was faster
        (folder / str(step)).rename(work / f"old-{step}")


def sweep(folder: Path) -> None:
    """Delete what writers that are dead by now have left. A folder that cannot be locked is left alone."""
    for work in folder.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(work, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(work, ignore_errors=True)
            finally:
                os.close(descriptor)


def _made_and_locked(folder: Path) -> tuple[Path, int]:
    """A new unfinished folder, and the descriptor that holds its lock."""
    for _ in range(_TRIES):
        work = folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
        work.mkdir(parents=True)
        # Before it is locked, another writer may take it for a dead one's, and sweep it.
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(work, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # a sweeper holds it for moments only
                if work.is_dir():
                    return work, descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    raise OSError(f"{_TRIES} folders in {str(folder)!r} were deleted as soon as they were made")
