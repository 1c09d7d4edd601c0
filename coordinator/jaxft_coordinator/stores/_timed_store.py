"""Measures how long a store takes."""

import time
from collections.abc import Sequence

from jaxft_protocol.coordinator.job import Record

from jaxft_coordinator.observe._histogram import Histogram
from jaxft_coordinator.stores import Opened, Store


class TimedStore:
    """A store whose appends are timed.

    Args:
        store: the store.
        appends: where to count how many seconds each successful append took.
    """

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
