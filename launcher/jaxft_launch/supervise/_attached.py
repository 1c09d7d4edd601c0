"""What a launcher does that another one has started on this host: it obeys its standard input.

The first line is the job's token, or empty. A line `drain` is SIGTERM. The end of the input ends everything, and so
does silence: a host that has lost its network would go on beside its successor.
"""

import os
import select
import signal
import threading
from io import FileIO

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.supervise._remote_shell import DRAIN

# No token is longer.
MAX_LINE_BYTES = 4096
# A line comes every 10 s. By default ssh takes a connection for lost after 75 s: nothing runs here any more by then.
SILENCE_S = 60.0


def attach(orders: FileIO) -> None:
    """Read the token into `JAXFT_TOKEN`, and obey what follows, in a thread, by signals to this process.

    Raises:
        LaunchError: the input has ended already.
    """
    first = orders.readline(MAX_LINE_BYTES)
    if not first.endswith(b"\n"):
        raise LaunchError(
            "--attached is for a launcher that `jaxft launch --hosts` starts: its standard input must begin with the "
            "job's token or an empty line, but it has ended."
        )
    if token := first.decode(errors="replace").strip():
        os.environ["JAXFT_TOKEN"] = token
    threading.Thread(target=_obey, args=(orders,), name="jaxft-orders", daemon=True).start()


def _obey(orders: FileIO) -> None:
    try:
        poller = select.poll()
        poller.register(orders, select.POLLIN)
        while poller.poll(1000 * SILENCE_S) and (line := orders.readline(MAX_LINE_BYTES)):
            if line == DRAIN:
                os.kill(os.getpid(), signal.SIGTERM)
    finally:  # an input that cannot be read has ended, too
        # Two signals end a launch at once. They differ, for Python may take two of one kind for a single one.
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
