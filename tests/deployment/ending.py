"""How a group's container ends: its command, run here, around a program that can be drained."""

import signal
import subprocess
import sys
from typing import Any

from tests import patience

# A program that a signal drains: it leaves its job, and ends with 0. Else it ends with the status that it is given.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
waits = sys.argv[1] == "wait"
if waits:  # a signal that comes just before signal.pause() does not end it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("up", flush=True)
signal.sigwait({signal.SIGTERM}) if waits else sys.exit(int(sys.argv[1]))
"""


def program(word: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, word]


def status_of(pod: dict[str, Any], number: signal.Signals | None = None) -> int:
    """Run the pod's container here, send it this signal once it is up, and return its status."""
    [container] = pod["spec"]["containers"]
    words = [*container["command"], *container.get("args", [])]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert patience.call(process.stdout.readline) == b"up\n"
            if number is not None:
                process.send_signal(number)
            return patience.wait(process)
        finally:
            process.kill()
