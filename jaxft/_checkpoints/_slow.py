"""Says what the training thread waits for where the disk of the checkpoints does not answer."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from jaxft_protocol.values import SLOW_WAIT_S

_log = logging.getLogger("jaxft")


@contextlib.contextmanager
def said_if_slow(folder: Path, what: str) -> Iterator[None]:
    """Log once if the body takes long. `what` completes "to ..." in the log."""

    def say() -> None:
        text = "Still waiting for the disk of the checkpoints, %r, to %s after %.0f s."
        _log.warning(text, str(folder), what, SLOW_WAIT_S)

    timer = threading.Timer(SLOW_WAIT_S, say)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no room for a thread: what it says is not worth a wait
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
