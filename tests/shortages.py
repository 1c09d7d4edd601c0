"""Takes from this process what the system gives, for a while."""

import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Allow = Callable[[], object]


@contextmanager
def no_descriptors() -> Iterator[Allow]:
    """Within the context, this process can open no descriptor, until what it yields is called."""
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
