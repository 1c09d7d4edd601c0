"""Names and numbers as people read them: group-2 stands before group-10."""

import functools
import re

_DIGITS = re.compile(r"(\d+)")


@functools.lru_cache(maxsize=65536)
def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which runs of digits compare as numbers and the rest as text.

    The name itself comes last, so that names that count alike ("g-1", "g-01") still have one order.
    """
    parts = _DIGITS.split(name)
    return (*((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts), (2, 0, name))


def done_again(steps: int) -> str:
    """How many steps a job that resumes repeats, for people."""
    return f"{steps} step{' is' if steps == 1 else 's are'} done again"


def shards_text(total_shards: int | None) -> str:
    """How many shards a step has, as settings show it: "members" where each member of the quorum brings one."""
    return "members" if total_shards is None else str(total_shards)
