"""How much of a process strangers can have, and how much of a coordinator its groups."""

import resource
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")

# Streams that have not yet proved who they are. A group needs a few milliseconds for that.
MAX_STRANGERS = 256
# Streams of groups, over all jobs; and their jobs. A thousand groups were measured (docs/protocol.md).
MAX_SESSIONS = 4096
MAX_JOBS = 1000
MAX_GROUPS_PER_JOB = 4096
# Calls of the reflection service, which `grpcurl` and its like use for a moment.
MAX_REFLECTIONS = 16
# The largest message of a group is a Join with all its settings, of a few KB. Twice what may be in it.
MAX_MESSAGE_BYTES = 2 << 20
# A connection on which nothing is called is of no use to anybody: groups open one for each stream.
IDLE_CONNECTION_TIMEOUT_S = 30
# For TLS and the first frames of HTTP/2.
HANDSHAKE_TIMEOUT_S = 10
# Connections at once; each costs a descriptor and some 20 KB.
_MAX_CONNECTIONS = MAX_SESSIONS + 1000
# What the process needs for itself: its log, its store, the event loop, connections to other services.
_OWN_DESCRIPTORS = 200


def max_connections() -> int:
    """How many connections the coordinator accepts: never so many that it could not open a file any more."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(_MAX_CONNECTIONS, descriptors - _OWN_DESCRIPTORS))


def allow_all_descriptors() -> None:
    """Take as many descriptors as this process is allowed to: the usual 1024 are few for a coordinator."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def crowded_out(strangers: Iterable[tuple[K, str]]) -> K:
    """Choose which of several strangers must go to make room: the oldest of the address that has the most.

    So a flood from one machine drives out its own connections, not those of a group that is about to say hello.

    Args:
        strangers: their keys and addresses, oldest first; at least one.
    """
    known = list(strangers)
    most = Counter(address for _, address in known).most_common(1)[0][0]  # of equals the one that came first
    return next(key for key, address in known if address == most)
