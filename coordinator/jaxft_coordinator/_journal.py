"""Between the machine's decisions and those who hear of them: nothing is told before it is durable.

Each turn of the machine gives a record, or none, and an act that tells of it. Acts are done in the order in which
they came, each after every record before it. While one batch of records is being written the next collects, so a slow
disk costs latency and not throughput.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxft_coordinator.core.job import Record
from jaxft_coordinator.stores import Store, StoreLost

_log = logging.getLogger("jaxft_coordinator")

# A full disk: how often to try again, and how often to say so.
RETRY_S = 0.5
MENTION_S = 5.0


@dataclass(frozen=True, slots=True)
class _Entry:
    record: Record | None
    act: Callable[[], None]


class Journal:
    """Writes records to a store, and does what waits for them. All calls come from one asyncio loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[_Entry] = []
        self._writing = False
        self._began_s = 0.0
        self._more = asyncio.Event()

    @property
    def stands_still_s(self) -> float:
        """For how long nothing could be told, because a record is being written."""
        return time.monotonic() - self._began_s if self._writing else 0.0

    def put(self, record: Record | None, act: Callable[[], None]) -> None:
        """Do `act` as soon as `record`, and all that came before it, is durable: at once, if all is."""
        if record is None and not self._waiting and not self._writing:
            act()
            return
        self._waiting.append(_Entry(record, act))
        self._more.set()

    async def run(self) -> None:
        """Write and act, until cancelled.

        Raises:
            StoreLost: somebody else leads now; what waits is never done.
        """
        while True:
            await self._more.wait()
            self._more.clear()
            batch, self._waiting = self._waiting, []
            self._writing, self._began_s = True, time.monotonic()
            try:
                await self._append([entry.record for entry in batch if entry.record is not None])
            finally:
                self._writing = False
            for entry in batch:
                entry.act()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all that was put so far is durable and done, or for `timeout_s`."""
        done = asyncio.Event()
        self.put(None, done.set)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), timeout_s)

    async def _append(self, records: Sequence[Record]) -> None:
        if not records:
            return
        mention_s = time.monotonic()
        while True:
            try:
                await self._store.append(records)
                return
            except StoreLost:
                raise
            except OSError as error:
                if time.monotonic() >= mention_s:
                    mention_s = time.monotonic() + MENTION_S
                    _log.error("all jobs stand still until a decision can be written down: %s", error)
            await asyncio.sleep(RETRY_S)
