"""The phases of a group, as the library announces them on its logger."""

import logging
import re
from collections.abc import Callable
from typing import Any

# Waiting for what the job decides next.
WAIT = "wait"
# Applying a step that was committed with the vote of this process.
APPLY = "apply"

_ANNOUNCED = re.compile(r"(compute|exchange|vote|apply|replay|wait) step (\d+)")
_HEALS = re.compile(r"heals to step (\d+)")


def announced(message: str) -> tuple[str, int] | None:
    """Return the phase and the step that a line of the library's log announces, or None."""
    if found := _ANNOUNCED.match(message):
        return found.group(1), int(found.group(2))
    if found := _HEALS.search(message):
        return "heal", int(found.group(1))
    return None


def follow(enter: Callable[[str, int], None]) -> None:
    """Call `enter` with each announced phase and its step, in the thread that enters it.

    Announcements are at level DEBUG. The logger is set to that level, and what lies below the program's own level is
    kept out of its log, also if the program sets another level later.
    """
    logger = logging.getLogger("jaxft")
    shown: list[Any] = [max(logging.INFO, logger.getEffectiveLevel())]

    def look(record: logging.LogRecord) -> bool:
        if found := announced(record.getMessage()):
            enter(*found)
        return record.levelno >= shown[0]

    def set_level(level: int | str) -> None:
        shown[0] = logging.getLevelNamesMapping()[level] if isinstance(level, str) else level

    logger.addFilter(look)
    logger.setLevel(logging.DEBUG)
    vars(logger)["setLevel"] = set_level
