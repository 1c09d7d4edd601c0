"""How a rank of several ends: at once, and with a status for the reason.

JAX's exit handler waits for all ranks of its group (`jax.distributed.shutdown`), 300 s at most, and aborts this
process if another rank has ended before. Either way, the status of a program that has failed in one rank would be
lost, and with it what its supervisor has to do.
"""

import atexit
import logging
import os
import signal
import sys
from typing import NoReturn


def end_at_once(status: int) -> NoReturn:
    """End this process without the exit handlers (`atexit`) that are left.

    A stream that is closed, or a disk that is full, costs last words, and not the status.
    """
    try:
        logging.shutdown()
        for stream in (sys.stderr, sys.stdout):
            stream.flush()
    finally:
        os._exit(status)


def exit_status(error: BaseException) -> int:
    """Return the exit status that Python gives a program that this error ends."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def keep_status(error: BaseException) -> None:
    """Have this process end at once, with the status of `error`, if it is not caught."""
    atexit.register(_end_with, error)


def _end_with(error: BaseException) -> None:
    caught = not isinstance(error, SystemExit) and getattr(sys, "last_value", None) is None
    if not caught and (status := exit_status(error)):
        end_at_once(status)
