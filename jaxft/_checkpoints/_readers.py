"""Limits how many groups read a checkpoint when all restart at once: a few read it, and the others heal from them.

There is one slot per reader, a file beside the checkpoints with a lock that the kernel releases when its holder dies.
A process that finds a free slot reads, and writes a mark into the slot when it is done. A process that finds none
waits, and does not read once a reader has written its mark. It reads after all if a reader dies without a mark, if
none finishes in time, or if the disk has no locks: an unnecessary read costs only time.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger("jaxft")

# One is enough; the second is there in case the first dies before any group has healed from it.
READERS = 2
_POLL_S = 0.05
_MARK_BYTES = 64


@contextlib.contextmanager
def turn(folder: Path, *, timeout_s: float, readers: int = READERS) -> Iterator[bool]:
    """Wait until it is clear whether this process should read, and yield that. Read within the context."""
    try:
        slot = _slot(folder, time.monotonic() + timeout_s, readers)
    except OSError:  # the disk has no locks or is read-only: every process reads
        slot = None
    if slot is None:
        yield True
        return
    try:
        yield not slot.done_by_others
        if not slot.done_by_others:
            with contextlib.suppress(OSError):  # the disk is full: those that wait read as well
                os.pwrite(slot.descriptor, secrets.token_hex(16).encode(), 0)
    finally:
        os.close(slot.descriptor)


@dataclass(frozen=True, slots=True)
class _Slot:
    descriptor: int
    done_by_others: bool


def _slot(folder: Path, deadline_s: float, readers: int) -> _Slot | None:
    """A slot, as soon as one is free; None if none is free by the deadline. Raises OSError."""
    files = [folder / f".reader-{number}" for number in range(readers)]
    before: list[bytes] | None = None  # the marks at the start of the wait
    while True:
        for file in files:
            descriptor = locked(file)
            if descriptor is None:
                continue
            if before is not None and any(new and new not in before for new in map(_mark, files)):
                return _Slot(descriptor, done_by_others=True)
            os.ftruncate(descriptor, 0)
            return _Slot(descriptor, done_by_others=False)
        if before is None:
            before = [_mark(file) for file in files]
            _log.info("Waiting for other groups that are reading a checkpoint in %s.", folder)
        if time.monotonic() >= deadline_s:
            return None
        time.sleep(_POLL_S)


def locked(file: Path) -> int | None:
    """A descriptor that holds the file's lock; None if another process holds it. Raises OSError."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _mark(file: Path) -> bytes:
    return file.read_bytes()[:_MARK_BYTES]
