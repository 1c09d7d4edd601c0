"""Who reads a checkpoint when all groups begin again at once: a few, from whom the others then heal.

As many slots as there should be readers, each a file beside the checkpoints with a lock, which the kernel releases
when its holder dies. Who finds a slot free reads, and leaves a mark in it when it is done. Who finds none waits, and
reads nothing once a reader has left its mark meanwhile. It reads after all if a reader dies without a mark, if none
is done in time, or if the disk has no locks: to read once too often costs time only.
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

# One is enough; the other is for the death of the first before it has given the state to anybody.
READERS = 2
_POLL_S = 0.05
_MARK_BYTES = 64


@contextlib.contextmanager
def turn(folder: Path, *, timeout_s: float, readers: int = READERS) -> Iterator[bool]:
    """Wait until it is known whether this process should read; yield that. A reader reads within the context."""
    try:
        slot = _slot(folder, time.monotonic() + timeout_s, readers)
    except OSError:  # a disk that cannot lock, or may not be written to: then nobody is told of a reader
        slot = None
    if slot is None:
        yield True
        return
    try:
        yield not slot.done_by_others
        if not slot.done_by_others:
            os.pwrite(slot.descriptor, secrets.token_hex(16).encode(), 0)
    finally:
        os.close(slot.descriptor)


@dataclass(frozen=True, slots=True)
class _Slot:
    descriptor: int
    done_by_others: bool


def _slot(folder: Path, deadline_s: float, readers: int) -> _Slot | None:
    """A slot, as soon as one is free; None if none is by the deadline. Raises OSError."""
    files = [folder / f".reader-{number}" for number in range(readers)]
    before: list[bytes] | None = None  # the marks when it began to wait
    while True:
        for file in files:
            descriptor = _locked(file)
            if descriptor is None:
                continue
            if before is not None and any(new and new not in before for new in map(_mark, files)):
                return _Slot(descriptor, done_by_others=True)
            os.ftruncate(descriptor, 0)
            return _Slot(descriptor, done_by_others=False)
        if before is None:
            before = [_mark(file) for file in files]
            _log.info("waits for others, who read a checkpoint in %s", folder)
        if time.monotonic() >= deadline_s:
            return None
        time.sleep(_POLL_S)


def _locked(file: Path) -> int | None:
    """A descriptor that holds the file's lock; None if another does. Raises OSError."""
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
