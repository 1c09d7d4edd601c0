"""The folder of a job's checkpoints: one folder per step, and unfinished ones.

A checkpoint is written to a temporary folder, `.unfinished-...`, and then renamed, which is atomic: a folder named by
a step is always complete. Its bytes are synced before the rename, and its name before an older checkpoint is removed:
a machine that stops at any moment leaves a complete checkpoint behind. To delete an old one, it is first renamed into
a temporary folder.

Several writers may run at once: the role moves to another group when its holder is presumed dead. Each holds a lock
on a file in its unfinished folder, which the kernel releases when it dies, so the folders of live and dead writers
differ. The lock is not on the folder: between the hosts of an NFS, only files have locks.
"""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from jaxft_protocol.values import SLOW_WAIT_S

from jaxft._base import _calls

_T = TypeVar("_T")
_log = logging.getLogger("jaxft")

_UNFINISHED = ".unfinished-"
_LOCK = ".lock"
_TRIES = 10
_FIRST_PAUSE_S = 0.05
# An error of the system may pass: a mounted disk that is away, descriptors that another program gives back.
PATIENCE_S = 20.0
_LONGEST_PAUSE_S = 1.0
# Errors about the contents of a folder, not about the system.
_ABOUT_FILES = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY})
_DO_NOT_PASS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# Disks that cannot sync a folder (CIFS, some of FUSE) answer with one of these.
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
# How TensorStore begins the text of such an error, which is a ValueError.
_STATUSES = {
    "PERMISSION_DENIED": errno.EACCES,
    **dict.fromkeys(
        (
            "ABORTED",
            "CANCELLED",
            "DEADLINE_EXCEEDED",
            "INTERNAL",
            "RESOURCE_EXHAUSTED",
            "UNAVAILABLE",
            "UNKNOWN",
        ),
        errno.EIO,
    ),
}
_synced = 0
_unsynced: set[int] = set()  # the devices that were warned about


def code_of_the_system(error: BaseException) -> int | None:
    """The number of an error of the system in an exception, or in its causes; None: it is about the files."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno is not None and found.errno not in _ABOUT_FILES:
            return found.errno
        if isinstance(found, RuntimeError) and "can't start new thread" in str(found):
            return errno.EAGAIN
        if isinstance(found, ValueError) and (code := _STATUSES.get(str(found).partition(":")[0])):
            return code
        found = found.__cause__ or found.__context__
    return None


def with_patience(what: str, do: Callable[[], _T], got_on: Callable[[], None] = lambda: None) -> _T:
    """Return what `do` returns. After an error of the system, try again for a while.

    Raises:
        Exception: the last error.
    """
    deadline_s, pause_s = 0.0, _FIRST_PAUSE_S
    while True:
        try:
            return do()
        except Exception as error:
            code = code_of_the_system(error)
            deadline_s = deadline_s or time.monotonic() + PATIENCE_S
            if code is None or code in _DO_NOT_PASS or time.monotonic() >= deadline_s:
                raise
            if pause_s == _FIRST_PAUSE_S:
                text = "cannot %s: %s: %.200s. Tries again for %.0f s"
                _log.warning(text, what, type(error).__name__, error, PATIENCE_S)
        got_on()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


@contextlib.contextmanager
def said_if_slow(folder: Path, what: str) -> Iterator[None]:
    """Log once if the body takes long: a disk that does not answer. `what` completes "to ..." in the log."""

    def say() -> None:
        text = "Still waiting for the disk of the checkpoints, %r, to %s after %.0f s."
        _log.warning(text, str(folder), what, SLOW_WAIT_S)

    timer = threading.Timer(SLOW_WAIT_S, say)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no room for a thread: the message is not worth a wait
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
    """Wait until the names in a folder, and the way to it, are on the disk: a save may have made some of them."""
    _sync(folder)
    device = folder.stat().st_dev
    for parent in folder.parents:
        if parent.stat().st_dev != device:
            return  # a disk is mounted here
        with contextlib.suppress(PermissionError):  # no save has made a folder that may not be read
            _sync(parent)


def sync(folder: Path) -> None:
    """Wait until a folder is on the disk, with all that is in it. Raises OSError."""
    for below, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(Path(below, name))
        _sync(Path(below))


def synced() -> int:
    """How many files and folders this process has synced."""
    return _synced


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk. Raises OSError."""
    global _synced
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        found = os.fstat(descriptor)
        if error.errno not in _NO_SYNC or not stat.S_ISDIR(found.st_mode):
            raise
        if found.st_dev not in _unsynced:
            _unsynced.add(found.st_dev)
            _log.warning(
                "The disk of %s cannot sync folders (%s): if the machine stops, the newest checkpoint may be lost, "
                "and the one before it is used.",
                *(path, error),
            )
    finally:
        os.close(descriptor)
    _synced += 1
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


def try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sweep(folder: Path) -> None:
    """Delete the folders of dead writers. A folder that cannot be locked is left alone."""
    for work in folder.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):
            descriptor = _opened_lock(work)
            try:
                dead = try_lock(descriptor)
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
            except BaseException:  # the disk has no locks
                _delete(work, descriptor)
                raise
            os.close(descriptor)
    raise OSError(
        f"{_TRIES} folders in {str(folder)!r} were deleted right after they were made: another program cleans it up"
    )
