"""Chooses among gRPC's listeners.

The newer one passes each message through a pool of threads. The older one wakes the thread that waits for all of
them: 93 instead of 150 µs for a message and its answer if they come one by one, 78 instead of 105 in a burst (1,000
streams, grpcio 1.85, CPU time of the server).
"""

import os
import re
from importlib.metadata import version

_OLDER = "-event_engine_listener"
# A version that no longer knows it would complain, so only those up to the newest one that was measured get it.
_MEASURED = (1, 85)


def choose() -> None:
    """Have this process listen with the older one. Call this before gRPC is imported; users' own choice is kept."""
    known = re.match(r"(\d+)\.(\d+)", version("grpcio"))
    if known is not None and (int(known[1]), int(known[2])) <= _MEASURED:
        os.environ.setdefault("GRPC_EXPERIMENTS", _OLDER)
