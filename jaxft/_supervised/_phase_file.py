"""A file with a group's current phase, which stays readable after any death."""

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

# Each record overwrites its predecessor in place, at the same length, so that no death leaves half a record. A reader
# may still see the beginning of one and the end of another, so each ends with a checksum.
WORD_BYTES = 250
_CHECKSUM_BYTES = 8
# The last phase of a group that was drained.
DRAINED = "drained"
# The phase of a group that came too late: its job was finished without it.
LATE = "late"
# The phase of a group without checkpoints that found no other group with the job's state.
STRANDED = "stranded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """The phase that a group is in.

    Attributes:
        phase: the last phase that was announced.
        step: the step it was announced for.
        t_s: when, in seconds since 1970.
        first_t_s: when the first phase of this process was announced.
        dies_t_s: when it killed itself as ordered; None unless it is about to.
        hung_t_s: when it last began to hang as ordered; None if it never did.
        members: how many groups took part in the last step; 0 before the first one.
        committed: the committed steps after the last step in which this process took part; 0 before the first
            one. What it healed or replayed was the work of others.
    """

    phase: str
    step: int
    t_s: float
    first_t_s: float
    dies_t_s: float | None = None
    hung_t_s: float | None = None
    members: int = 0
    committed: int = 0


def words_beside(events: Path) -> Path:
    """Return the phase file of a group with this event file."""
    return events.with_suffix(".phase")


def orders_beside(events: Path) -> Path:
    """Return the named pipe through which a group with this event file gets its orders."""
    return events.with_suffix(".orders")


def steps_beside(events: Path) -> Path:
    """Return the file to which the library in a group writes its events; the program's own events are separate."""
    return events.with_suffix(".steps")


class WordFile:
    """Writes records. Cheap enough for every phase of every step: one system call into the page cache."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def write(self, word: Word) -> None:
        text = json.dumps(asdict(word)).encode().ljust(WORD_BYTES - _CHECKSUM_BYTES)
        os.pwrite(self._file, text + _checksum(text), 0)

    def touch(self) -> None:
        """Set the time of the file, which is the last sign of life."""
        os.utime(self._file)


def read_word(path: Path) -> Word | None:
    """Return the last record of a file; None if there is none, or if the next one is being written."""
    try:
        record = path.read_bytes()
    except OSError:  # it is not there, or no descriptor is free: the next look shows it
        return None
    text, checksum = record[:-_CHECKSUM_BYTES], record[-_CHECKSUM_BYTES:]
    if len(record) != WORD_BYTES or checksum != _checksum(text):
        return None
    return Word(**json.loads(text))


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)
