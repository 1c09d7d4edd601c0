"""Ctrl-C for tests, where the main thread takes it.

JAX has Python call it back after each garbage collection. A signal that comes during a collection is taken in that
callback, and there Python only prints the KeyboardInterrupt: nothing is interrupted. So there are none meanwhile.
"""

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator

import pytest


def interrupt() -> None:
    """Send Ctrl-C to the main thread, from another one."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """The block is expected to end by a KeyboardInterrupt."""
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        gc.enable()
