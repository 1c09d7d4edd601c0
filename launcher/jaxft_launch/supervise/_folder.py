"""The folder of a launch: a lock on each of its groups, and its events, one JSON object per line.

Two launches of a group would mix their logs and events. docs/clusters.md documents each event.
"""

import contextlib
import fcntl
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxft_protocol.host.lines import append

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.supervise.core.entries import Entry, name_of
from jaxft_launch.supervise.core.values import AGAIN


class Journal:
    """Appends events to a file. Each line is whole, also if the launcher is killed.

    A full disk costs events, and not the groups: `say` gets a line for people.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path.absolute()
        append(self._path, "")
        self._say = say
        self._fails = False

    def write(self, entry: Entry) -> None:
        fields: dict[str, Any] = {"t": round(time.time(), 3), "event": name_of(type(entry)), **asdict(entry)}
        try:
            append(self._path, json.dumps(fields, allow_nan=False) + "\n")
        except OSError as error:
            if not self._fails:
                self._say(f"events cannot be written to {self._path}, and are lost until they can: {error}")
            self._fails = True
        else:
            self._fails = False


class FolderTaken(LaunchError):
    """Another launch has it. That may be about to end, so a scheduler tries again."""

    status = AGAIN


@contextlib.contextmanager
def claimed(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Hold these names in a folder until this process ends in any way, or the block does.

    Raises:
        FolderTaken: another launch holds such a name.
        OSError: there can be no file, or no lock.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            file = stack.enter_context((folder / f"{name}.lock").open("ab"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FolderTaken(
                    f"Another `jaxft launch` runs {name} in --folder {folder}: name another folder, or end that "
                    "launch first."
                ) from None
        yield
