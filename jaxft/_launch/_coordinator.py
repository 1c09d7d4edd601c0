"""A coordinator of our own, on a free port."""

import re
import sys
import time
from collections.abc import Sequence

from jaxft._launch._checks import LaunchError
from jaxft._launch._processes import Child, Processes

# How long the first quorum waits for groups that are there but still compile: all three start in one quorum.
JOIN_TIMEOUT_MS = 120_000
COORDINATOR = (
    *(sys.executable, "-m", "jaxft_coordinator", "--bind", "localhost:0"),
    *("--min-replicas", "1", "--join-timeout-ms", str(JOIN_TIMEOUT_MS)),
)
LISTENS = re.compile(r"\(port (\d+)\)")
START_TIMEOUT_S = 60.0
POLL_S = 0.02


def start_coordinator(processes: Processes, command: Sequence[str] = COORDINATOR) -> tuple[Child, str]:
    """Start a coordinator; return it, and its address once it listens.

    Raises:
        LaunchError: it ended, or does not listen in time; the message shows its log.
    """
    child = processes.start("coordinator", command)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        exit_code = child.exit_code()
        if found := LISTENS.search(child.log.read_text(errors="replace")):
            return child, f"localhost:{found.group(1)}"
        if exit_code is not None:
            raise LaunchError(f"The coordinator ended at once, with {exit_code}.\n{child.log_tail()}")
        time.sleep(POLL_S)
    raise LaunchError(f"The coordinator does not listen after {START_TIMEOUT_S:.0f} s.\n{child.log_tail()}")
