"""Shared by all commands: flags, and standard streams that were closed (`>&-`) or lost their reader (`| head`)."""

import contextlib
import itertools
import os
import select
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import TextIO

NO_READER = 141  # the exit status that a shell reports for a program that wrote to a pipe without a reader


def open_closed_streams() -> None:
    """Open /dev/null in place of each. Otherwise there is no `sys.stdout`, and a file or socket takes its number."""
    while (new := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(new, True)  # noqa: FBT003 - it takes no keyword
    os.close(new)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


@contextlib.contextmanager
def quiet_without_reader() -> Generator[None, None, None]:
    """Exit without a traceback if the standard output is a pipe whose reader has gone: the rest is dropped."""
    try:
        yield
    except BrokenPipeError:
        if not _has_no_reader(sys.stdout):
            raise
        sys.exit(NO_READER)
    finally:
        _has_no_reader(sys.stdout)


def _has_no_reader(stream: TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError):  # it is in memory, as in a test
        poller = select.poll()
        poller.register(stream.fileno(), 0)
        if poller.poll(0):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            return True
    return False


def empty_flags(words: Sequence[str]) -> Iterator[str]:
    """The flags that have an empty value, as from a shell variable that is not set: `--state ""`, `--state=`.

    Once parsed, an empty path is the current folder, and an empty list is none.
    """
    for word, after in itertools.pairwise([*words, "-"]):
        name, equals, value = word.partition("=")
        if name.startswith("--") and not (value if equals else after):
            yield name.replace("_", "-")


def host_and_port(address: str) -> tuple[str, int]:
    """Return both parts of host:port. Raises ValueError if it is not that."""
    host, _, port = address.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    if not port.isdecimal() or int(port) > 65535 or (":" in host and not in_brackets):
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)
