"""Threads that work for a thread that waits for them, with its connections and memory."""

import select
import threading
from collections.abc import Callable

from jaxft._base._calls import ctrl_c_later
from jaxft._base._room import start_thread
from jaxft._transport._sockets import Abort


class Team:
    """The threads of one piece of work. All methods are for the thread that waits for it.

    `Thread.join` cannot tell that they have ended: where Ctrl-C interrupts it, CPython 3.11 takes a running
    thread for an ended one. So each thread sets a flag.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._begun: list[Abort] = []  # a flag for each thread that has begun, set when it has ended
        self._closed = False

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread. Raises RuntimeError if the system has no room for it for some seconds."""
        self._threads.append(start_thread(self._run, work, Abort(), name=name))

    def wait(self) -> None:
        """Wait until all have ended. Ctrl-C is raised; call `end` then."""
        for thread in self._threads:
            thread.join()

    def end(self) -> None:
        """Wait until no thread works any more, before an exception propagates. They must know that they are to end.

        A second Ctrl-C has to wait as well.
        """
        with ctrl_c_later():
            self._closed = True  # who begins later sees it
            for ended in list(self._begun):
                poller = select.poll()
                poller.register(ended, select.POLLIN)
                poller.poll()  # no deadline needed: each is about to end, and its waits have one

    def _run(self, work: Callable[[], None], ended: Abort) -> None:
        self._begun.append(ended)
        try:
            if not self._closed:
                work()
        finally:
            ended.set("ended")
