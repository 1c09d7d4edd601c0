"""Nothing is told before it is durable, and everything in order; on a store that the test can hold up."""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from jaxft_coordinator._journal import Journal
from jaxft_coordinator.core.job import Moved, Record
from jaxft_coordinator.core.messages import QuorumId, Step
from jaxft_coordinator.stores import Opened, StoreLost

from tests import patience


class HeldStore:
    """Writes when it is let, and fails when it is told to."""

    def __init__(self) -> None:
        self.batches: list[list[Record]] = []
        self.gate = asyncio.Event()
        self.fails: list[Exception] = []
        self.leader = ""

    async def open(self, address: str) -> Opened:
        return Opened(1)

    async def append(self, records: Sequence[Record]) -> None:
        await self.gate.wait()
        if self.fails:
            raise self.fails.pop(0)
        self.batches.append(list(records))

    async def lost(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def close(self) -> None:
        pass


def moved(step: int) -> Moved:
    return Moved("job", Step(step), QuorumId(1))


def run(scenario: Callable[[HeldStore, Journal, list[str]], Awaitable[None]]) -> None:
    async def bounded() -> None:
        store = HeldStore()
        journal = Journal(store)
        writing = asyncio.create_task(journal.run())
        try:
            async with asyncio.timeout(patience.FAR_S):
                await scenario(store, journal, [])
        finally:
            writing.cancel()

    asyncio.run(bounded())


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_an_act_without_a_record_is_done_at_once_if_nothing_waits():
    async def scenario(store: HeldStore, journal: Journal, told: list[str]) -> None:
        journal.put(None, lambda: told.append("waiting"))
        assert told == ["waiting"]

    run(scenario)


def test_acts_wait_for_the_records_before_them_and_keep_their_order():
    async def scenario(store: HeldStore, journal: Journal, told: list[str]) -> None:
        journal.put(moved(1), lambda: told.append("commit 1"))
        journal.put(None, lambda: told.append("welcome"))
        await turns()
        journal.put(None, lambda: told.append("waiting"))
        journal.put(moved(2), lambda: told.append("commit 2"))
        await turns()
        assert told == []
        store.gate.set()
        await journal.flush(10.0)
        assert told == ["commit 1", "welcome", "waiting", "commit 2"]

    run(scenario)


def test_what_comes_while_one_batch_is_written_goes_into_one_other():
    async def scenario(store: HeldStore, journal: Journal, told: list[str]) -> None:
        journal.put(moved(1), lambda: None)
        await turns()
        for step in range(2, 12):
            journal.put(moved(step), lambda: None)
        store.gate.set()
        await journal.flush(10.0)
        assert [len(batch) for batch in store.batches] == [1, 10]
        assert [record.step for batch in store.batches for record in batch if isinstance(record, Moved)] == [
            *range(1, 12)
        ]

    run(scenario)


def test_a_full_disk_is_waited_for_and_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jaxft_coordinator._journal.RETRY_S", 0.001)

    async def scenario(store: HeldStore, journal: Journal, told: list[str]) -> None:
        store.fails = [OSError(errno.ENOSPC, "No space left on device")] * 3
        store.gate.set()
        with caplog.at_level(logging.ERROR, "jaxft_coordinator"):
            journal.put(moved(1), lambda: told.append("commit 1"))
            await journal.flush(10.0)
        assert told == ["commit 1"]
        (line,) = caplog.messages
        assert "all jobs stand still" in line
        assert "No space left on device" in line

    run(scenario)


def test_when_the_lead_is_lost_nothing_that_waits_is_ever_told():
    async def scenario(store: HeldStore, journal: Journal, told: list[str]) -> None:
        journal = Journal(store)
        writing = asyncio.create_task(journal.run())
        store.fails = [StoreLost("another leads")]
        journal.put(moved(1), lambda: told.append("commit 1"))
        journal.put(None, lambda: told.append("welcome"))
        store.gate.set()
        with pytest.raises(StoreLost, match="another leads"):
            await writing
        assert told == []
        assert store.batches == []

    run(scenario)


def test_a_flush_does_not_wait_for_ever(tmp_path: Path):
    async def scenario(store: HeldStore, journal: Journal, told: list[str]) -> None:
        journal.put(moved(1), lambda: told.append("commit 1"))
        await journal.flush(0.05)
        assert told == []

    run(scenario)
