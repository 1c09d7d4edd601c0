"""Bounds on what unauthenticated peers can take: places, and lines in the log."""

import contextlib
import heapq
import logging
import resource
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")

# So many lines of a kind tell what goes on; a thousand tell no more.
_LINES = 20
_PERIOD_S = 60.0


class Sparse(logging.Filter):
    """Lets a logger say only so much in a while, and then how much it has left out."""

    def __init__(self) -> None:
        super().__init__()
        self._began_s = -_PERIOD_S
        self._said = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s - self._began_s >= _PERIOD_S:
            left_out = self._said - _LINES
            if left_out > 0:
                record.msg = f"{record.getMessage()} (before it, {left_out} more such lines were left out)"
                record.args = ()
            self._began_s, self._said = now_s, 0
        self._said += 1
        return self._said <= _LINES


def crowded_out(strangers: Iterable[tuple[K, str]], room: int) -> list[K]:
    """Choose which of several strangers must go: each time the oldest of the address that has the most.

    So a flood from one machine drives out its own connections, not those of a group that is about to say hello.

    Args:
        strangers: their keys and addresses, oldest first.
        room: how many may stay.
    """
    by_address: defaultdict[str, deque[K]] = defaultdict(deque)
    for key, address in strangers:
        by_address[address].append(key)
    crowds = [(-len(keys), order, keys) for order, keys in enumerate(by_address.values())]
    heapq.heapify(crowds)
    gone: list[K] = []
    for _ in range(-sum(crowd[0] for crowd in crowds) - room):
        minus, order, keys = crowds[0]
        gone.append(keys.popleft())
        heapq.heapreplace(crowds, (minus + 1, order, keys))
    return gone


def allow_all_descriptors() -> int:
    """Take as many descriptors as this process is allowed to, and return how many: the usual 1024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than the hard limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if allowed == resource.RLIM_INFINITY else allowed
