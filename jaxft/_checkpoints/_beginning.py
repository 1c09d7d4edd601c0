"""With which state a job began, noted until its first checkpoint is complete.

A job that has committed something never continues from a fresh state, which might be another run's. If all groups
die before there is a checkpoint, nothing else is left. So one group notes the history of the job and a digest of its
first state in the folder of the checkpoints, before the job commits a step. A group that starts later, with a fresh
state of this digest, holds state 0 of this job: the job begins again from it, with the same bits.

The first complete checkpoint takes the note away. From then on, a folder whose checkpoints were lost does not take
the job back to its beginning.
"""

import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path

from jaxft._checkpoints import _folder
from jaxft._checkpoints._manifest import checksum

_log = logging.getLogger("jaxft")

NAME = "beginning.json"
_MAX_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Beginning:
    """The job's name, its history, the number of its first state, and the digest of that (`_device_digest.py`)."""

    job: str
    history: int
    step: int
    digest: int


def write(folder: Path, beginning: Beginning) -> None:
    """Note a beginning durably, in the place of an earlier one. Raises OSError."""
    fields = dataclasses.asdict(beginning)
    with _folder.said_if_slow(folder, "note with which state the job begins"):
        with _folder.unfinished(folder) as work:
            written = work / NAME
            written.write_text(json.dumps(fields | {"checksum": checksum(fields)}))
            _folder.sync(work)
            written.replace(folder / NAME)
        _folder.sync_names(folder)


def remove(folder: Path) -> None:
    """Remove the note: there is a checkpoint. Raises OSError."""
    (folder / NAME).unlink(missing_ok=True)


def read(folder: Path) -> Beginning | None:
    """The note in a folder without checkpoints. None if there is none, or if it cannot be read, which is logged."""
    try:
        data = _data(folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("Cannot read with which state the job began: %s", error)
        return None
    if data is None:
        return None
    try:
        return _parsed(data)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        _log.warning("Cannot read with which state the job began: %s is damaged (%s)", folder / NAME, error)
        return None


def _data(folder: Path) -> bytes | None:
    """None if there are checkpoints. Raises OSError."""
    with _folder.said_if_slow(folder, "say with which state the job began"):
        if _folder.steps(folder):
            return None
        with (folder / NAME).open("rb") as file:
            return file.read(_MAX_BYTES)


def _parsed(data: bytes) -> Beginning:
    """Raises ValueError, KeyError, TypeError or RecursionError if it is anything else than what `write` makes."""
    fields = dict(json.loads(data))
    if fields.pop("checksum") != checksum(fields):
        raise ValueError("its checksum does not match")
    found = Beginning(**fields)
    if [type(value) for value in dataclasses.astuple(found)] != [str, int, int, int]:
        raise TypeError("a field is of another type")
    if not (0 < found.history < 1 << 64 and 0 <= found.step < 1 << 64 and 0 <= found.digest < 1 << 64):
        raise ValueError("a number is out of its range")
    return found
