"""What surrounds a call of the step in its thread: one call at a time, Ctrl-C that waits, and progress.

Code that a step calls, such as a long search in a stream, reports that it makes progress: a group that makes none for
long counts as hung (docs/guarantees.md). The callback is a context variable, so that it also reaches worker threads
that run in a copy of the context. Work that consists of many parts may also be paused between two of them.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from jaxft._errors import ConfigurationError

_tell: ContextVar[Callable[[], None] | None] = ContextVar("jaxft_progress", default=None)


class Paused(Exception):
    """The step needs its thread, and has kept the work's result so far."""


@dataclass
class Parts:
    """How a step pauses work that consists of many parts.

    Attributes:
        goes_on: whether the next part may begin; asked between two parts.
        begun: results of paused work so far, by key.
    """

    goes_on: Callable[[], bool]
    begun: dict[Any, Any] = field(default_factory=dict[Any, Any])


_parts: ContextVar[Parts | None] = ContextVar("jaxft_parts", default=None)


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
def reporting(tell: Callable[[], None], parts: Parts | None = None) -> Iterator[None]:
    """Within the context, `got_on` calls `tell`, and `may_go_on` asks `parts`."""
    token, parts_token = _tell.set(tell), _parts.set(parts)
    try:
        yield
    finally:
        _tell.reset(token)
        _parts.reset(parts_token)


def got_on() -> None:
    """Report progress to the step that called this code, if one did."""
    if (tell := _tell.get()) is not None:
        tell()


def may_go_on(key: Any, done: Any) -> None:
    """Between two parts of work: report progress, and pause if the step needs its thread.

    Args:
        key: of the work.
        done: the result so far; `begun` returns it when the work is asked for again in the same step.

    Raises:
        Paused: the step needs its thread.
    """
    got_on()
    parts = _parts.get()
    if parts is not None and not parts.goes_on():
        parts.begun[key] = done
        raise Paused


def begun(key: Any) -> Any:
    """The result so far of paused work; None if it was not paused."""
    parts = _parts.get()
    return None if parts is None else parts.begun.pop(key, None)
