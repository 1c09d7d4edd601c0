"""Shared by the tests of both stores."""

import asyncio
import contextlib
import sqlite3
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from jaxft_coordinator.stores import EtcdStore, FileStore, Opened, StoreLost
from jaxft_protocol.coordinator.job import Record

from tests import patience
from tests.stores import examples

# Leases that are to end in a test; and leases that must not, however long this machine stands still.
SHORT_S, LONG_S = 3, 60
PATIENCE_S = 60.0


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await patience.wait_for(scenario())

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing signals that a file or a log has changed
        await asyncio.sleep(0.01)


async def written(store: EtcdStore | FileStore, *appends: list[Record]) -> Opened:
    """Append; return the contents before."""
    opened = await store.open("a:1")
    for append in appends:
        await store.append(append)
    await store.close()
    return opened


def put(file: Path, name: str, value: bytes) -> None:
    """Write a value into the file of a store that no process has open, as a faulty or newer coordinator would."""
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        crc = zlib.crc32(value, zlib.crc32(name.encode()))
        database.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (name.encode(), value, crc))


async def check_term_grows(
    store: EtcdStore | FileStore, empty: Callable[[], object], patch: pytest.MonkeyPatch
) -> None:
    """Although the store is emptied under its leader, and the clock is set back by a day."""
    first = await store.open("a:1")
    await asyncio.to_thread(empty)
    patch.setattr(time, "time", lambda: first.term - 86_400.0)
    with pytest.raises(StoreLost):
        await store.append([examples.saved()])
    assert (await store.open("a:1")).term == first.term + 1
    await store.close()
