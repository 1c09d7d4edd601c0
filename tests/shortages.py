"""Takes the system's resources from this process, for a while."""

import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Allow = Callable[[], object]


@contextmanager
def no_descriptors() -> Iterator[Allow]:
    """Within the context, this process can open no descriptor, until its value is called."""
    socket.getaddrinfo("127.0.0.1", 1)  # Python imports a module for the first one
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def allow() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    with Path(os.devnull).open() as last:  # all below it are in use
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 1, before[1]))
        try:
            yield allow
        finally:
            allow()


@contextmanager
def no_threads() -> Iterator[Allow]:
    """Within the context, this process can start no thread, until its value is called."""
    before = threading.stack_size(1 << 60)  # there is no address space for it
    try:
        yield lambda: threading.stack_size(before)
    finally:
        threading.stack_size(before)


def no_thread_at_first(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """From now on there is no room for a thread of jaxft when it is started, and soon after there is.

    Returns the names of those threads.
    """
    start, refused, spent = threading.Thread.start, set[str](), list[threading.Thread]()

    def refuse_once(thread: threading.Thread) -> None:
        if thread in spent:
            raise RuntimeError("thread already started")  # as in Python 3.13
        if thread.name.startswith("jaxft-") and thread.name not in refused:
            refused.add(thread.name)
            spent.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    return refused
