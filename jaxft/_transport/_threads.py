"""Threads that work for the one that waits for them."""

import contextlib
import threading
from collections.abc import Sequence


def join_all(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads that have been told to end, before an exception goes on.

    They may use connections that the caller is about to close. A second Ctrl-C is ignored meanwhile: the first is
    about to be raised.
    """
    for thread in threads:
        while thread.is_alive():
            with contextlib.suppress(KeyboardInterrupt):
                thread.join()
