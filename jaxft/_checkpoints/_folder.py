"""The folder of a job's checkpoints: one folder per step, and unfinished ones.

A checkpoint is written to a temporary folder, `.unfinished-...`, and then renamed, which is atomic: a folder named by
a step is always complete. Its bytes are synced before the rename, and its name before an older checkpoint is removed:
a machine that stops at any moment leaves a complete checkpoint behind. To delete an old one, it is first renamed into
a temporary folder.

Several writers may run at once: the role moves to another group when its holder is presumed dead. Each holds a lock
on a file in its unfinished folder, which the kernel releases when it dies, so the folder of a live writer can be told
from that of a dead one. It is not on the folder: between the hosts of an NFS, only files have locks.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxft._base import _calls

_UNFINISHED = ".unfinished-"
_LOCK = ".lock"
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
    """A temporary folder to write in, deleted at the end with all its contents. Raises OSError."""
    work, descriptor = _made_and_locked(folder)
    try:
        yield work
    finally:
        _delete(work, descriptor)


def _delete(work: Path, descriptor: int) -> None:
    """Delete an unfinished folder with all its contents, and release its lock."""
    try:
        shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # on NFS an open file keeps its folder, so that only now it can go
        work.rmdir()


def publish(written: Path, folder: Path, step: int) -> None:
    """Move a written checkpoint to its final place durably, unless another writer's is already there."""
    sync(written)
    try:
        written.rename(folder / str(step))
    except OSError:
        if not (folder / str(step)).is_dir():
            raise
    # Also for another writer's: its bytes were synced before it was moved, but perhaps not its name.
    sync_names(folder)


def sync_names(folder: Path) -> None:
    """Wait until the names in a folder, and the way to it, are on the disk: a save may have made some of that."""
    _sync(folder)
    device = folder.stat().st_dev
    for parent in folder.parents:
        if parent.stat().st_dev != device:
            return  # a disk is mounted here
        with contextlib.suppress(PermissionError):  # one that may not be read is not of a save
            _sync(parent)


def sync(folder: Path) -> None:
    """Wait until a folder is on the disk, with all that is in it. Raises OSError."""
    for below, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(Path(below, name))
        _sync(Path(below))


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _calls.got_on()


def unfinished_bytes(folder: Path) -> int:
    """How many bytes the unfinished checkpoints have so far. What comes or goes meanwhile may count or not."""
    found = 0
    for work in folder.glob(f"{_UNFINISHED}*"):
        for below, _, files in os.walk(work):
            for name in files:
                with contextlib.suppress(OSError):
                    found += os.lstat(os.path.join(below, name)).st_size
    return found


def retire(folder: Path, step: int, work: Path) -> None:
    """Move a step's checkpoint into `work`, to be deleted with it."""
    with contextlib.suppress(FileNotFoundError):  # another writer was faster
        (folder / str(step)).rename(work / f"old-{step}")


def sweep(folder: Path) -> None:
    """Delete the folders of dead writers. A folder that cannot be locked is left alone."""
    for work in folder.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):
            descriptor = _opened_lock(work)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                dead = not _is_locked_as_folder(work)
            except BaseException:
                os.close(descriptor)
                raise
            if dead:
                _delete(work, descriptor)
            else:
                os.close(descriptor)


def _opened_lock(work: Path) -> int:
    # Writable, or NFS gives no exclusive lock.
    return os.open(work / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)


def _is_locked_as_folder(work: Path) -> bool:
    """Whether a living writer of an older version, which locks the folder itself, has it."""
    descriptor = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # this disk has no locks on folders
        return False
    finally:
        os.close(descriptor)
    return False


def _made_and_locked(folder: Path) -> tuple[Path, int]:
    """A new unfinished folder, and the descriptor that holds its lock."""
    for _ in range(_TRIES):
        work = folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
        work.mkdir(parents=True)
        # Before it is locked, another writer may mistake it for a dead writer's, and sweep it.
        with contextlib.suppress(FileNotFoundError):
            descriptor = _opened_lock(work)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # a sweeper holds the lock only for a moment
                if (work / _LOCK).exists():
                    return work, descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    raise OSError(
        f"{_TRIES} folders in {str(folder)!r} were deleted right after they were made: another program cleans it up"
    )
