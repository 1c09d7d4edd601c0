"""The phases of a group, as the library announces them on its logger."""

import logging
import re
from collections.abc import Callable

# Waiting for what the job decides next.
WAIT = "wait"
# Applying a step that was committed with the vote of this process.
APPLY = "apply"

_ANNOUNCED = re.compile(r"(compute|exchange|vote|apply|replay|wait) step (\d+)")
_HEALS = re.compile(r"heals to step (\d+)")

_followers: list[Callable[[str, int], None]] = []  # of the logger of this process


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
    kept out of its log, whenever and for whichever logger the program sets that.
    """
    _followers.append(enter)
    if len(_followers) == 1:
        _listen(logging.getLogger("jaxft"))


def _listen(logger: logging.Logger) -> None:
    own = [logger.level]

    def look(record: logging.LogRecord) -> bool:
        if found := announced(record.getMessage()):
            for enter in _followers:
                enter(*found)
        return record.levelno >= (own[0] or logging.getLogger().getEffectiveLevel())

    def set_level(level: int | str) -> None:
        own[0] = logging.getLevelNamesMapping()[level] if isinstance(level, str) else level

    logger.addFilter(look)
    logger.setLevel(logging.DEBUG)
    vars(logger)["setLevel"] = set_level
