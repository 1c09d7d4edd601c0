"""How much of this process a stranger can have. Every bound has its reason next to it."""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")


def crowded_out(strangers: Iterable[tuple[K, str]]) -> K:
    """Choose which of several strangers must go to make room: the oldest of the address that has the most.

    So a flood from one machine drives out its own connections, not those of a group that is about to say hello.

    Args:
        strangers: their keys and addresses, oldest first; at least one.
    """
    known = list(strangers)
    most = Counter(address for _, address in known).most_common(1)[0][0]  # of equals the one that came first
    return next(key for key, address in known if address == most)
