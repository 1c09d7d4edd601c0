"""An event loop in a separate thread, which reports every failure.

A task that fails or is cancelled, a loop that is stopped by other code, and an error at the top of the thread all
end the loop; `on_end` gets the first of them before any cleanup.
"""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from jaxft._base._room import start_thread

CLOSE_TIMEOUT_S = 5.0
TURN_S = 0.05


class LoopThread:
    """Runs tasks until it is stopped or a task fails.

    Args:
        name: the thread's name.
        on_end: called when the loop stops or earlier, with what happened and the exception, if any. It may be called
            more than once: the first reason counts.
    """

    def __init__(self, name: str, on_end: Callable[[str, BaseException | None], None]) -> None:
        self._on_end = on_end
        self._loop = _Loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._first: tuple[tuple[str, Coroutine[Any, Any, None]], ...] = ()
        self._name = name
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.turns = 0  # grows 20 times a second, as long as the loop runs

    def start(self, **tasks: Coroutine[Any, Any, None]) -> None:
        """Start the thread with its first tasks, by name."""
        self._first = (("clock", self._count_turns()), *tasks.items())
        self._thread = start_thread(self._run, name=self._name)

    def keep(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a task. Call it from the loop's thread."""
        task = self._loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have the loop call `function`, which must not raise. Call it from any thread.

        Raises:
            RuntimeError: the loop is closed, and `on_end` got the reason.
        """
        if self._loop.call_soon_threadsafe(function, *arguments).cancelled():
            raise RuntimeError("the loop is closed")

    def stop(self) -> None:
        """Stop the loop. Call it from any thread."""
        self._loop.call_soon_threadsafe(self._stop)

    def close(self) -> bool:
        """Stop the loop and wait for its thread; return whether the thread has ended."""
        if self._thread is None:
            self._loop.close()  # no thread will do it
            return True
        if self._thread.is_alive():
            self.stop()
            self._thread.join(CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    def stands_at(self) -> str:
        """The current line of the thread, for logs."""
        number = None if self._thread is None else self._thread.ident
        frame = sys._current_frames().get(number or 0)
        if frame is None:
            return "its thread has ended"
        where = traceback.extract_stack(frame)[-1]
        return f"its thread stands at {where.filename}:{where.lineno} in {where.name}"

    def _run(self) -> None:
        problem: BaseException | None = None
        try:
            asyncio.set_event_loop(self._loop)
            for name, coroutine in self._first:
                self.keep(coroutine, name)
            self._loop.run_forever()
        except BaseException as error:  # top level of the thread
            problem = error
        self._stopped = True
        self._on_end("its loop was stopped" if problem is None else "its loop ended", problem)
        try:
            self._loop.run_until_complete(self._end_tasks())
        finally:
            self._loop.close()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        # Also tasks that libraries started here: what gRPC passes to a closed loop would fail in another one's task.
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(rest, timeout=CLOSE_TIMEOUT_S)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self._end(f"its task {task.get_name()!r} was cancelled")
        elif (error := task.exception()) is not None:
            self._end(f"its task {task.get_name()!r} failed", error)

    def _end(self, what: str, error: BaseException | None = None) -> None:
        self._on_end(what, error)
        self._stop()

    def _stop(self) -> None:
        if not self._stopped:  # otherwise this would stop the cleanup of the tasks
            self._loop.stop()

    async def _count_turns(self) -> None:
        while True:
            await asyncio.sleep(TURN_S)
            self.turns += 1


class _Loop(asyncio.SelectorEventLoop):
    """Ignores what comes after its end.

    gRPC has one queue of events in a process. The loop of one session may take an event of another from it, passes it
    on, and prints an error if that loop is closed. The rest then belongs to calls that were cancelled.
    """

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
        handle = asyncio.Handle(callback, args, self, context)
        handle.cancel()
        return handle


class Watch:
    """Checks, now and then, whether a loop makes progress.

    It counts checks, not seconds: a process that was stopped for an hour has checked once.
    """

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._turns = loop.turns
        self._idle = 0

    def looks_without_a_turn(self) -> int:
        """Check; return how many checks in a row saw no progress."""
        moved, self._turns = self._loop.turns != self._turns, self._loop.turns
        self._idle = 0 if moved else self._idle + 1
        return self._idle
