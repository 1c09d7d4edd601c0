"""An etcd that is killed, restored, emptied, written to by others, or not there yet."""

import asyncio
import logging
import re
from pathlib import Path

import pytest
from jaxft_coordinator.stores import EtcdStore, StoreLost, _store

from tests.stores import examples
from tests.stores.etcd_server import Etcd, etcd_in, free_ports
from tests.stores.proxy import proxy_to
from tests.stores.scenarios import LONG_S, check_term_grows, run, until, written

pytestmark = pytest.mark.processes


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
    """Else it would write the next decision among older ones, and the next leader would take a mixture of both."""

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
                rf"'{opened.term}/2'\)\. Each job continues"
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
    store = EtcdStore([etcd.endpoint], prefix, ttl_s=LONG_S)
    run(lambda: check_term_grows(store, lambda: etcd.ctl("del", "--prefix", prefix), monkeypatch))


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
