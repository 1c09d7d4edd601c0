"""Leads while it has the store: reads the jobs, writes decisions before they are announced, and looks at the time.

Without a store the coordinator always leads, and forgets everything when it dies: its groups then found their jobs
again on the states that they hold.
"""

import asyncio
import logging
import time

from jaxft_coordinator.shell._jobs import Jobs, Streams
from jaxft_coordinator.shell._journal import Journal
from jaxft_coordinator.stores import Opened, Store, StoreLost

_log = logging.getLogger("jaxft_coordinator")


class Leading:
    """Leads a coordinator's jobs, and stands by while another coordinator does."""

    def __init__(self, jobs: Jobs, store: Store | None, streams: Streams, *, tick_s: float = 0.1) -> None:
        self._jobs = jobs
        self._store = store
        self._streams = streams
        self._tick_s = tick_s
        self._journal: Journal | None = None

    @property
    def leader(self) -> str:
        """The address of the coordinator that leads, as far as is known; "" if none does."""
        return "" if self._store is None else self._store.leader

    async def run(self, address: str) -> None:
        """Wait to lead, then lead, and start over when another has taken over; until cancelled.

        Raises:
            Exception: the store cannot be read.
        """
        if self._store is None:
            # From the clock, so that terms grow over restarts that remember nothing; if the clock is behind, terms
            # are learned from the groups (`coordinator/terms.py`).
            self._jobs.begin(Opened(int(time.time())), None)
            self._streams.leads()
            await self._tick_forever()
            return
        while True:
            opened = await self._store.open(address)
            self._journal = Journal(self._store, opened.jobs, self._jobs.refused)
            self._jobs.begin(opened, self._journal)
            self._streams.leads()
            _log.info("leads as %s, under term %d, with %d jobs", address, opened.term, len(self._jobs))
            reason = await self._until_lost(self._store, self._journal)
            self._jobs.stand_down()
            self._jobs.clear()
            _log.warning("no longer leads: %s", reason)
            self._streams.stands_down(reason)

    async def flush(self, timeout_s: float) -> None:
        """Wait until pending decisions are durable and announced; `run` must still be running."""
        if self._journal is not None:
            await self._journal.flush(timeout_s)

    async def close(self) -> None:
        """Let another coordinator lead. Call this after `run` has ended."""
        if self._store is not None:
            await self._store.close()
        self._jobs.clear()

    async def _until_lost(self, store: Store, journal: Journal) -> str:
        """Lead until another coordinator does, and return why."""
        writing = asyncio.create_task(journal.run())
        lost = asyncio.create_task(store.lost())
        ticking = asyncio.create_task(self._tick_forever())
        tasks = (writing, lost, ticking)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                return lost.result()
            failed = writing if writing.done() else ticking
            if isinstance(error := failed.exception(), StoreLost):
                return str(error)
            assert error is not None
            raise error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self._jobs.tick()
