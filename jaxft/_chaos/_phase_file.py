"""The last words of a group: a file with the phase it is in, kept up to date, and readable after any death."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

# Each word overwrites the former in place, at full length: no death can leave half of one behind.
WORD_BYTES = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """Where a group is.

    Attributes:
        phase: the last phase that was announced.
        step: the step it was announced for.
        t_s: when, in seconds since 1970.
        first_t_s: when the first phase of this process was announced.
        dies_t_s: when it killed itself by order; None unless it is about to.
        hung_t_s: when it last began to hang by order; None if it never did.
    """

    phase: str
    step: int
    t_s: float
    first_t_s: float
    dies_t_s: float | None = None
    hung_t_s: float | None = None


def words_beside(events: Path) -> Path:
    """Return where a group with this event file keeps its last words."""
    return events.with_suffix(".phase")


class WordFile:
    """Writes words. Cheap enough for every phase of every step: one system call into the page cache."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def write(self, word: Word) -> None:
        os.pwrite(self._file, json.dumps(asdict(word)).encode().ljust(WORD_BYTES), 0)


def read_word(path: Path) -> Word | None:
    """Return the last word in a file, or None if nothing was ever said."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    return Word(**json.loads(text)) if len(text) == WORD_BYTES else None
