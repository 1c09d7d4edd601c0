"""Names and numbers for people: group-2 sorts before group-10."""

import functools
import re
from collections.abc import Sequence

# Why a group is missing that has reported it: an exception ended its loop. Any other reason is a failure.
LEFT = "it left"
# ... or its loop ended at a step that is the last of its run: others should have no more steps, either.
ENDED = "its loop ended"
# ... or it was drained: it left at a step boundary, and another group has its place or its shards.
DRAINED = "it was drained"

# The setting of a job for the meshes that its groups may have, and its value if these may differ.
MESHES = "meshes"
ANY_MESHES = "any"

# Texts go to every group: a job of a thousand groups must not send a thousand names or reasons to each of them, and
# each of them must not log as many.
MAX_LISTED = 10

_DIGITS = re.compile(r"(\d+)")


@functools.lru_cache(maxsize=65536)
def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that compares runs of digits as numbers and the rest as text.

    The name itself comes last, so names with equal numbers ("g-1", "g-01") still have a fixed order.
    """
    parts = _DIGITS.split(name)
    return (*((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts), (2, 0, name))


def unclear(name: str) -> str:
    """Say why a name could be taken for something else in addresses, logs or on the page; "" if it could not."""
    if name in (".", ".."):
        return f"must not be {name!r}, which means a folder in paths and addresses"
    if name != name.strip():
        return f"must not begin or end with a space, unlike {name!r}"
    if "] " in name:
        return f"must not contain '] ', which ends it in the log, unlike {name!r}"
    return ""


def listed(items: Sequence[str], separator: str = ", ") -> str:
    """Join the first few of many items, and say how many more there are."""
    more = len(items) - MAX_LISTED
    shown = [*items[:MAX_LISTED], f"{more} more"] if more > 0 else items
    return separator.join(shown)


def one_line(text: str) -> str:
    """Return a text as one line that a log and a terminal can show, and that UTF-8 can encode.

    Unprintable signs are escaped: they could fake further lines of a log, or move a terminal's cursor.
    """
    line = " ".join(text.split())
    if line.isprintable():
        return line
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line)


def done_again(steps: int) -> str:
    """Say how many steps a resumed job repeats."""
    return f"{steps} step{' is' if steps == 1 else 's are'} done again"


def shards_text(total_shards: int | None) -> str:
    """Return the number of shards per step as settings show it: "members" if each member of the quorum brings one."""
    return "members" if total_shards is None else str(total_shards)


def gone_text(name: str, reason: str) -> str:
    """Say that a group is no longer a member. A group that left on purpose is not lost."""
    if reason == DRAINED:
        return f"{name} was drained"
    if reason == ENDED:
        return f"{name} has ended its loop"
    return f"{name} left" if reason == LEFT else f"lost {name} ({reason})"
