"""How much of a process strangers can have, and how much of a coordinator its groups."""

import resource

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
