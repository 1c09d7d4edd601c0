"""The events of a launch: one JSON object per line. docs/clusters.md documents each of them."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxft_protocol.host.lines import append

from jaxft_launch.supervise.core.entries import Entry, name_of


class Journal:
    """Appends events to a file. Each line is whole, also if the launcher is killed.

    A disk that is full costs events, and not the groups: `say` gets what people should read.
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
