"""Limits on what unauthenticated peers can take of a coordinator, and on what its groups can."""

import resource

# Streams that have not authenticated yet, and connections that carry no group. A group's own is in either state only
# for a few milliseconds.
MAX_UNAUTHENTICATED = 256
# Streams of groups, over all jobs. When full, jobs that have less than an equal share are still served up to that: in
# all, at most twice as many.
MAX_SESSIONS = 2048
# Jobs that are remembered. When full, one without groups is forgotten.
MAX_JOBS = 1000
# A finished job is remembered for a day after its last group has left: a late group learns that it finished.
FORGET_AFTER_S = 86_400.0
MAX_GROUPS_PER_JOB = 2048
MAX_NAME_LENGTH = 200
# Of all ranks of a group: 1,000 of them with 24 characters each, or 128 with eight network interfaces.
MAX_ADDRESS_LENGTH = 24_576
# Each group of a job receives the addresses of all: so much for all of them together, which is in memory at once.
# 2,000 groups of one rank take 100 MB, 32 groups of 1,000 ranks take 25; 1,000 groups of 64 ranks take 1.5 GB.
MAX_ADDRESSES_BYTES = 2 << 30
# A group needs one stream; a diagnostic tool, a few.
MAX_STREAMS_PER_CONNECTION = 8
# The largest message of a group is a Join with all its settings, a few KB in all.
MAX_MESSAGE_BYTES = 256 << 10
# For TLS and the first frames of HTTP/2.
HANDSHAKE_TIMEOUT_S = 10
# Open connections. Unauthenticated ones are ended once a second, so a flood may take 1000 within a second.
MAX_CONNECTIONS = MAX_SESSIONS + 1000
# Descriptors for the process itself: its log, its store, the event loop, connections to other services.
_OWN_DESCRIPTORS = 200


def max_connections() -> int:
    """How many connections the coordinator accepts, leaving descriptors for its own files."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, descriptors - _OWN_DESCRIPTORS))
