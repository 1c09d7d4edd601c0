"""A store in a folder of this machine, or on a volume that moves with the coordinator.

    folder/lock   held by the coordinator that leads (flock); names it
    folder/log    every record since the log was last rewritten (`_logfile.py`)

The kernel releases the lock when its process dies, in any way, and not before: a frozen leader still leads, and no
other coordinator starts. So a standby needs no timeout.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from jaxft_protocol.coordinator import durable
from jaxft_protocol.coordinator.job import Moved, Record, Saved

from jaxft_coordinator.stores import _logfile, records
from jaxft_coordinator.stores._store import Opened, StoreDamaged, StoreLost, Wait, saying

T = TypeVar("T")

_log = logging.getLogger("jaxft_coordinator")

# A step's record has about 100 bytes: this is an hour at 25 steps/s, and takes a second to read.
COMPACT_BYTES = 8 << 20
_POLL_S = 0.05


class FileStore:
    """Keeps records in one file in `folder`, which is created if needed.

    Several coordinators of one machine may open the same folder: one leads, the others wait in `open`.

    Args:
        folder: on a disk that honours `fdatasync`, for this store alone.
        compact_bytes: the log is rewritten, shorter, when it exceeds this.
    """

    def __init__(self, folder: Path, *, compact_bytes: int = COMPACT_BYTES) -> None:
        self._folder = folder
        self._compact_bytes = compact_bytes
        self._compact_at = compact_bytes
        # All file operations run there, one after the other, even if a caller has stopped waiting.
        self._thread: ThreadPoolExecutor | None = None
        self._lock: int | None = None
        self._log: _logfile.Log | None = None
        self._led = records.Led(0, "")
        self._jobs: dict[str, Saved] = {}
        self._kept = _Kept()
        self._leader = ""
        self._lost = asyncio.Event()
        self._lose("it has not opened its store yet")

    async def open(self, address: str) -> Opened:
        await self.close()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxft store")
        try:
            await self._lead()
            opened = await self._do("read and rewrite what it remembers", lambda: self._begin(address))
        except BaseException:
            await self.close()
            raise
        self._leader = address
        self._lost.clear()
        return opened

    @property
    def leader(self) -> str:
        return self._leader

    async def append(self, records: Sequence[Record]) -> None:
        if self._lost.is_set():
            raise StoreLost(self._why_lost)
        if not records:
            return
        try:
            await self._do("write a decision", lambda: self._append(records))
        except StoreLost as error:
            self._lose(str(error))
            raise

    async def lost(self) -> str:
        await self._lost.wait()
        return self._why_lost

    async def close(self) -> None:
        self._lose("it has closed its store")
        if self._thread is None:
            return
        await self._do("let go of it", self._let_go)
        self._thread.shutdown(wait=False)
        self._thread = None

    async def _do(self, what: str, work: Callable[[], T]) -> T:
        assert self._thread is not None, "open the store first"
        with saying(f"waiting for the disk of {self._folder} to {what}"):
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _lose(self, why: str) -> None:
        self._leader = ""
        if not self._lost.is_set():
            self._why_lost = why
            self._lost.set()

    # ---- leading ----

    async def _lead(self) -> None:
        """Wait until this process holds the lock."""
        wait = Wait(at_once=True)
        while not await self._do("lock it", self._try_lock):
            who = self._leader or "a coordinator at an unknown address"
            wait.say(f"stands by: {who} leads, and holds {self._lock_path}")
            await asyncio.sleep(_POLL_S)

    def _try_lock(self) -> bool:
        with _teaching(f"cannot keep the coordinator's state in {self._folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with _teaching(f"cannot lock {self._lock_path}"):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._leader = _address_in(descriptor)
            os.close(descriptor)
            return False
        except BaseException:
            os.close(descriptor)
            raise
        if not _logfile.is_at(descriptor, self._lock_path):
            # The file was deleted between the two calls: its lock means nothing.
            os.close(descriptor)
            return False
        self._lock = descriptor
        return True

    def _begin(self, address: str) -> Opened:
        """Read the log, and rewrite it under a new term, without a record torn by a crash."""
        term = 0
        jobs: dict[str, Saved] = {}
        kept = _Kept()
        with contextlib.suppress(FileNotFoundError), _teaching(f"cannot read {self._log_path}"):
            for offset, written in _logfile.read(self._log_path):
                if isinstance(written, records.Led):
                    term = max(term, written.term)
                    continue
                try:
                    jobs = kept.folded(jobs, written)
                except ValueError as error:
                    raise _logfile.damage(self._log_path, offset, str(error)) from error
        # From the clock, so that the term still grows if the folder was emptied; and above this process's last.
        self._led = records.Led(max(term + 1, self._led.term + 1, int(time.time())), address)
        self._jobs, self._kept = jobs, kept
        with _teaching(f"cannot write to {self._folder}"):
            self._rewrite()
            assert self._log is not None
            self._log.settle()
        assert self._lock is not None
        with contextlib.suppress(OSError):  # only informative
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, records.encode(self._led), 0)
        return Opened(self._led.term, jobs, kept.whys)

    def _let_go(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    # ---- writing ----

    def _append(self, new: Sequence[Record]) -> None:
        if self._log is None:
            raise StoreLost("it has closed its store")
        if self._log.replaced:
            raise StoreLost(
                f"{self._log_path} is no longer the file that it writes to: it was moved, deleted, replaced or "
                "overwritten while it was in use"
            )
        jobs = self._jobs
        for record in new:
            jobs = durable.fold(jobs, record)
        frame = _logfile.frame(new)
        with _teaching(f"cannot append {len(frame)} bytes to {self._log_path}, which has {self._log.end}"):
            self._log.append(frame)
        self._jobs = jobs
        if self._log.end >= self._compact_at:
            self._compact()

    def _compact(self) -> None:
        assert self._log is not None
        before_bytes = self._log.end
        try:
            self._rewrite()
        except OSError as error:
            # The record is safe in the long log. Retry after as many more bytes.
            self._compact_at = before_bytes + self._compact_bytes
            _log.warning("cannot compact %s (%d bytes): %s", self._log_path, before_bytes, error)
            return
        _log.debug("%s was compacted from %d to %d bytes", self._log_path, before_bytes, self._log.end)

    def _rewrite(self) -> None:
        log = _logfile.Log.write_new(self._log_path, [self._led, *self._jobs.values(), *self._kept.all])
        if self._log is not None:
            self._log.close()
        self._log = log
        # If the jobs alone exceed the limit, do not compact at every record.
        self._compact_at = max(self._compact_bytes, 2 * log.end)

    @property
    def _lock_path(self) -> Path:
        return self._folder / "lock"

    @property
    def _log_path(self) -> Path:
        return self._folder / "log"


class _Kept:
    """Records of unreadable jobs, with all that follow them: kept as they are, in order."""

    def __init__(self) -> None:
        self._records: dict[str, list[Record | records.Unreadable]] = {}
        self.whys: dict[str, str] = {}

    @property
    def all(self) -> list[Record | records.Unreadable]:
        return [record for kept in self._records.values() for record in kept]

    def folded(self, jobs: dict[str, Saved], written: Record | records.Unreadable) -> dict[str, Saved]:
        """Return `jobs` after one more record if its job is readable; else keep the record.

        Raises:
            ValueError: a record is invalid after those before it.
        """
        name = written.job
        if isinstance(written, records.Unreadable):
            before = jobs.get(name)
            self._records.setdefault(name, [] if before is None else [before]).append(written)
            self.whys[name] = written.why
            return {other: saved for other, saved in jobs.items() if other != name}
        if name in self._records and isinstance(written, Moved):
            self._records[name].append(written)
            return jobs
        self._records.pop(name, None)  # this record replaces all before it
        self.whys.pop(name, None)
        return durable.fold(jobs, written)


@contextlib.contextmanager
def _teaching(what: str):
    """Re-raise an OSError with the same number, saying what failed and what to do."""
    try:
        yield
    except StoreDamaged:
        raise  # it says what to do
    except OSError as error:
        own = "Give the folder and its files to the user that runs the coordinator, or name another folder"
        unlocked = "Its file system has no locks: name a folder on a disk of this machine, or use --etcd"
        crowded = (
            "Raise the limit on open files (ulimit -n, LimitNOFILE= of systemd; fs.file-max of the machine)"
        )
        advice = {
            errno.ENOSPC: "The disk is full: free some space. A running coordinator retries by itself",
            errno.EDQUOT: "The quota is used up: free some space. A running coordinator retries by itself",
            errno.EFBIG: "A limit on the size of files is in force (ulimit -f): raise it",
            errno.EROFS: "The file system is read-only: check the kernel log for errors of its disk",
            errno.EIO: "The disk is failing: check the kernel log",
            errno.EACCES: own,
            errno.EPERM: own,
            errno.ENOTDIR: "Name a folder, not a file",
            errno.EEXIST: "Name a folder, not a file",
            errno.EISDIR: "Name a folder of the coordinator's own: in it, `log` and `lock` are files",
            errno.ENOENT: "Name a folder that can be made there",
            errno.ENAMETOOLONG: "Name a folder that can be made there",
            errno.ENOLCK: unlocked,
            errno.ENOSYS: unlocked,
            errno.EOPNOTSUPP: unlocked,
            errno.EMFILE: crowded,
            errno.ENFILE: crowded,
        }.get(error.errno or 0, "Check the kernel log for errors of its disk")
        text = f"{what}: {error.strerror or error}. Nothing was written. {advice}"
        raise OSError(error.errno or errno.EIO, text) from error


def _address_in(descriptor: int) -> str:
    try:
        led = records.decode(os.pread(descriptor, 4096, 0))
    except (OSError, records.RecordError):
        return ""  # it is just starting or stopping
    return led.address if isinstance(led, records.Led) else ""
