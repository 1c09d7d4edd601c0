"""How much of a process strangers can have, and how much of a coordinator its groups."""

import contextlib
import heapq
import resource
import sys
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")

# Streams that have not yet proved who they are, and connections that carry no group. Of a group either is for a few
# milliseconds.
MAX_STRANGERS = 256
# Streams of groups, over all jobs; and jobs that are remembered. Where there is no room, one without groups goes.
MAX_SESSIONS = 2048
MAX_JOBS = 1000
# A job that has finished is remembered for a day once its last group has gone: one that comes late is told its end.
FORGET_AFTER_S = 86_400.0
MAX_GROUPS_PER_JOB = 2048
MAX_NAME_LENGTH = 200
# A host name has 253 characters at most.
MAX_ADDRESS_LENGTH = 300
# A group needs one; a tool that looks around, a few.
MAX_STREAMS_PER_CONNECTION = 8
# The largest message of a group is a Join with all its settings, which are a few KB in all.
MAX_MESSAGE_BYTES = 256 << 10
# For TLS and the first frames of HTTP/2.
HANDSHAKE_TIMEOUT_S = 10
# Connections at once. Those of strangers are ended once a second, so this is what a second's flood may take.
_MAX_CONNECTIONS = MAX_SESSIONS + 1000
# What the process needs for itself: its log, its store, the event loop, connections to other services.
_OWN_DESCRIPTORS = 200


def max_connections() -> int:
    """How many connections the coordinator accepts: never so many that it could not open a file any more."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(_MAX_CONNECTIONS, descriptors - _OWN_DESCRIPTORS))


def allow_all_descriptors() -> int:
    """Take as many descriptors as this process is allowed to, and return how many: the usual 1024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than the hard limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if allowed == resource.RLIM_INFINITY else allowed


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
