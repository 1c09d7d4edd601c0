"""TorchFT's lighthouse, in a separate process."""

import sys
from typing import Any

from torchft.coordination import LighthouseServer

from benchmarks._worker import serve

_servers: list[Any] = []


def start(
    min_replicas: int, join_timeout_ms: int = 100, heartbeat_timeout_ms: int = 5000, quorum_tick_ms: int = 100
) -> str:
    """Return its address, as clients of this machine reach it."""
    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=min_replicas,
        join_timeout_ms=join_timeout_ms,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
        quorum_tick_ms=quorum_tick_ms,
    )
    _servers.append(server)
    return f"http://localhost:{server.address().rpartition(':')[2]}"


if __name__ == "__main__":
    serve(sys.modules[__name__])
