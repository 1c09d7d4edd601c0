"""Threads that compute what may never be asked for, and so must not keep a program from ending."""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from jaxft._base._room import start_thread

_log = logging.getLogger("jaxft")

# So long a program that ends waits for what runs: a thread that is cut off in the code of another library may abort
# the process.
LEAVE_S = 10.0


class _Task(NamedTuple):
    future: Future[Any]
    compute: Callable[[], Any]


_Tasks = SimpleQueue[_Task | None]  # None ends one thread

_leaving = threading.Event()
_threads: weakref.WeakKeyDictionary[threading.Thread, _Tasks] = weakref.WeakKeyDictionary()


class Workers:
    """Computes in threads, one task after the other in each.

    Those of `concurrent.futures` compute all that was submitted before a program may end, however long it takes. Here
    a program that ends drops what has not begun.

    Args:
        count: how many threads, at least 1. They start with the first tasks, and end with this object.
    """

    def __init__(self, count: int) -> None:
        self._to_start = count
        self._tasks: _Tasks = SimpleQueue()
        weakref.finalize(self, _end, self._tasks, count)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call a function in a thread, and return what will have its result."""
        if self._to_start:
            thread = start_thread(_work, self._tasks, name="jaxft-data")
            _threads[thread] = self._tasks
            self._to_start -= 1
        future: Future[Any] = Future()
        self._tasks.put(_Task(future, partial(function, *args)))
        return future


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None and not _leaving.is_set():
        if task.future.set_running_or_notify_cancel():
            _compute(*task)
        del task  # a thread that waits keeps no batch


def _compute(future: Future[Any], compute: Callable[[], Any]) -> None:
    try:
        future.set_result(compute())
    except BaseException as error:  # raised where the result is asked for
        future.set_exception(error)


def _end(tasks: _Tasks, count: int) -> None:
    """Drop what has not begun, and end the threads."""
    try:
        while True:
            tasks.get_nowait()
    except Empty:
        for _ in range(count):
            tasks.put(None)


@atexit.register
def _leave() -> None:
    _leaving.set()
    threads = list(_threads.items())
    for _, tasks in threads:
        tasks.put(None)
    deadline_s = time.monotonic() + LEAVE_S
    for thread, _ in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if any(thread.is_alive() for thread, _ in threads):
        _log.warning(
            "the program ends while a worker still computes a batch, which has taken over %.0f s", LEAVE_S
        )
