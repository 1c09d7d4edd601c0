"""What surrounds a call of the step in its thread: one call at a time, Ctrl-C that waits, and progress.

Code that a step calls, such as a long search in a stream, reports that it makes progress: a group that makes none for
long counts as hung (docs/guarantees.md). The callback is a context variable, so that it also reaches worker threads
that run in a copy of the context.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from jaxft._errors import ConfigurationError

_tell: ContextVar[Callable[[], None] | None] = ContextVar("jaxft_progress", default=None)


def one_caller(within: dict[str, threading.Thread]) -> None:
    """Note that this thread begins a call: a second call, with a state that is consumed, could only harm the first.

    The remains of an interrupted call do not stop its thread.

    Raises:
        ConfigurationError: another thread is in a call.
    """
    mine = threading.current_thread()
    other = within.setdefault("thread", mine)  # atomic
    if other is mine:
        return
    if other.is_alive():
        raise ConfigurationError(
            f"The step is called in thread {mine.name!r} while its call in thread {other.name!r} is under way. Each "
            "call consumes the state and returns the next one, so there is one at a time: call it from one thread. "
            "Batches can be loaded ahead in others, as jaxft.data does."
        )
    within["thread"] = mine


@contextlib.contextmanager
def ctrl_c_later() -> Iterator[None]:
    """Within the context, Ctrl-C does not interrupt this thread. Ctrl-C that came meanwhile is taken at its end."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield  # signals do not interrupt it, or only in C
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def reporting(tell: Callable[[], None]) -> Iterator[None]:
    """Within the context, `got_on` calls `tell`."""
    token = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(token)


def got_on() -> None:
    """Report progress to the step that called this code, if one did."""
    if (tell := _tell.get()) is not None:
        tell()
