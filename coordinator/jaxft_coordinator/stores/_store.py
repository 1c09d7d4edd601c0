"""What a store is, and how it says no."""

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxft_protocol.coordinator.job import Record, Saved

_log = logging.getLogger("jaxft_coordinator")

# How often people are told for whom the coordinator waits.
SAY_EVERY_S = 5.0


class StoreLost(Exception):
    """This coordinator does not lead any more: another one has opened the store, or the store cannot be reached.

    Nothing of what was to be appended is known to be durable. The text says why, and who leads now if that is known.
    """


class StoreDamaged(OSError):
    """What the store holds does not read. The text says where, and what to do. Nothing has been changed."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What the store knew when this coordinator became its leader, and the term under which it leads."""

    term: int
    jobs: Mapping[str, Saved] = field(default_factory=dict[str, Saved])
    # Jobs whose records are there and do not read, and why. The store keeps those as they are.
    unreadable: Mapping[str, str] = field(default_factory=dict[str, str])


class Store(Protocol):
    """A place for records. All calls come from one asyncio loop, `append` never twice at a time."""

    async def open(self, address: str) -> Opened:
        """Become the leader, however long that takes, and return what is remembered.

        A wait of over 5 s says in the log, every 5 s, for whom. One that was lost or closed may be opened again.

        Args:
            address: host:port at which groups reach this coordinator; told to them by those that stand by.

        Raises:
            StoreDamaged: what is remembered does not read.
            OSError: the disk is full or failing.
        """
        ...

    @property
    def leader(self) -> str:
        """The address of who leads now, as far as is known; "" if nobody does."""
        ...

    async def append(self, records: Sequence[Record]) -> None:
        """Make `records` durable before returning; of each job all or none.

        Raises:
            StoreLost: another coordinator leads now. Appending again is of no use.
            ValueError: a record makes no sense after those before it. Nothing was written.
            OSError: the disk is full or failing, or what a job has to say is too big for the store (EMSGSIZE). There
                is a job of which nothing was written; appending the same records again may succeed.
        """
        ...

    async def lost(self) -> str:
        """Return, as soon as this coordinator leads no more, why. Never returns while it leads."""
        ...

    async def close(self) -> None:
        """Lead no more. Whoever stands by takes over at once."""
        ...


def too_big(size: int, limit: str, advice: str) -> OSError:
    """Return the error for records of `size` bytes, which the store does not take."""
    return OSError(errno.EMSGSIZE, f"the records to be written have {size} bytes; {limit}. {advice}")


class Wait:
    """Something that may take long: says every 5 s for whom it waits, and since when.

    Args:
        at_once: say so at the beginning too.
    """

    def __init__(self, *, at_once: bool) -> None:
        self._began_s = time.monotonic()
        self._said_s = self._began_s - (SAY_EVERY_S if at_once else 0.0)

    def say(self, text: str) -> None:
        """Log `text`, if it is time to."""
        now_s = time.monotonic()
        if now_s - self._said_s < SAY_EVERY_S:
            return
        self._said_s = now_s
        _log.info("%s (for %.0f s)", text, now_s - self._began_s)


@contextlib.contextmanager
def saying(text: str) -> Iterator[None]:
    """Log `text` every 5 s, as long as what is awaited inside is not there."""
    loop = asyncio.get_running_loop()
    wait = Wait(at_once=False)

    def tick() -> None:
        nonlocal timer
        wait.say(text)
        timer = loop.call_later(SAY_EVERY_S, tick)

    timer = loop.call_later(SAY_EVERY_S, tick)
    try:
        yield
    finally:
        timer.cancel()
