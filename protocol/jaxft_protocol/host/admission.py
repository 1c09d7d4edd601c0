"""Limits on what unauthenticated peers can take: connections, file descriptors and log lines."""

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

# Twenty similar lines are enough for a diagnosis.
_LINES = 20
_PERIOD_S = 60.0


class RateLimitFilter(logging.Filter):
    """Pass at most `_LINES` records per period, and report in the next period how many were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._period_start_s = -_PERIOD_S
        self._seen = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s - self._period_start_s >= _PERIOD_S:
            dropped = self._seen - _LINES
            if dropped > 0:
                record.msg = f"{record.getMessage()} ({dropped} similar lines before this one were dropped)"
                record.args = ()
            self._period_start_s, self._seen = now_s, 0
        self._seen += 1
        return self._seen <= _LINES


def crowded_out(peers: Iterable[tuple[K, str]], room: int) -> list[K]:
    """Choose which unauthenticated peers to evict: repeatedly the oldest of the busiest address.

    A flood from one machine then evicts its own connections, not a group that is about to authenticate.

    Args:
        peers: their keys and addresses, oldest first.
        room: how many may stay.
    """
    by_address: defaultdict[str, deque[K]] = defaultdict(deque)
    for key, address in peers:
        by_address[address].append(key)
    crowds = [(-len(keys), order, keys) for order, keys in enumerate(by_address.values())]
    heapq.heapify(crowds)
    evicted: list[K] = []
    for _ in range(-sum(crowd[0] for crowd in crowds) - room):
        minus, order, keys = crowds[0]
        evicted.append(keys.popleft())
        heapq.heapreplace(crowds, (minus + 1, order, keys))
    return evicted


def allow_all_descriptors() -> int:
    """Raise the soft limit on file descriptors to the hard limit, and return it: the usual 1024 is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than their hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if allowed == resource.RLIM_INFINITY else allowed
