"""Nothing is announced before it is durable, and everything in order; on a store that the test can hold up."""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence

import pytest
from jaxft_coordinator.shell._journal import Journal
from jaxft_coordinator.stores import Opened, StoreLost
from jaxft_coordinator.stores.records import RecordError
from jaxft_protocol.coordinator.job import Record, Saved

from tests import patience
from tests.stores import examples


class HeldStore:
    """Writes when the test allows it, and fails when the test asks for it."""

    def __init__(self) -> None:
        self.batches: list[list[Record]] = []
        self.gate = asyncio.Event()
        self.fails: list[Exception] = []
        self.refuses: dict[str, Exception] = {}  # jobs, and with what
        self.refused: list[str] = []  # jobs
        self.leader = ""

    async def open(self, _address: str) -> Opened:
        return Opened(1)

    async def append(self, records: Sequence[Record]) -> None:
        await self.gate.wait()
        if self.fails:
            raise self.fails.pop(0)
        for record in records:
            if record.job in self.refuses:
                raise self.refuses[record.job]
        self.batches.append(list(records))

    async def lost(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def close(self) -> None:
        pass


def moved(step: int, job: str = "job") -> Saved:
    """The record of a commit, in full."""
    return examples.saved(job, step)


def run(scenario: Callable[[HeldStore, Journal, list[str]], Awaitable[None]]) -> None:
    async def bounded() -> None:
        store = HeldStore()
        journal = Journal(store, {}, lambda job, _error: store.refused.append(job))
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
    async def scenario(_store: HeldStore, journal: Journal, sent: list[str]) -> None:
        journal.put("job", None, lambda: sent.append("waiting"))
        assert sent == ["waiting"]

    run(scenario)


def test_acts_wait_for_the_records_before_them_and_keep_their_order():
    async def scenario(store: HeldStore, journal: Journal, sent: list[str]) -> None:
        journal.put("job", moved(1), lambda: sent.append("commit 1"))
        journal.put("job", None, lambda: sent.append("welcome"))
        await turns()
        journal.put("job", None, lambda: sent.append("waiting"))
        journal.put("job", moved(2), lambda: sent.append("commit 2"))
        await turns()
        assert sent == []
        store.gate.set()
        await journal.flush(10.0)
        assert sent == ["commit 1", "welcome", "waiting", "commit 2"]

    run(scenario)


def test_what_comes_while_one_batch_is_written_goes_into_one_other():
    async def scenario(store: HeldStore, journal: Journal, _told: list[str]) -> None:
        journal.put("job", moved(1), lambda: None)
        await turns()
        for step in range(2, 12):
            journal.put("job", moved(step), lambda: None)
        store.gate.set()
        await journal.flush(10.0)
        assert [len(batch) for batch in store.batches] == [1, 10]
        steps = [record for batch in store.batches for record in batch]
        assert steps == [moved(step) for step in range(1, 12)]
        assert journal.known["job"] == moved(11)

    run(scenario)


def test_a_full_disk_is_waited_for_and_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jaxft_coordinator.shell._journal.RETRY_S", 0.001)

    async def scenario(store: HeldStore, journal: Journal, sent: list[str]) -> None:
        store.fails = [OSError(errno.ENOSPC, "No space left on device")] * 3
        store.gate.set()
        with caplog.at_level(logging.ERROR, "jaxft_coordinator"):
            journal.put("job", moved(1), lambda: sent.append("commit 1"))
            await journal.flush(10.0)
        assert sent == ["commit 1"]
        (line,) = caplog.messages
        assert "all jobs are blocked" in line
        assert "No space left on device" in line

    run(scenario)


def test_when_the_lead_is_lost_nothing_that_waits_is_ever_told():
    async def scenario(store: HeldStore, journal: Journal, sent: list[str]) -> None:
        journal = Journal(store, {}, lambda _job, _error: None)
        writing = asyncio.create_task(journal.run())
        store.fails = [StoreLost("another leads")]
        journal.put("job", moved(1), lambda: sent.append("commit 1"))
        journal.put("job", None, lambda: sent.append("welcome"))
        store.gate.set()
        with pytest.raises(StoreLost, match="another leads"):
            await writing
        assert sent == []
        assert store.batches == []

    run(scenario)


def test_a_flush_does_not_wait_for_ever():
    async def scenario(_store: HeldStore, journal: Journal, sent: list[str]) -> None:
        journal.put("job", moved(1), lambda: sent.append("commit 1"))
        await journal.flush(0.05)
        assert sent == []

    run(scenario)


# ---- jobs do not wait for each other ----


def test_a_record_that_is_too_big_holds_up_its_own_job_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jaxft_coordinator.shell._journal.RETRY_S", 0.001)

    async def scenario(store: HeldStore, journal: Journal, sent: list[str]) -> None:
        store.gate.set()
        store.refuses["big"] = OSError(errno.EMSGSIZE, "etcd takes 1.5 MB in one request")
        with caplog.at_level(logging.ERROR, "jaxft_coordinator"):
            journal.put("big", moved(1, "big"), lambda: sent.append("big 1"))
            for step in range(1, 4):
                journal.put("job", moved(step), lambda step=step: sent.append(f"commit {step}"))
                journal.put("big", None, lambda step=step: sent.append(f"big waits {step}"))
                while f"commit {step}" not in sent:  # noqa: ASYNC110 - the journal has no event for it
                    await asyncio.sleep(0.001)
        assert sent == ["commit 1", "commit 2", "commit 3"]
        assert journal.blocked_s("big") > 0
        assert journal.blocked_s("job") == 0
        (line,) = caplog.messages
        assert line == "[big] is blocked until a decision can be written: [Errno 90] " + (
            "etcd takes 1.5 MB in one request"
        )
        del store.refuses["big"]
        await journal.flush(10.0)
        assert sent[3:] == ["big 1", "big waits 1", "big waits 2", "big waits 3"]

    run(scenario)


def test_a_record_that_makes_no_sense_is_dropped_with_all_that_its_job_would_have_said():
    async def scenario(store: HeldStore, journal: Journal, sent: list[str]) -> None:
        journal.put("bad", moved(1, "bad"), lambda: sent.append("bad 1"))
        await turns()
        store.refuses["bad"] = RecordError("places is -1")
        journal.put("job", moved(1), lambda: sent.append("commit 1"))
        journal.put("bad", None, lambda: sent.append("bad 2"))
        store.gate.set()
        await journal.flush(10.0)
        assert sent == ["commit 1"]
        assert store.refused == ["bad"]
        assert list(journal.known) == ["job"]
        journal.put("bad", None, lambda: sent.append("bad again"))
        assert sent == ["commit 1", "bad again"]

    run(scenario)


def test_what_has_no_record_does_not_wait_for_another_job():
    async def scenario(_store: HeldStore, journal: Journal, sent: list[str]) -> None:
        journal.put("slow", moved(1, "slow"), lambda: sent.append("slow"))
        await turns()
        journal.put("job", None, lambda: sent.append("welcome"))
        assert sent == ["welcome"]

    run(scenario)


def test_a_job_apart_is_tried_again_although_its_timer_came_early(monkeypatch: pytest.MonkeyPatch):
    """As timers of uvloop do, which count whole milliseconds: nothing else may ever wake the journal again."""
    monkeypatch.setattr("jaxft_coordinator.shell._journal.RETRY_S", 0.05)

    async def scenario(store: HeldStore, journal: Journal, sent: list[str]) -> None:
        loop = asyncio.get_running_loop()
        punctual = loop.call_at
        monkeypatch.setattr(loop, "call_at", lambda when, *rest, **more: punctual(when - 0.01, *rest, **more))
        store.gate.set()
        store.refuses["big"] = OSError(errno.EMSGSIZE, "etcd takes 1.5 MB in one request")
        journal.put("big", moved(1, "big"), lambda: sent.append("big 1"))
        while not journal.blocked_s("big") > 0.01:
            await turns()
        del store.refuses["big"]
        await journal.flush(patience.LIMIT_S / 10)
        assert sent == ["big 1"]

    run(scenario)
