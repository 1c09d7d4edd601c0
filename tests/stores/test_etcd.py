"""A store in a real etcd: who leads when leaders are killed, frozen or cut off, and what is remembered."""

import asyncio
import errno
import logging
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jaxft_coordinator import _journal
from jaxft_coordinator.stores import EtcdStore, Opened, StoreDamaged, StoreLost, _store, records
from jaxft_protocol.coordinator import bounds
from jaxft_protocol.coordinator.job import Forgotten, Record
from jaxft_protocol.messages import Welcome
from jaxft_protocol.tls import Pem, read_pem

from tests import patience
from tests.coordinator.test_jobs_apart import leading
from tests.stores import examples, processes
from tests.stores.etcd_server import Etcd, etcd_in, free_ports
from tests.stores.proxy import proxy_to

pytestmark = pytest.mark.processes

PATIENCE_S = 60.0
# Leases that are to end in a test; and leases that must not, however long this machine stands still.
SHORT_S, LONG_S = 3, 60


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd_in(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture
def prefix() -> str:
    return f"test/{uuid.uuid4()}"


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await patience.wait_for(scenario())

    asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing signals that a file or a log has changed
        await asyncio.sleep(0.01)


async def written(store: EtcdStore, *appends: list[Record]) -> Opened:
    """Append; return what it knew before."""
    opened = await store.open("a:1")
    for append in appends:
        await store.append(append)
    await store.close()
    return opened


# ---- what is remembered ----


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
        # What a later `Saved` replaces, an older `Moved` must not move.
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


def test_an_append_that_makes_no_sense_writes_nothing(etcd: Etcd, prefix: str):
    """Else the next leader could not read it."""

    async def scenario() -> None:
        store = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
        await store.open("a:1")
        for senseless in (examples.moved(1, "unknown"), examples.saved(places=-1)):
            with pytest.raises(ValueError, match=r"nothing is known of it|places is -1"):
                await store.append([examples.saved("never"), senseless])
        await store.append([examples.saved()])
        await store.close()
        assert list((await written(store)).jobs) == ["llama"]

    run(scenario)


def test_prefixes_do_not_share_anything(etcd: Etcd, prefix: str):
    async def scenario() -> None:
        one, other = (EtcdStore([etcd.endpoint], prefix + end, ttl_s=LONG_S) for end in ("", "-other"))
        await one.open("a:1")
        assert (await written(other, [examples.saved()])).jobs == {}
        assert (await written(other)).jobs
        await one.append([examples.saved("mine")])
        await one.close()
        assert list((await written(one)).jobs) == ["mine"]

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
        for name, value, says in (
            ("saved/a/x", "hello", "not JSON"),
            ("saved/a/x", records.encode(examples.saved("y")).decode(), "does not belong under this key"),
            ("moved/llama", moved, "nothing is known of it"),
            ("moved/good", "hello", "not JSON"),
        ):
            key = f"{prefix}/{name}"
            etcd.ctl("put", key, value)
            opened = await written(store)
            job = name.partition("/")[2]
            assert re.search(rf"{key}.* cannot be read: .*{says}", opened.unreadable[job])
            assert list(opened.unreadable) == [job]
            assert list(opened.jobs) == [each for each in ["good"] if each != job]
            assert etcd.ctl("get", key)["kvs"]
            etcd.ctl("del", key)
        assert examples.step_of(await written(store), "good") == 3

    run(scenario)


def test_a_foreign_term_is_refused(etcd: Etcd, prefix: str):
    async def scenario() -> None:
        store = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
        key = f"{prefix}/term"
        etcd.ctl("put", key, records.encode(examples.moved(1)).decode())
        with pytest.raises(StoreDamaged, match=rf"{key}.* cannot be read: .*not the record of a leader"):
            await store.open("a:1")
        etcd.ctl("del", key)
        await written(store)  # no process has kept the lead

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
            # Nor can one that begins write its term, and it says the same.
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


# ---- who leads ----


def test_a_graceful_close_hands_over_at_once(
    etcd: Etcd, prefix: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_store, "SAY_EVERY_S", 0.1)
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        first, second = (EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S) for _ in range(2))
        led = await first.open("host-a:1")
        await first.append([examples.saved(step=3)])
        opening = asyncio.create_task(second.open("host-b:1"))
        await until(lambda: "stands by: host-a:1 leads" in caplog.text)
        assert (first.leader, second.leader) == ("host-a:1", "host-a:1")
        lost = asyncio.create_task(first.lost())
        await asyncio.sleep(0)
        assert not lost.done()
        assert not opening.done()
        closed_s = patience.machine_s()
        await first.close()
        opened = await opening
        assert patience.machine_s() - closed_s < LONG_S / 2, "it did not wait for the lease to end"
        assert opened.term > led.term
        assert examples.step_of(opened) == 3
        assert (first.leader, second.leader) == ("", "host-b:1")
        assert "closed" in await lost
        with pytest.raises(StoreLost, match="closed"):
            await first.append([examples.saved()])
        await second.close()

    run(scenario)


def test_who_has_not_opened_it_cannot_append(etcd: Etcd, prefix: str):
    async def scenario() -> None:
        store = EtcdStore([etcd.endpoint], prefix)
        with pytest.raises(StoreLost, match="not opened"):
            await store.append([examples.moved(1)])
        assert (await written(store)).jobs == {}

    run(scenario)


def test_whoever_gives_up_waiting_holds_nothing(etcd: Etcd, prefix: str):
    async def scenario() -> None:
        first, second = (EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S) for _ in range(2))
        await first.open("a:1")
        opening = asyncio.create_task(second.open("b:1"))
        await until(lambda: second.leader == "a:1")
        opening.cancel()
        await asyncio.wait([opening])
        await first.close()
        await first.open("a:1")
        await first.close()

    run(scenario)


def test_a_crowd_of_standbys_makes_one_leader_after_the_other(etcd: Etcd, prefix: str):
    async def scenario() -> None:
        terms: list[int] = []

        async def lead_once(number: int) -> None:
            store = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
            opened = await store.open(f"host-{number}:1")
            step = examples.step_of(opened) if opened.jobs else -1
            assert step == len(terms) - 1
            terms.append(opened.term)
            await store.append([examples.saved(step=step + 1)])
            await store.close()

        await asyncio.gather(*(lead_once(number) for number in range(5)))
        assert terms == sorted(set(terms))

    run(scenario)


def options(etcd: Etcd, prefix: str, **more: Any) -> dict[str, Any]:
    return {"kind": "etcd", "endpoints": [etcd.endpoint], "prefix": prefix, "ttl_s": SHORT_S, **more}


def until_step(process: processes.Process, step: int) -> None:
    """Or until it leads no more: its lease is short, and this machine may stand still."""
    while (said := process.hear("acknowledged", "refused"))["event"] == "acknowledged" and said[
        "step"
    ] < step:
        pass


def stands_by(process: processes.Process) -> None:
    deadline_s = patience.machine_s() + PATIENCE_S
    while "stands by" not in process.log.read_text():
        assert patience.machine_s() < deadline_s
        time.sleep(0.01)


def test_who_stands_by_takes_over_when_the_leader_is_killed(etcd: Etcd, prefix: str, tmp_path: Path):
    with processes.members(tmp_path) as members:
        first = members.start("host-a:1", **options(etcd, prefix))
        led = first.hear("leads")
        second = members.start("host-b:1", **options(etcd, prefix, ttl_s=LONG_S))
        stands_by(second)
        first.tell("forever")
        until_step(first, 25)
        killed_s = patience.machine_s()
        acknowledged = first.kill()
        taken = second.hear("leads")
        took_s = patience.machine_s() - killed_s
        # The allowance is for this machine; etcd itself needs at most a second more than the lease.
        assert took_s < SHORT_S + 2 + 8, took_s
        assert taken["term"] > led["term"]
        assert taken["step"] in (acknowledged[-1], acknowledged[-1] + 1)
        assert second.ask("one", "acknowledged")["step"] == taken["step"] + 1


def test_a_leader_that_was_frozen_is_fenced_when_it_wakes(etcd: Etcd, prefix: str, tmp_path: Path):
    with processes.members(tmp_path) as members:
        first = members.start("host-a:1", **options(etcd, prefix))
        led = first.hear("leads")
        first.tell("forever")
        until_step(first, 10)
        second = members.start("host-b:1", **options(etcd, prefix, ttl_s=LONG_S))
        stands_by(second)
        first.stop()
        taken = second.hear("leads")
        assert taken["term"] > led["term"]
        step = second.ask("one", "acknowledged")["step"]
        first.wake()
        lost = first.hear("lost")
        (refused,) = [said for said in first.heard if said["event"] == "refused"]
        assert lost["why"] == refused["why"]
        assert "its lease" in lost["why"]
        acknowledged = first.end()
        assert max(acknowledged) <= taken["step"], (
            "nothing that it acknowledged is unknown to the next leader"
        )
        assert second.ask("one", "acknowledged")["step"] == step + 1


def test_a_leader_cut_off_from_etcd_gives_up_and_cannot_come_back(etcd: Etcd, prefix: str):
    async def scenario() -> None:
        async with proxy_to(etcd.port) as proxy:
            first = EtcdStore([proxy.endpoint], prefix, ttl_s=SHORT_S)
            second = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
            await first.open("host-a:1")
            await first.append([examples.saved(step=1)])
            opening = asyncio.create_task(second.open("host-b:1"))
            await until(lambda: second.leader == "host-a:1")
            proxy.hold()
            append = asyncio.create_task(first.append([examples.moved(2)]))
            assert "could not be renewed in time" in await first.lost()
            with pytest.raises(StoreLost, match="could not be renewed in time"):
                await append
            opened = await opening
            assert examples.step_of(opened) == 1
            # Now all that it has ever sent arrives at last.
            proxy.let_go()
            with pytest.raises(StoreLost):
                await first.append([examples.moved(2)])
            assert first.leader == ""
            await second.append([examples.saved(step=7)])
            # It stands by, like any other.
            again = asyncio.create_task(first.open("host-a:1"))
            await until(lambda: first.leader == "host-b:1")
            await second.close()
            assert examples.step_of(await again) == 7
            await first.close()

    run(scenario)


def test_a_request_that_arrives_late_changes_nothing(etcd: Etcd, prefix: str):
    """It was sent again meanwhile, and others after it: a job must not go back to what it said."""

    async def scenario() -> None:
        async with proxy_to(etcd.port) as proxy:
            store = EtcdStore([proxy.endpoint], prefix, ttl_s=9)  # a request may take a third of it
            await store.open("a:1")
            await store.append([examples.saved(step=1)])
            (late,) = [
                connection for connection in proxy.connections if b"saved/llama" in connection.up.passed
            ]
            late.hold()
            append = asyncio.create_task(store.append([examples.moved(2)]))
            await until(lambda: b"moved/llama" in late.held_request)
            pieces = len(late.up.held or [])
            await append  # over a new connection
            await store.append([examples.moved(3)])
            answered = len(late.down.passed)
            late.let_go(pieces)
            # It is refused with the keys that it was compared with.
            await until(lambda: f"{prefix}/written".encode() in late.down.passed[answered:])
            await store.append([examples.moved(4)])
            await store.close()
            assert examples.step_of(await written(store)) == 4

    run(scenario)


def test_an_append_whose_caller_stopped_waiting_is_not_taken_for_the_next(etcd: Etcd, prefix: str):
    async def scenario() -> None:
        async with proxy_to(etcd.port) as proxy:
            store = EtcdStore([proxy.endpoint], prefix, ttl_s=LONG_S)
            await store.open("a:1")
            await store.append([examples.saved(step=1)])
            for connection in proxy.connections:
                connection.down.held = []
            append = asyncio.create_task(store.append([examples.saved("stray")]))
            await until(lambda: etcd.ctl("get", f"{prefix}/saved/stray").get("count"))
            append.cancel()
            await asyncio.wait([append])
            assert append.cancelled()
            proxy.let_go()
            await store.append([examples.moved(2)])
            await store.close()
            opened = await written(store)
            assert sorted(opened.jobs) == ["llama", "stray"]
            assert examples.step_of(opened) == 2

    run(scenario)


def test_an_append_that_still_waits_when_the_store_is_closed_is_lost(etcd: Etcd, prefix: str):
    """And is not cancelled: its caller was not."""

    async def scenario() -> None:
        async with proxy_to(etcd.port) as proxy:
            store = EtcdStore([proxy.endpoint], prefix, ttl_s=SHORT_S)
            await store.open("a:1")
            proxy.hold()
            append = asyncio.create_task(store.append([examples.saved()]))
            await until(lambda: any(b"saved/llama" in one.held_request for one in proxy.connections))
            await store.close()
            with pytest.raises(StoreLost, match=r"closed its store|its lease"):
                await append

    run(scenario)


def test_a_leader_goes_on_when_etcd_is_killed_and_comes_back(
    etcd: Etcd, prefix: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_store, "SAY_EVERY_S", 0.1)
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        store = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
        opened = await store.open("a:1")
        await store.append([examples.saved(step=1)])
        etcd.kill()
        append = asyncio.create_task(store.append([examples.moved(2)]))
        await until(lambda: f"waiting for etcd at {etcd.endpoint} to write a decision" in caplog.text)
        assert not append.done()
        await asyncio.to_thread(etcd.start)
        await append
        assert store.leader == "a:1"
        await store.append([examples.moved(3)])
        await store.close()
        again = await written(store)
        assert examples.step_of(again) == 3
        assert again.term > opened.term

    run(scenario)


def test_a_leader_notices_that_etcd_was_restored_from_an_older_snapshot(tmp_path: Path):
    """Else it would write the next decision beside older ones, and the next leader would take a mixture of both."""

    async def scenario() -> None:
        with etcd_in(tmp_path) as etcd:
            store = EtcdStore([etcd.endpoint], ttl_s=LONG_S)
            opened = await store.open("a:1")
            await store.append([examples.saved(step=1)])
            await asyncio.to_thread(etcd.ctl, "snapshot", "save", str(tmp_path / "snapshot"))
            await store.append([examples.saved(step=2, places=3)])
            etcd.kill()
            await asyncio.to_thread(etcd.restore, tmp_path / "snapshot")
            await asyncio.to_thread(etcd.start)
            older = (
                rf"etcd at {etcd.endpoint} has forgotten decisions .* \(it has write '{opened.term}/1', not "
                rf"'{opened.term}/2'\)\. Each job goes on"
            )
            with pytest.raises(StoreLost, match=older):
                await store.append([examples.moved(3)])
            assert re.match(older, await store.lost())
            again = await store.open("a:1")
            assert examples.step_of(again) == 1
            assert again.term > opened.term
            await store.append([examples.moved(4)])
            await store.close()
            assert examples.step_of(await written(EtcdStore([etcd.endpoint], ttl_s=LONG_S))) == 4

    run(scenario)


@pytest.mark.parametrize("change", [("del",), ("put", "nonsense")])
def test_a_leader_notices_that_another_program_writes_under_its_keys(
    change: tuple[str, ...], etcd: Etcd, prefix: str
):
    async def scenario() -> None:
        store = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
        await store.open("a:1")
        command, *value = change
        await asyncio.to_thread(etcd.ctl, command, f"{prefix}/written", *value)
        with pytest.raises(StoreLost, match="another program has written to it"):
            await store.append([examples.saved()])
        await store.close()

    run(scenario)


def test_a_term_grows_although_etcd_is_emptied_and_the_clock_set_back(
    etcd: Etcd, prefix: str, monkeypatch: pytest.MonkeyPatch
):
    async def scenario() -> None:
        store = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
        first = await store.open("a:1")
        await asyncio.to_thread(etcd.ctl, "del", "--prefix", prefix)
        monkeypatch.setattr(time, "time", lambda: first.term - 86_400.0)
        with pytest.raises(StoreLost):
            await store.append([examples.saved()])
        assert (await store.open("a:1")).term == first.term + 1
        await store.close()

    run(scenario)


def test_a_leader_renews_its_lease(etcd: Etcd, prefix: str):
    def left_s() -> int:
        lease = etcd.ctl("get", f"{prefix}/leader")["kvs"][0]["lease"]
        return etcd.ctl("lease", "timetolive", f"{lease:x}")["ttl"]

    async def scenario() -> None:
        store = EtcdStore([etcd.endpoint], prefix, ttl_s=9)
        await store.open("a:1")
        before_s, now_s = 9, await asyncio.to_thread(left_s)
        while now_s <= before_s:  # it falls, and rises again
            await asyncio.sleep(0.1)
            before_s, now_s = now_s, await asyncio.to_thread(left_s)
        await store.close()

    run(scenario)


def test_a_coordinator_waits_for_an_etcd_that_is_not_there(
    etcd: Etcd, prefix: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_store, "SAY_EVERY_S", 0.1)
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        store = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
        etcd.kill()
        opening = asyncio.create_task(store.open("a:1"))
        await until(lambda: f"waiting for etcd at {etcd.endpoint}: " in caplog.text)
        await asyncio.to_thread(etcd.start)
        await opening
        await store.close()

    run(scenario)


def test_a_member_of_etcd_that_is_dead_or_hangs_is_passed_over(etcd: Etcd, prefix: str):
    async def scenario() -> None:
        async with proxy_to(etcd.port) as proxy:
            proxy.hold()
            dead = f"127.0.0.1:{free_ports()[0]}"
            store = EtcdStore([dead, proxy.endpoint, f"http://{etcd.endpoint}/"], prefix, ttl_s=6)
            await written(store, [examples.saved(step=1)], [examples.moved(2)])
            assert examples.step_of(await written(store)) == 2

    run(scenario)


def test_a_password_is_given(tmp_path: Path):
    with etcd_in(tmp_path) as etcd:
        etcd.ctl("user", "add", "root:secret")
        etcd.ctl("user", "grant-role", "root", "root")
        etcd.ctl("auth", "enable")

        async def scenario() -> None:
            store = EtcdStore([etcd.endpoint], ttl_s=LONG_S, user="root", password="secret")
            await store.open("a:1")
            await store.append([examples.saved(step=1)])
            # It forgets whom it has let in.
            etcd.kill()
            await asyncio.to_thread(etcd.start)
            await store.append([examples.moved(2)])
            await store.close()
            assert examples.step_of(await written(store)) == 2

        run(scenario)


@pytest.mark.parametrize(
    ("password", "advice"),
    [
        (
            "changed",
            "authentication failed, .* Put the user's password into --etcd-password-file, and restart",
        ),
        ("secret", "permission denied. Let the user read and write the keys that begin with jaxft/"),
    ],
)
def test_it_says_what_to_do_about_a_user_that_etcd_refuses(
    password: str, advice: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    with etcd_in(tmp_path) as etcd:
        for words in (
            ("user", "add", "root:secret"),
            ("user", "grant-role", "root", "root"),
            ("user", "add", "powerless:secret"),
            ("auth", "enable"),
        ):
            etcd.ctl(*words)

        async def scenario() -> None:
            store = EtcdStore([etcd.endpoint], ttl_s=LONG_S, user="powerless", password=password)
            opening = asyncio.create_task(store.open("a:1"))
            await until(lambda: re.search(advice, caplog.text))
            opening.cancel()
            await asyncio.wait([opening])

        run(scenario)


def make_certificate(folder: Path) -> Pem:
    """A certificate for etcd and for who dials it, that is its own authority."""
    subject = ["-subj", "/CN=etcd", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        "key.pem",
        "-out",
        "cert.pem",
    ]
    patience.run([*command, *subject], cwd=folder, check=True, capture_output=True, limit_s=PATIENCE_S)
    return read_pem(ca=folder / "cert.pem", cert=folder / "cert.pem", key=folder / "key.pem")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate with")
def test_etcd_may_speak_tls_and_ask_for_certificates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_store, "SAY_EVERY_S", 0.1)
    caplog.set_level(logging.INFO)
    pem = make_certificate(tmp_path)
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    flags = ("--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", cert)
    with etcd_in(tmp_path, *flags, scheme="https") as etcd:

        async def scenario() -> None:
            endpoint = f"https://{etcd.endpoint}"
            store = EtcdStore([endpoint], ttl_s=LONG_S, tls=pem)
            await store.open("a:1")
            await store.append([examples.saved(step=1)])
            standby = EtcdStore([etcd.endpoint], ttl_s=LONG_S, tls=pem)
            opening = asyncio.create_task(standby.open("b:1"))
            await until(lambda: standby.leader == "a:1")
            await store.close()
            assert examples.step_of(await opening) == 1
            await standby.close()
            for wrong in (Pem(), Pem(ca=pem.ca)):
                caplog.clear()
                store = EtcdStore([endpoint], tls=wrong)
                opening = asyncio.create_task(store.open("c:1"))
                await until(lambda: f"waiting for etcd at {etcd.endpoint}" in caplog.text)
                opening.cancel()
                await asyncio.wait([opening])

        run(scenario)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate with")
def test_the_command_speaks_tls_and_gives_a_password(tmp_path: Path):
    make_certificate(tmp_path)
    cert, key, password = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "password"))
    Path(password).write_text("secret\n")
    Path(password).chmod(0o600)
    with etcd_in(tmp_path, "--cert-file", cert, "--key-file", key, scheme="https") as etcd:
        for words in (
            ("user", "add", "root:secret"),
            ("user", "grant-role", "root", "root"),
            ("auth", "enable"),
        ):
            etcd.ctl("--cacert", cert, *words)
        coordinator = [sys.executable, "-m", "jaxft_coordinator", "--bind", "localhost:0"]
        flags = ["--etcd", etcd.endpoint, "--etcd-ca", cert, "--etcd-cert", cert, "--etcd-key", key]
        login = ["--etcd-user", "root", "--etcd-password-file", password]
        for command, said in (
            ([*coordinator, *flags, *login], "leads as "),
            ([*coordinator, *flags], f"waiting for etcd at {etcd.endpoint}"),
        ):
            assert said in what_it_says(command, until=said)


def what_it_says(command: list[str], until: str) -> str:
    """What a process writes to its standard error, up to a line with these words; then it is killed."""
    lines: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        cancel = patience.alarm(patience.LIMIT_S, process.kill)
        try:
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line)
                if until in line:
                    break
        finally:
            cancel()
            process.kill()
    return "".join(lines)


# ---- how it is made ----


def test_what_cannot_be_an_endpoint_is_refused():
    for endpoint in ("", "etcd", "etcd:", ":2379", "etcd:0", "etcd:x", "etcd:70000", "http://etcd:1/path"):
        with pytest.raises(ValueError, match="not host:port"):
            EtcdStore([endpoint])
    for mixed in (["https://etcd-0:2379", "http://etcd-1:2379"], ["ftp://etcd-0:2379"]):
        with pytest.raises(ValueError, match=r"all endpoints are https://"):
            EtcdStore(mixed)
    with pytest.raises(ValueError, match=r"all endpoints are https://"):
        EtcdStore(["http://etcd-0:2379"], tls=Pem())
    with pytest.raises(ValueError, match="at least one endpoint"):
        EtcdStore([])
    EtcdStore(["[::1]:2379", "etcd-0.etcd:2379", "http://etcd-1:2379/"])
    EtcdStore(["https://etcd-0:2379", "etcd-1:2379"])


def test_without_the_client_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "aetcd", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxft-coordinator\[etcd\]'"):
        EtcdStore(["etcd:2379"])
