"""A store in a real etcd: its contents."""

import asyncio
import errno
import logging
import re
import time
from pathlib import Path

import pytest
from jaxft_coordinator.shell import _journal
from jaxft_coordinator.stores import EtcdStore, records
from jaxft_protocol.coordinator import bounds
from jaxft_protocol.coordinator.job import Forgotten
from jaxft_protocol.messages import Welcome

from tests.coordinator.test_jobs_apart import leading
from tests.stores import examples
from tests.stores.etcd_server import Etcd, etcd_in
from tests.stores.scenarios import LONG_S, run, until, written

pytestmark = pytest.mark.processes


def test_what_was_appended_is_remembered(etcd: Etcd, prefix: str):
    async def scenario() -> None:
        def store() -> EtcdStore:
            return EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)

        before_s = int(time.time())
        first = await written(
            store(), [examples.saved(step=4), examples.saved("a/b")], [examples.moved(5)], []
        )
        assert first.jobs == {}
        assert before_s <= first.term <= time.time()
        # An older `Moved` must not move a later `Saved`.
        second = await written(
            store(), [examples.moved(6), Forgotten("a/b")], [examples.saved("x", 1), examples.moved(2, "x")]
        )
        assert examples.step_of(second) == 5
        assert examples.step_of(second, "a/b") == 0
        third = await written(
            store(),
            [examples.moved(3, "x"), examples.saved("x", 1)],
            [examples.saved("a", 9), Forgotten("a")],
        )
        assert sorted(third.jobs) == ["llama", "x"]
        assert examples.step_of(third, "x") == 2
        fourth = await written(store())
        assert fourth.jobs == examples.folded(
            [[examples.saved(step=4), examples.moved(6), examples.saved("x", 1)]]
        )
        assert fourth.term > third.term > second.term > first.term

    run(scenario)


def test_many_jobs_are_appended_at_once(etcd: Etcd, prefix: str):
    """More than etcd takes in one transaction: 128 operations, and 1.5 MB."""
    jobs = [f"job-{i}" for i in range(300)]

    async def scenario() -> None:
        store = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
        await written(
            store,
            [examples.big(f"big-{i}", 600_000) for i in range(5)],
            [Forgotten(f"big-{i}") for i in range(5)],
        )
        await written(store, [examples.saved(job) for job in jobs], [examples.moved(1, job) for job in jobs])
        opened = await store.open("a:1")
        assert {examples.step_of(opened, job) for job in jobs} == {1}
        await store.append([Forgotten(job) for job in jobs])
        await store.close()
        assert (await written(store)).jobs == {}

    run(scenario)


def test_too_big_a_record_is_refused_with_its_size_and_the_next_is_not(etcd: Etcd, prefix: str):
    async def scenario() -> None:
        store = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
        await store.open("a:1")
        for size in (1_600_000, 4_000_000):  # the second is more than etcd would even receive
            with pytest.raises(
                OSError, match=rf"have {size // 1000}\d+ bytes, but etcd takes .*--max-request-bytes"
            ) as caught:
                await store.append([examples.big("llama", size)])
            assert caught.value.errno == errno.EMSGSIZE
        await store.append([examples.big("llama", 1_000_000)])
        await store.close()
        assert len((await written(store)).jobs) == 1

    run(scenario)


def test_the_longest_record_that_the_core_lets_pass_is_taken(etcd: Etcd, prefix: str):
    """And many of them at once, each in a separate request."""
    size = bounds.MAX_RECORD_BYTES - bounds.saved_bytes(examples.big("job-0", 0))
    longest = [examples.big(f"job-{number}", size) for number in range(5)]
    assert bounds.problem(longest[0]) == ""
    assert bounds.problem(examples.big("job-0", size + 1)) != ""

    async def scenario() -> None:
        store = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
        await written(store, [*longest, examples.saved()])
        assert sorted((await written(store)).jobs) == [*(f"job-{number}" for number in range(5)), "llama"]
        await written(store, [Forgotten(f"job-{number}") for number in range(5)])

    run(scenario)


def test_one_job_that_etcd_does_not_take_holds_up_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """It was retried forever, ahead of every other job's decisions."""
    monkeypatch.setattr(_journal, "RETRY_S", 0.05)
    with etcd_in(tmp_path, "--max-request-bytes", "20000") as etcd:

        async def scenario() -> None:
            store = EtcdStore([etcd.endpoint], ttl_s=LONG_S)
            async with leading(store) as desk:
                desk.come("good", "a")
                await desk.commits("good", "a")
                desk.come("big", "a" * 200, settings={"text": "x" * 30_000})
                for _ in range(10):
                    await desk.commits("good", "a")
                assert [type(message) for message in desk.heard("big", "a" * 200)] == [Welcome]
                await until(lambda: "[big] is blocked" in caplog.text)
                desk.close("big", "a" * 200)
                for _ in range(3):
                    await desk.commits("good", "a")
                caplog.clear()
                job = desk.jobs.get("good")
                assert job is not None
                assert job.frontier is not None
                assert desk.jobs._journal is not None
                assert examples.frontier_of(desk.jobs._journal.known["good"]) == job.frontier.step == 14

        run(scenario)


def test_a_job_that_does_not_read_is_kept_as_it_is_and_the_others_begin(etcd: Etcd, prefix: str):
    moved = records.encode(examples.moved(1)).decode()

    async def scenario() -> None:
        store = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
        await written(store, [examples.saved("good", 3)])
        for name, value, reason in (
            ("saved/a/x", "hello", "not JSON"),
            ("saved/a/x", records.encode(examples.saved("y")).decode(), "does not belong under this key"),
            ("moved/llama", moved, "nothing is known of it"),
            ("moved/good", "hello", "not JSON"),
        ):
            key = f"{prefix}/{name}"
            etcd.ctl("put", key, value)
            opened = await written(store)
            job = name.partition("/")[2]
            assert re.search(rf"{key}.* cannot be read: .*{reason}", opened.unreadable[job])
            assert list(opened.unreadable) == [job]
            assert list(opened.jobs) == [each for each in ["good"] if each != job]
            assert etcd.ctl("get", key)["kvs"]
            etcd.ctl("del", key)
        assert examples.step_of(await written(store), "good") == 3

    run(scenario)


async def fill(store: EtcdStore) -> None:
    # etcd looks at its size ten times a second.
    for i in range(1000):
        await store.append([examples.big("big", 1_000_000 + i)])


def test_a_full_etcd_fails_the_append_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with etcd_in(tmp_path, "--quota-backend-bytes", str(4 << 20)) as etcd:

        async def scenario() -> None:
            store = EtcdStore([etcd.endpoint], ttl_s=LONG_S)
            await store.open("a:1")
            await store.append([examples.saved(step=3)])
            with pytest.raises(
                OSError, match=r"nothing was written: .*space exceeded.*alarm disarm"
            ) as caught:
                await fill(store)
            assert caught.value.errno == errno.ENOSPC
            with pytest.raises(OSError, match="space exceeded"):
                await store.append([examples.moved(4)])
            # Nor can a coordinator that begins write its term; its log has the same reason.
            await store.close()
            opening = asyncio.create_task(store.open("a:1"))
            await until(
                lambda: re.search(
                    "waiting for etcd .*space exceeded. Compact and .*alarm disarm", caplog.text
                )
            )
            revision = etcd.ctl("get", "jaxft/leader")["header"]["revision"]
            etcd.ctl("compaction", str(revision))
            etcd.ctl("defrag")
            etcd.ctl("alarm", "disarm")
            await opening
            await store.append([examples.moved(4)])
            await store.close()
            assert examples.step_of(await written(store)) == 4

        run(scenario)
