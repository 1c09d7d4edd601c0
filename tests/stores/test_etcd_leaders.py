"""Who leads with a real etcd: leaders that are killed, frozen, cut off from it or late."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from jaxft_coordinator.stores import EtcdStore, StoreLost, _store

from tests import patience
from tests.stores import examples, processes
from tests.stores.etcd_server import Etcd
from tests.stores.proxy import proxy_to
from tests.stores.scenarios import LONG_S, PATIENCE_S, SHORT_S, run, until, written

pytestmark = pytest.mark.processes


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
    while (output := process.hear("acknowledged", "refused"))["event"] == "acknowledged" and output[
        "step"
    ] < step:
        pass


def stands_by(process: processes.Process) -> None:
    deadline_s = patience.machine_s() + PATIENCE_S
    while "stands by" not in process.log.read_text():
        assert patience.machine_s() < deadline_s
        time.sleep(0.01)


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
        (refused,) = [output for output in first.heard if output["event"] == "refused"]
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


def test_who_stands_by_without_etcd_names_no_leader(etcd: Etcd, prefix: str):
    """The former leader may have lost etcd too, and groups would be sent to it."""

    async def scenario() -> None:
        async with proxy_to(etcd.port) as proxy:
            first = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
            second = EtcdStore([proxy.endpoint], prefix, ttl_s=SHORT_S)
            await first.open("host-a:1")
            opening = asyncio.create_task(second.open("host-b:1"))
            await until(lambda: second.leader == "host-a:1")
            proxy.hold()
            await until(lambda: second.leader == "")
            proxy.let_go()
            await until(lambda: second.leader == "host-a:1")
            await first.close()
            await opening
            await second.close()

    run(scenario)


def test_a_request_that_arrives_late_changes_nothing(etcd: Etcd, prefix: str):
    """It was sent again meanwhile, and others after it: a job must not go back."""

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
