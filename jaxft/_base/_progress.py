"""Lets code that a step calls, such as a long search in a stream, report that it makes progress.

A group that makes none for long counts as hung (docs/guarantees.md). The callback is a context variable, so that it
also reaches worker threads that run in a copy of the context.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_tell: ContextVar[Callable[[], None] | None] = ContextVar("jaxft_progress", default=None)


@contextlib.contextmanager
def told(tell: Callable[[], None]) -> Iterator[None]:
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
