"""Limits on what unauthenticated peers can take of a coordinator, and on what its groups can."""

import logging
import resource
import time

_log = logging.getLogger("jaxft_coordinator")

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
# Lines in the log, of each job. A burst is more than founding a job of two thousand groups takes.
BURST = 8000
LINES_PER_S = 20.0
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


class JobLog:
    """Logs lines of the state machines, which begin with the name of their job: "[my-job] ...".

    Each job has its own allowance. A client that joins in a loop causes 70 KB of lines a second: the owner of one
    job's token could fill the disk, where the decisions of all jobs may be.
    """

    def __init__(self) -> None:
        # Of each job: how many lines it may still log, as of when, and how many were dropped since its last line.
        self._allowance: dict[str, tuple[float, float, int]] = {}

    def say(self, text: str) -> None:
        """Log a line, or count it if its job has logged too many."""
        now_s = time.monotonic()
        job = text.partition("] ")[0]
        left, since_s, dropped = self._allowance.pop(job, (BURST, now_s, 0))
        left = min(BURST, left + LINES_PER_S * (now_s - since_s))
        allowed = left >= 1
        if allowed:
            more = f" ({dropped} lines of this job before this one were dropped)" if dropped else ""
            _log.info("%s%s", text, more)
        self._allowance[job] = (left - 1, now_s, 0) if allowed else (left, now_s, dropped + 1)
        if len(self._allowance) > MAX_JOBS:
            del self._allowance[next(iter(self._allowance))]  # silent for longest
