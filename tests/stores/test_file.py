"""A store in a folder, in this process: contents, leaders, damage."""

import asyncio
import contextlib
import logging
import os
import shutil
import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from jaxft_coordinator.stores import FileStore, Opened, StoreDamaged, StoreLost, _store, records
from jaxft_protocol.coordinator.job import Forgotten, Record

from tests import patience
from tests.stores import examples, scenarios
from tests.stores.scenarios import check_term_grows, run, until

FILE = "decisions.sqlite3"


async def written(folder: Path, *appends: list[Record]) -> Opened:
    """Append to the store in `folder`; return the contents before."""
    return await scenarios.written(FileStore(folder), *appends)


# ---- contents ----


def test_a_new_folder_remembers_nothing_and_is_made(tmp_path: Path):
    async def scenario() -> None:
        before_s = int(time.time())
        opened = await written(tmp_path / "not" / "yet")
        assert opened.jobs == {}
        assert before_s <= opened.term <= time.time()

    run(scenario)


def test_what_was_appended_is_remembered(tmp_path: Path):
    async def scenario() -> None:
        await written(tmp_path, [examples.saved(step=4), examples.saved("other")], [examples.moved(5)])
        await written(tmp_path, [examples.moved(6), Forgotten("other")], [])
        opened = await written(tmp_path)
        (job,) = opened.jobs.values()
        assert job.frontier is not None
        assert (job.job, job.frontier.step) == ("llama", 6)

    run(scenario)


@given(examples.histories(), examples.histories())
@settings(max_examples=15)
def test_what_is_remembered_is_the_fold_of_what_was_appended(
    tmp_path_factory: pytest.TempPathFactory, first: list[list[Record]], second: list[list[Record]]
):
    async def scenario() -> None:
        folder = tmp_path_factory.mktemp("store")
        await written(folder, *first)
        assert (await written(folder)).jobs == examples.folded(first)
        await written(folder, *second)
        assert (await written(folder)).jobs == examples.folded([*first, *second])

    run(scenario)


def test_an_append_that_makes_no_sense_writes_nothing(tmp_path: Path):
    async def scenario() -> None:
        store = FileStore(tmp_path)
        await store.open("a:1")
        with pytest.raises(ValueError, match="nothing is known of it"):
            await store.append([examples.saved(), examples.moved(1, "unknown")])
        await store.close()
        assert (await written(tmp_path, [examples.saved()])).jobs == {}
        assert list((await written(tmp_path)).jobs) == ["llama"]

    run(scenario)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("saved/bad", b'{"v":9,"kind":"saved","job":"bad","what":"is this"}', "has format 9"),
        ("moved/bad", records.encode(examples.moved(1, "bad")), "nothing is known of it"),
    ],
)
def test_a_job_that_cannot_be_read_is_kept_as_it_is_and_the_others_begin(
    tmp_path: Path, name: str, value: bytes, reason: str
):
    async def scenario() -> None:
        await written(tmp_path, [examples.saved()], [examples.moved(1)])
        scenarios.put(tmp_path / FILE, name, value)
        for _ in range(2):
            opened = await written(tmp_path, [examples.saved("other")])
            assert examples.step_of(opened) == 1
            assert "bad" not in opened.jobs
            assert reason in opened.unreadable["bad"]
            assert value in (tmp_path / FILE).read_bytes()
        await written(tmp_path, [Forgotten("bad")])
        assert (await written(tmp_path)).unreadable == {}

    run(scenario)


# ---- what cannot be read ----


def test_damage_is_refused_with_what_to_do(tmp_path: Path):
    """A flipped bit in a record, in the tree of pages or in the header; half a file, none of it, another's."""

    async def scenario() -> None:
        await written(tmp_path, [examples.saved()], [examples.moved(1)])
        file = tmp_path / FILE
        whole = file.read_bytes()
        page = whole.rindex(b"saved/llama") // 4096 * 4096
        foreign = tmp_path / "foreign"
        with contextlib.closing(sqlite3.connect(foreign)) as other:
            other.execute("CREATE TABLE records (name TEXT)")
        for damaged, reason in (
            (whole.replace(b'"places":2', b'"places":3'), "the record 'saved/llama' has another CRC"),
            (whole.replace(b"9e30145e", b"9e30145f"), "the record 'saved/llama' has another CRC"),
            (whole[:page] + b"\xff" + whole[page + 1 :], f"{FILE} is damaged: "),
            (whole[: page + 100], f"{FILE} is damaged: "),
            (b"X" + whole[1:], "file is not a database"),
            (b"", "it is empty"),
            (foreign.read_bytes(), "not of a coordinator"),
        ):
            file.write_bytes(damaged)
            for _ in range(2):  # the first attempt must let go of the lock
                with pytest.raises(StoreDamaged, match=reason) as caught:
                    await patience.wait_for(FileStore(tmp_path).open("a:1"))
                assert "does not start, because it would forget decisions" in str(caught.value)
                assert "move its files away" in str(caught.value)
            assert file.read_bytes() == damaged
        file.write_bytes(whole)
        assert examples.step_of(await written(tmp_path)) == 1

    run(scenario)


def test_no_flipped_bit_passes_for_a_decision(tmp_path: Path):
    """At every byte of the file: it is refused, or read right."""

    async def scenario() -> None:
        await written(tmp_path, [examples.saved()], [examples.moved(1)])
        file = tmp_path / FILE
        whole = file.read_bytes()
        right = (await written(tmp_path)).jobs
        refused = 0
        used = [at for at in range(0, len(whole), 5) if any(whole[at : at + 5])]
        for at in used[:: max(1, len(used) // 150)]:
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            file.write_bytes(damaged)
            try:
                assert (await written(tmp_path)).jobs == right
            except StoreDamaged:
                refused += 1
        assert refused > 20

    run(scenario)


@pytest.mark.parametrize("lost", [1, 100, 3000, 5000])
def test_a_torn_end_is_cut_off(tmp_path: Path, lost: int):
    """After a death, the last append is there as a whole or not at all."""

    async def scenario() -> None:
        store = FileStore(tmp_path / "store")
        await store.open("a:1")
        for step in range(4):
            await store.append([examples.saved(step=step), examples.saved("other", step=step)])
        shutil.copytree(tmp_path / "store", tmp_path / "copy")  # as if it had died here
        await store.close()
        ahead = tmp_path / "copy" / f"{FILE}-wal"
        ahead.write_bytes(ahead.read_bytes()[:-lost])
        opened = await written(tmp_path / "copy", [examples.saved(step=3)])
        assert examples.step_of(opened) == examples.step_of(opened, "other") == (2 if lost < 4096 else 1)
        assert examples.step_of(await written(tmp_path / "copy")) == 3

    run(scenario)


def test_a_folder_of_an_older_coordinator_is_refused(tmp_path: Path):
    (tmp_path / "log").write_bytes(b"jaxft-coordinator log 1 0000000000000029\n")

    async def scenario() -> None:
        with pytest.raises(
            StoreDamaged, match=r"in the format of an older jaxft-coordinator.* Name another folder"
        ):
            await FileStore(tmp_path).open("a:1")
        assert not (tmp_path / FILE).exists()

    run(scenario)


# ---- who leads ----


def test_one_leads_and_the_others_stand_by(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_store, "SAY_EVERY_S", 0.1)
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        first, second = FileStore(tmp_path), FileStore(tmp_path)
        led = await first.open("host-a:1")
        await first.append([examples.saved(step=3)])
        opening = asyncio.create_task(second.open("host-b:1"))
        await until(lambda: caplog.text.count("stands by: host-a:1 leads") >= 2)
        assert not opening.done()
        assert (first.leader, second.leader) == ("host-a:1", "host-a:1")
        await first.close()
        opened = await opening
        assert opened.term > led.term
        assert examples.step_of(opened) == 3
        assert (first.leader, second.leader) == ("", "host-b:1")
        await second.close()

    run(scenario)


def test_who_does_not_lead_cannot_append(tmp_path: Path):
    async def scenario() -> None:
        store = FileStore(tmp_path)
        with pytest.raises(StoreLost, match="not opened"):
            await store.append([examples.saved()])
        await store.open("a:1")
        lost = asyncio.create_task(store.lost())
        await store.append([examples.saved()])
        assert not lost.done()
        await store.close()
        assert "closed" in await lost
        with pytest.raises(StoreLost, match="closed"):
            await store.append([examples.saved()])

    run(scenario)


@pytest.mark.parametrize(
    "how", ["deleted", "replaced", "folder moved", "overwritten", "cut off", "written to", "ahead deleted"]
)
def test_a_file_taken_away_under_a_running_coordinator_is_noticed(tmp_path: Path, how: str):
    """Else it would go on writing to a file that no process finds again. A new file in its place stays as it is."""
    folder = tmp_path / "store"
    file = folder / FILE

    async def scenario() -> None:
        await written(folder, [examples.saved("before")])
        backup = file.read_bytes()
        store = FileStore(folder)
        await store.open("a:1")
        await store.append([examples.saved()])
        match how:
            case "deleted":
                file.unlink()
            case "replaced":
                (folder / "copy").write_bytes(backup)
                os.replace(folder / "copy", file)
            case "overwritten":  # by an older backup, which `cp` writes into the same file
                file.write_bytes(backup)
            case "cut off":
                file.write_bytes(b"")
            case "written to":
                with file.open("ab") as more:
                    more.write(bytes(4096))
            case "ahead deleted":
                (folder / f"{FILE}-wal").unlink()
            case _:
                folder.rename(tmp_path / "elsewhere")
        with pytest.raises(StoreLost, match="moved, deleted, replaced or overwritten"):
            await store.append([examples.moved(1)])
        assert "moved, deleted, replaced or overwritten" in await store.lost()
        assert store.leader == ""
        await store.close()
        if how == "cut off":
            with pytest.raises(StoreDamaged, match="it is empty"):
                await written(folder)
            return
        known = {"deleted": set(), "folder moved": set(), "ahead deleted": {"before", "llama"}}
        assert (await written(folder)).jobs.keys() == known.get(how, {"before"})

    run(scenario)


def test_a_term_grows_although_the_file_is_deleted_and_the_clock_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run(lambda: check_term_grows(FileStore(tmp_path), (tmp_path / FILE).unlink, monkeypatch))


def test_a_deleted_lock_file_does_not_make_two_leaders(tmp_path: Path):
    """SQLite has locked its file, too; and who waits on the deleted file must not take it for the lock."""

    async def scenario() -> None:
        first, second = FileStore(tmp_path), FileStore(tmp_path)
        await first.open("a:1")
        waiting = asyncio.create_task(second.open("b:1"))
        await until(lambda: second.leader == "a:1")
        (tmp_path / "lock").unlink()
        with pytest.raises(
            OSError, match=f"cannot .*{FILE}: database is locked.* Another process has it open"
        ):
            await waiting
        await first.append([examples.saved(step=1)])
        await first.close()
        assert examples.step_of(await written(tmp_path)) == 1

    run(scenario)


def test_a_folder_that_cannot_be_written_to_is_an_error_that_says_so(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "lock" / "lock").mkdir(parents=True)
    (tmp_path / "file-there" / FILE).mkdir(parents=True)
    own = f"Name a folder of the coordinator's own: in it, `{FILE}` and `lock` are files"

    async def scenario() -> None:
        for folder, reason in (
            (
                Path("/proc/jaxft"),
                "cannot keep the coordinator's state in /proc/jaxft: .* Name a folder that can be made there",
            ),
            (tmp_path / ("x" * 300), "Name a folder that can be made there"),
            (tmp_path / "lock", f"cannot keep the coordinator's state in .*{own}"),
            (tmp_path / "file-there", f"cannot read {tmp_path}/file-there/{FILE}: Is a directory.*{own}"),
            (tmp_path / "file", "Name a folder, not a file"),
            (tmp_path / "file" / "state", "Name a folder, not a file"),
        ):
            with pytest.raises(OSError, match=reason):
                await FileStore(folder).open("a:1")

    run(scenario)
