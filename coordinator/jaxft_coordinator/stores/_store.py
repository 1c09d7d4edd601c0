"""The interface of a store, and its errors."""

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxft_protocol.coordinator.job import Record, Saved

from jaxft_coordinator.observe._watched import Histogram

_log = logging.getLogger("jaxft_coordinator")

# How long a wait is before it is logged; then each time that it has doubled.
SAY_EVERY_S = 5.0
# How often in that time a wait is looked at. A timer of uvloop may ring some milliseconds early.
_LOOKS = 10


class StoreLost(Exception):
    """This coordinator no longer leads: another one has opened the store, or the store cannot be reached.

    The records being appended may or may not be durable. The message has the reason, and the leader if known.
    """


class StoreDamaged(OSError):
    """The store's contents cannot be read. The message has the place and a remedy. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The contents of the store when this coordinator became its leader, and the term under which it leads."""

    term: int
    jobs: Mapping[str, Saved] = field(default_factory=dict[str, Saved])
    # Jobs whose records cannot be read, and why. The store keeps those records as they are.
    unreadable: Mapping[str, str] = field(default_factory=dict[str, str])


class Store(Protocol):
    """A store of records. For one asyncio loop, and one `append` at a time."""

    async def open(self, address: str) -> Opened:
        """Become the leader, however long that takes, and return the stored jobs.

        A wait of over 5 s is logged. A store that was lost or closed can be opened again.

        Raises:
            StoreDamaged: the contents cannot be read.
            OSError: the disk is full or failing.
        """
        ...

    @property
    def leader(self) -> str:
        """The address of the leader, as far as is known; "" if there is none."""
        ...

    async def append(self, records: Sequence[Record]) -> None:
        """Make `records` durable before returning; of each job all or none.

        Raises:
            StoreLost: another coordinator leads now. Do not retry.
            ValueError: a record is invalid after those before it. Nothing was written.
            OSError: the disk is full or failing, or the records of a job are too large for the store (EMSGSIZE). At
                least one job's records were not written; appending the same records again may succeed.
        """
        ...

    async def lost(self) -> str:
        """Wait until this coordinator no longer leads, and return why."""
        ...

    async def close(self) -> None:
        """Stop leading. A standby takes over at once."""
        ...


class TimedStore:
    """A store whose appends are timed."""

    def __init__(self, store: Store, appends: Histogram) -> None:
        self._store = store
        self._appends = appends

    @property
    def leader(self) -> str:
        return self._store.leader

    async def open(self, address: str) -> Opened:
        return await self._store.open(address)

    async def append(self, records: Sequence[Record]) -> None:
        began_s = time.perf_counter()
        await self._store.append(records)
        self._appends.observe(time.perf_counter() - began_s)

    async def lost(self) -> str:
        return await self._store.lost()

    async def close(self) -> None:
        await self._store.close()


def too_big(size: int, limit: str, advice: str) -> OSError:
    """Return the error for records of `size` bytes, which are too large for the store."""
    return OSError(errno.EMSGSIZE, f"the records to be written have {size} bytes, but {limit}. {advice}")


class Wait:
    """A wait that may be long: logs its object after 5 s, and again each time the wait has doubled."""

    def __init__(self, *, at_once: bool) -> None:
        self._began_s = time.monotonic()
        self._said_s = self._began_s - (SAY_EVERY_S if at_once else 0.0)
        self._what = ""

    def say(self, what: str, why: str = "") -> None:
        """Log `what` it waits for, if the last time was long enough ago. Its time counts from when `what` changed."""
        now_s = time.monotonic()
        if self._what not in ("", what):
            self._began_s = now_s
        self._what = what
        if now_s - self._said_s < max(SAY_EVERY_S, self._said_s - self._began_s):
            return
        self._said_s = now_s
        _log.info("%s (for %.0f s)", f"{what}: {why}" if why else what, now_s - self._began_s)


@contextlib.contextmanager
def saying(text: str) -> Iterator[None]:
    """Log `text` while the body waits, after 5 s and again and again."""
    loop = asyncio.get_running_loop()
    wait = Wait(at_once=False)

    def tick() -> None:
        nonlocal timer
        wait.say(text)
        timer = loop.call_later(SAY_EVERY_S / _LOOKS, tick)

    timer = loop.call_later(SAY_EVERY_S / _LOOKS, tick)
    try:
        yield
    finally:
        timer.cancel()
