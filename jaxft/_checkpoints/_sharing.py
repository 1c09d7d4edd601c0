"""How jobs, groups and threads share the folder of the checkpoints.

The file `.job` names the job that owns the folder (`claim`), and its lock lets groups save one after the other
(`turn`). `wait_for` waits for a save, of this process or another, as long as bytes move.
"""

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from jaxft_protocol.values import SLOW_WAIT_S, LongWait

from jaxft._base._room import start_thread
from jaxft._checkpoints import _folder
from jaxft._checkpoints._group import Group
from jaxft._errors import ConfigurationError

_log = logging.getLogger("jaxft")

JOB = ".job"
_POLL_S, LOOK_S, _JOIN_S = 0.05, 1.0, 0.5


def claim_together(folder: Path, job: str, group: Group, *, takes_over: bool) -> None:
    """As `claim`, by all processes of a group, which must see the same folder. Raises ConfigurationError."""
    failure = ""
    try:
        claims = partial(claim, folder, job, takes_over=takes_over)
        _folder.with_patience("use the folder of the checkpoints", claims)
    except ConfigurationError as error:
        failure = str(error)
    except OSError as error:
        failure = (
            f"The folder {str(folder)!r} cannot hold checkpoints: {error.strerror}. A save makes, writes, syncs, "
            "renames, locks and reads files there. Check that the disk is mounted, has space, is writable and has "
            "locks (on NFS, a lock service; on Lustre, the mount option flock), or name another folder."
        )
    if not (failure := group.agree("use the folder of the checkpoints", failure)) and group.size > 1:
        failure = _unseen(folder, group)
    if failure:
        raise ConfigurationError(failure)


def _unseen(folder: Path, group: Group) -> str:
    """Why the processes of a group do not see the same folder; "" if they do."""
    number = secrets.randbits(60)
    if not group.rank:
        (folder / f".seen-{number}").mkdir()
    number, failure = group.choose("look for a folder of rank 0", number), ""
    if not (folder / f".seen-{number}").is_dir():
        failure = (
            f"Rank {group.rank} does not see in {str(folder)!r} what rank 0 has made there: put the checkpoints on a "
            "file system that all processes share."
        )
    failure = group.agree("see the same folder of checkpoints", failure)
    if not group.rank:
        (folder / f".seen-{number}").rmdir()
    return failure


def claim(folder: Path, job: str, *, takes_over: bool) -> None:
    """Try all that a save does, and note that the folder is this job's.

    Args:
        folder: made if it is not there.
        job: the job's name.
        takes_over: whether it may be another job's.

    Raises:
        ConfigurationError: it is another job's folder.
        OSError: the folder cannot hold checkpoints; the text has the reason.
    """
    doing = "made"
    try:
        with _folder.said_if_slow(folder, "let this group write there"):
            folder.mkdir(parents=True, exist_ok=True)
            doing = "locked"
            with _folder.unfinished(folder) as work:
                doing = "written to"
                (work / "a").write_text(job)
                doing = "synced"
                _folder.sync(work)
                _folder.sync_names(folder)
                doing = "changed by renaming files"
                (work / "a").rename(work / "b")
                doing = "read"
                if (work / "b").read_text() != job:
                    raise OSError(errno.EIO, "the file has other contents than were written")
            doing = "claimed for this job"
            _claim(folder, job, takes_over=takes_over)
    except OSError as error:
        raise OSError(error.errno, f"it cannot be {doing}: {type(error).__name__}: {error}") from error


def _claim(folder: Path, job: str, *, takes_over: bool) -> None:
    # One of two jobs that begin at once must see the other's name. A group that saves has the lock for long, but the
    # folder has its name then.
    wait = LongWait(time.monotonic())
    while (found := _owner(folder)) != job:
        if found and not takes_over:
            raise ConfigurationError(
                f"The folder of the checkpoints, {str(folder)!r}, belongs to the job {found!r}, and this is the job "
                f"{job!r}. Two jobs in one folder delete each other's checkpoints: name another folder. If that job "
                "is over, call `manager.restore(state, changed={'job'})` to continue from its checkpoints, or delete "
                f"the file {str(folder / JOB)!r}."
            )
        descriptor = os.open(folder / JOB, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if _folder.try_lock(descriptor) and _owner(folder) == found:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, job.encode(), 0)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if wait.to_say(time.monotonic()) is not None:
            raise OSError(errno.EAGAIN, f"another process has held the lock of {JOB} for {SLOW_WAIT_S:g} s")
        time.sleep(_POLL_S / 10)
    _folder.sync_names(folder)


def _owner(folder: Path) -> str:
    try:
        return (folder / JOB).read_text(errors="replace").strip("\0\n")
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def turn(folder: Path, is_saved: Callable[[], bool], *, patience_s: float) -> Iterator[bool]:
    """Wait while another process saves; yield whether this process still has to.

    So a state that several groups hold at the end of a run is written once, and by another group if the first one
    dies. A process that has the turn and writes nothing for `patience_s` is not waited for any longer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / JOB, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        wait = LongWait(time.monotonic())
        since_s, seen, look_s = wait.began_s, -1, 0.0
        while not (saved := is_saved()) and not _folder.try_lock(descriptor):
            now_s = time.monotonic()
            if now_s >= look_s:
                look_s, written = now_s + LOOK_S, _folder.unfinished_bytes(folder)
                since_s, seen = (now_s, written) if written != seen else (since_s, seen)
            if now_s - since_s >= patience_s:
                break
            if (waited_s := wait.to_say(now_s)) is not None:
                text = "waiting %.0f s for another group to save this state: %.0f MB are written"
                _log.info(text, waited_s, max(0, seen) / 1e6)
            time.sleep(_POLL_S)
        yield not (saved or is_saved())  # perhaps by the process that has just given the lock back
    finally:
        os.close(descriptor)


def wait_for(
    thread: threading.Thread, folder: Path, timeout_s: float, say: Callable[[float, float], None]
) -> bool:
    """Wait for the end of a thread that saves as long as bytes move; return whether it has ended."""
    size_bytes, over = 0, threading.Event()

    def look() -> None:
        # In a thread: a disk that hangs must not hold up the caller.
        nonlocal size_bytes
        while not over.is_set():
            with contextlib.suppress(OSError):  # the disk is away: nothing is written then
                size_bytes = _folder.unfinished_bytes(folder)
            over.wait(LOOK_S)

    wait = LongWait(time.monotonic())
    since_s, seen = wait.began_s, (0, _folder.synced())
    start_thread(look, name="jaxft-checkpoint-size")
    try:
        while thread.is_alive():
            thread.join(min(timeout_s, _JOIN_S))
            now_s, now = time.monotonic(), (size_bytes, _folder.synced())
            if now != seen:
                since_s, seen = now_s, now
            if not thread.is_alive():
                break
            if now_s - since_s >= timeout_s:
                return False
            if (waited_s := wait.to_say(now_s)) is not None:
                say(waited_s, size_bytes / 1e6)
    finally:
        over.set()
    return True
