"""A store in a folder of this machine, or on a volume that moves with the coordinator.

    folder/lock                held by the coordinator that leads (flock); names it
    folder/decisions.sqlite3   records under the keys of `_keys.py`, each with its CRC
    folder/decisions.sqlite3-wal   the newest of them

SQLite writes them ahead (WAL) with synchronous=FULL: an append is one transaction, on the disk before it returns, and
after a crash it is there as a whole or not at all.

The kernel releases the lock when its process dies, in any way, and not before: a frozen leader still leads, and no
other coordinator starts. So a standby needs no timeout.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias, TypeVar

from jaxft_protocol.coordinator import durable
from jaxft_protocol.coordinator.job import Record, Saved

from jaxft_coordinator.stores import records
from jaxft_coordinator.stores._keys import jobs_in, led_in, values_of
from jaxft_coordinator.stores._store import Opened, StoreDamaged, StoreLost, Wait, saying

T = TypeVar("T")
_Looks: TypeAlias = tuple[int, ...] | None

_log = logging.getLogger("jaxft_coordinator")

_NAME = "decisions.sqlite3"
# Of the file's header: "jaxf", and the format of the table.
_APPLICATION, _FORMAT = 0x6A617866, 1
_NEW = f"""
    PRAGMA journal_mode=OFF;
    PRAGMA application_id={_APPLICATION};
    PRAGMA user_version={_FORMAT};
    CREATE TABLE records (name BLOB PRIMARY KEY, value BLOB NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
"""
_SETTINGS = ("journal_mode=WAL", "synchronous=FULL", "cell_size_check=ON")
# The beginning of the former log.
_FORMER = b"jaxft-coordinator log "
_POLL_S = 0.05


class FileStore:
    """Keeps records in one file in `folder`, which is created if needed.

    Several coordinators of one machine may open the same folder: one leads, the others wait in `open`.

    Args:
        folder: on a disk that honours `fdatasync`, for this store alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # All file operations run there, one after the other, even if a caller has stopped waiting.
        self._thread: ThreadPoolExecutor | None = None
        self._lock: int | None = None
        self._database: sqlite3.Connection | None = None
        self._written: Sequence[_Looks] = (None, None)  # how its files looked after the last write
        self._led = records.Led(0, "")
        self._jobs: dict[str, Saved] = {}
        self._leader = ""
        self._lost = asyncio.Event()
        self._lose("it has not opened its store yet")

    async def open(self, address: str) -> Opened:
        await self.close()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jaxft store")
        try:
            await self._lead()
            opened = await self._do("read its decisions", lambda: self._begin(address))
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
        with _teaching(f"cannot keep the coordinator's state in {self._folder}", self._path):
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with _teaching(f"cannot lock {self._lock_path}", self._path):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._leader = _address_in(descriptor)
            os.close(descriptor)
            return False
        except BaseException:
            os.close(descriptor)
            raise
        if not _is_at(descriptor, self._lock_path):
            # The file was deleted between the two calls: its lock means nothing.
            os.close(descriptor)
            return False
        self._lock = descriptor
        return True

    def _begin(self, address: str) -> Opened:
        """Read the records, and note the new term."""
        with _teaching(f"cannot read {self._path}", self._path):
            self._refuse_former()
            if not self._path.exists():
                self._create()
            self._database = self._opened()
            self._written = self._looks()
            entries = self._entries()
        led = [led_in(value, f"{self._path}: {name}") for name, value in entries if name == "leader"]
        jobs, unreadable = jobs_in((each for each in entries if each[0] != "leader"), f"{self._path}: ")
        # From the clock, so that the term still grows if the folder was emptied; and above this process's last.
        term = max(led[0].term + 1 if led else 0, self._led.term + 1, int(time.time()))
        self._led, self._jobs = records.Led(term, address), jobs
        with _teaching(f"cannot write to {self._path}", self._path):
            self._write({"leader": records.encode(self._led)})
        assert self._lock is not None
        with contextlib.suppress(OSError):  # only informative
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, records.encode(self._led), 0)
        return Opened(term, jobs, unreadable)

    def _refuse_former(self) -> None:
        former = self._folder / "log"
        with contextlib.suppress(FileNotFoundError), former.open("rb") as file:
            if file.read(len(_FORMER)) == _FORMER:
                raise StoreDamaged(
                    f"{former} is in the format of an older jaxft-coordinator, which this one does not read: it "
                    f"keeps decisions in {self._path}. Name another folder, or move {former} away: each job then "
                    "continues from the newest state that its groups hold"
                )

    def _create(self) -> None:
        """Make an empty file, at once: an empty database that is found later is whole, or damaged."""
        fresh = self._beside(".new")
        for left in (fresh, self._beside("-wal"), self._beside("-journal")):
            left.unlink(missing_ok=True)
        fresh.touch(0o600)
        with contextlib.closing(sqlite3.connect(fresh)) as database:
            database.executescript(_NEW)
        os.replace(fresh, self._path)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _opened(self) -> sqlite3.Connection:
        with self._path.open("r+b") as file:  # SQLite would not say why it cannot open it
            if not os.fstat(file.fileno()).st_size:
                raise _damage(self._path, "it is empty")
        database = sqlite3.connect(self._path, timeout=0.0, isolation_level=None)
        try:
            # No other process reads or writes it meanwhile, and none of it is shared memory.
            database.execute("PRAGMA locking_mode=EXCLUSIVE")
            found = [
                database.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("application_id", "user_version")
            ]
            if found != [_APPLICATION, _FORMAT]:
                raise _damage(
                    self._path, f"it is of kind {found[0]:#x} and format {found[1]}, not of a coordinator's"
                )
            for setting in _SETTINGS:
                database.execute(f"PRAGMA {setting}")
            if (found := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise _damage(self._path, found)
        except BaseException:
            database.close()
            raise
        return database

    def _entries(self) -> list[tuple[str, bytes]]:
        """All keys and values, each `Saved` before its `Moved`."""
        assert self._database is not None
        found: list[tuple[str, bytes]] = []
        for key, value, crc in self._database.execute(
            "SELECT name, value, crc FROM records ORDER BY name DESC"
        ):
            name = key.decode(errors="replace")
            if not isinstance(value, bytes) or crc != _crc(key, value):
                raise _damage(self._path, f"the record {name!r} has another CRC than when it was written")
            found.append((name, value))
        return found

    def _let_go(self) -> None:
        if self._database is not None:
            (file, log), (own_file, own_log) = self._looks(), self._written
            if file != own_file or log not in (None, own_log):
                self._spare_strangers()
            self._database.close()
            self._database = None
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def _spare_strangers(self) -> None:
        """Keep SQLite from writing into a file that someone has put there when it closes its own.

        It leaves any other file alone.
        """
        with contextlib.suppress(OSError):
            shutil.copyfile(self._path, self._beside(".new"))
            os.replace(self._beside(".new"), self._path)
        with contextlib.suppress(OSError):
            self._beside("-wal").unlink()

    # ---- writing ----

    def _append(self, new: Sequence[Record]) -> None:
        if self._database is None:
            raise StoreLost("it has closed its store")
        if self._looks() != self._written:
            raise StoreLost(
                f"{self._path} is no longer the file that it writes to: it was moved, deleted, replaced or "
                "overwritten while it was in use"
            )
        jobs = self._jobs
        values: dict[str, bytes | None] = {}
        for record in new:
            jobs = durable.fold(jobs, record)
            values |= values_of(record)
        size = sum(len(value or b"") for value in values.values())
        with _teaching(f"cannot write {size} bytes to {self._path}", self._path):
            self._write(values)
        self._jobs = jobs

    def _write(self, values: Mapping[str, bytes | None]) -> None:
        """Write each value to its key (None: delete the key), all or none."""
        assert self._database is not None
        run = self._database.execute
        try:
            run("BEGIN IMMEDIATE")
            for name, value in values.items():
                key = name.encode()
                if value is None:
                    run("DELETE FROM records WHERE name = ?", (key,))
                else:
                    run("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (key, value, _crc(key, value)))
            run("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled it back itself
                run("ROLLBACK")
            raise
        finally:
            self._written = self._looks()

    def _looks(self) -> Sequence[_Looks]:
        """What changes in both files when someone else moves, replaces or writes one."""
        return [_looks(path) for path in (self._path, self._beside("-wal"))]

    def _beside(self, end: str) -> Path:
        return self._folder / f"{_NAME}{end}"

    @property
    def _lock_path(self) -> Path:
        return self._folder / "lock"

    @property
    def _path(self) -> Path:
        return self._folder / _NAME


@contextlib.contextmanager
def _teaching(what: str, path: Path) -> Iterator[None]:
    """Re-raise an error of the system or of SQLite as an OSError that names the failure and a remedy."""
    try:
        yield
    except StoreDamaged:
        raise  # it has the remedy
    except UnicodeDecodeError as error:  # in SQLite's own message
        raise _damage(path, str(error)) from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest distinguishes variants
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            raise _damage(path, str(error)) from error
        number = _NUMBERS.get(code, errno.EIO)
        raise _taught(what, number, str(error)) from error
    except OSError as error:
        raise _taught(what, error.errno or errno.EIO, error.strerror or str(error)) from error


_NUMBERS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
}


def _taught(what: str, number: int, why: str) -> OSError:
    own = "Give the folder and its files to the user that runs the coordinator, or name another folder"
    unlocked = "Its file system has no locks: name a folder on a disk of this machine, or use --etcd"
    crowded = "Raise the limit on open files (ulimit -n, LimitNOFILE= of systemd; fs.file-max of the machine)"
    advice = {
        errno.ENOSPC: "The disk is full: free some space. A running coordinator retries by itself",
        errno.EROFS: "The file system is read-only: check the kernel log for errors of its disk",
        errno.EIO: "The disk is failing (check the kernel log), or a quota or a limit on the size of files "
        "(ulimit -f) is reached",
        errno.EACCES: own,
        errno.EPERM: own,
        errno.EBUSY: "Another process has it open: end that one",
        errno.ENOTDIR: "Name a folder, not a file",
        errno.EEXIST: "Name a folder, not a file",
        errno.EISDIR: f"Name a folder of the coordinator's own: in it, `{_NAME}` and `lock` are files",
        errno.ENOENT: "Name a folder that can be made there",
        errno.ENAMETOOLONG: "Name a folder that can be made there",
        errno.ENOLCK: unlocked,
        errno.ENOSYS: unlocked,
        errno.EOPNOTSUPP: unlocked,
        errno.EMFILE: crowded,
        errno.ENFILE: crowded,
    }.get(number, "Check the kernel log for errors of its disk")
    return OSError(number, f"{what}: {why}. Nothing was written. {advice}")


def _damage(path: Path, what: str) -> StoreDamaged:
    return StoreDamaged(
        f"{path} is damaged: {what}. The coordinator does not start, because it would forget decisions. If there is "
        "an intact copy of this folder, and not an older one, put it there. If not, move its files away: each job "
        "then starts again from the newest state that its groups hold"
    )


def _crc(key: bytes, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(key))


def _looks(path: Path) -> _Looks:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _address_in(descriptor: int) -> str:
    try:
        led = records.decode(os.pread(descriptor, 4096, 0))
    except (OSError, records.RecordError):
        return ""  # it is just starting or stopping
    return led.address if isinstance(led, records.Led) else ""
