"""A store in a folder, in this process: what is remembered, who leads, how it stays short, what breaks it."""

import asyncio
import itertools
import logging
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from jaxft_coordinator.stores import FileStore, Opened, StoreDamaged, StoreLost, _store, records
from jaxft_coordinator.stores._logfile import HEADER_BYTES, frame, header, read
from jaxft_protocol.coordinator.job import Forgotten, Record

from tests import patience
from tests.stores import examples, scenarios
from tests.stores.scenarios import check_term_grows, run, until


async def written(folder: Path, *appends: list[Record], compact_bytes: int = 8 << 20) -> Opened:
    """Append to the store in `folder`; return what it knew before."""
    return await scenarios.written(FileStore(folder, compact_bytes=compact_bytes), *appends)


# ---- what is remembered ----


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
@settings(max_examples=30, deadline=None)
def test_what_is_remembered_is_the_fold_of_what_was_appended(
    tmp_path_factory: pytest.TempPathFactory, first: list[list[Record]], second: list[list[Record]]
):
    """Whether the log is rewritten in the middle of it or not."""

    async def scenario() -> None:
        for compact_bytes in (1, 1000, 8 << 20):
            folder = tmp_path_factory.mktemp("store")
            await written(folder, *first, compact_bytes=compact_bytes)
            assert (await written(folder)).jobs == examples.folded(first)
            await written(folder, *second, compact_bytes=compact_bytes)
            assert (await written(folder)).jobs == examples.folded([*first, *second])

    run(scenario)


def test_each_term_is_higher_than_all_before(tmp_path: Path):
    """Also when they begin in the same second, and when the clock was set back."""

    async def scenario() -> None:
        terms = [(await written(tmp_path)).term for _ in range(5)]
        assert all(later > earlier for earlier, later in itertools.pairwise(terms))
        assert terms[-1] > time.time()

    run(scenario)


def test_an_append_that_makes_no_sense_writes_nothing(tmp_path: Path):
    async def scenario() -> None:
        store = FileStore(tmp_path)
        await store.open("a:1")
        size = (tmp_path / "log").stat().st_size
        with pytest.raises(ValueError, match="nothing is known of it"):
            await store.append([examples.saved(), examples.moved(1, "unknown")])
        assert (tmp_path / "log").stat().st_size == size
        await store.append([examples.saved()])
        await store.close()
        assert list((await written(tmp_path)).jobs) == ["llama"]

    run(scenario)


def test_a_record_that_moves_what_nobody_knows_is_damage(tmp_path: Path):
    (tmp_path / "log").write_bytes(header(HEADER_BYTES) + frame([examples.moved(1)]))

    async def scenario() -> None:
        with pytest.raises(StoreDamaged, match=f"damaged at byte {HEADER_BYTES}: .* nothing is known"):
            await FileStore(tmp_path).open("a:1")

    run(scenario)


def test_a_job_that_does_not_read_is_kept_as_it_is_and_the_others_begin(tmp_path: Path):
    bad = records.Unreadable("bad", b'{"v":9,"kind":"saved","job":"bad","what":"is this"}', "")
    ours = [examples.saved("bad"), examples.saved(), bad, examples.moved(1, "bad"), examples.moved(1)]
    (tmp_path / "log").write_bytes(header(HEADER_BYTES) + b"".join(frame([each]) for each in ours))

    async def scenario() -> None:
        for _ in range(2):  # the log is rewritten at each start
            opened = await written(tmp_path, [examples.saved("other")])
            assert examples.step_of(opened) == 1
            assert "bad" not in opened.jobs
            assert "format 9" in opened.unreadable["bad"]
            found = [each for _, each in read(tmp_path / "log") if getattr(each, "job", "") == "bad"]
            assert [getattr(each, "data", each) for each in found] == [ours[0], bad.data, ours[3]]
        data = (tmp_path / "log").read_bytes()
        (tmp_path / "log").write_bytes(data + frame([Forgotten("bad")]))
        assert (await written(tmp_path)).unreadable == {}
        assert bad.data not in (tmp_path / "log").read_bytes()

    run(scenario)


def test_damage_is_refused_and_left_as_it_is(tmp_path: Path):
    async def scenario() -> None:
        await written(tmp_path, [examples.saved()], [examples.moved(1)])
        log = tmp_path / "log"
        data = log.read_bytes()
        log.write_bytes(data.replace(b'"program"', b'"programm"'))
        for _ in range(2):  # the first attempt must let go of the lock
            with pytest.raises(StoreDamaged, match="cannot be read"):
                await patience.wait_for(FileStore(tmp_path).open("a:1"))
        assert b'"programm"' in log.read_bytes()

    run(scenario)


def test_a_torn_end_is_cut_off_for_good(tmp_path: Path):
    async def scenario() -> None:
        await written(tmp_path, [examples.saved(step=1)], [examples.moved(2)])
        log = tmp_path / "log"
        log.write_bytes(log.read_bytes()[:-3])
        opened = await written(tmp_path, [examples.moved(2)])
        assert examples.step_of(opened) == 1
        assert examples.step_of(await written(tmp_path)) == 2

    run(scenario)


# ---- how it stays short ----


def test_the_log_is_rewritten_when_it_is_long(tmp_path: Path):
    async def scenario() -> None:
        store = FileStore(tmp_path, compact_bytes=4000)
        await store.open("a:1")
        await store.append([examples.saved()])
        sizes: list[int] = []
        for step in range(1, 500):
            await store.append([examples.moved(step)])
            sizes.append((tmp_path / "log").stat().st_size)
        assert max(sizes) < 4000
        assert sum(after < before for before, after in itertools.pairwise(sizes)) > 5
        await store.close()
        assert examples.step_of(await written(tmp_path)) == 499

    run(scenario)


def test_long_jobs_are_not_rewritten_at_every_record(tmp_path: Path):
    async def scenario() -> None:
        store = FileStore(tmp_path, compact_bytes=1000)
        await store.open("a:1")
        await store.append([examples.big("llama", 5000)])
        nodes: set[int] = set()
        for step in range(1, 50):
            await store.append([examples.moved(step)])
            nodes.add((tmp_path / "log").stat().st_ino)
        assert len(nodes) == 1
        await store.close()

    run(scenario)


def test_a_log_that_cannot_be_rewritten_goes_on_long(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async def scenario() -> None:
        store = FileStore(tmp_path, compact_bytes=1000)
        await store.open("a:1")
        (tmp_path / "log.new").mkdir()  # in its way
        await store.append([examples.saved()])
        for step in range(1, 50):
            await store.append([examples.moved(step)])
        assert caplog.text.count("cannot compact") in range(1, 10)
        (tmp_path / "log.new").rmdir()
        for step in range(50, 80):
            await store.append([examples.moved(step)])
        assert (tmp_path / "log").stat().st_size < 2500
        await store.close()
        assert examples.step_of(await written(tmp_path)) == 79

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


def test_whoever_gives_up_waiting_holds_nothing(tmp_path: Path):
    async def scenario() -> None:
        first, second = FileStore(tmp_path), FileStore(tmp_path)
        await first.open("a:1")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second.open("b:1"), 0.2)
        await first.close()
        await first.open("a:1")
        await first.close()

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
    "how", ["deleted", "replaced", "folder moved", "overwritten", "cut off", "written to"]
)
def test_a_log_taken_away_under_a_running_coordinator_is_noticed(tmp_path: Path, how: str):
    """Else it would go on writing to a file that no process finds again."""
    folder = tmp_path / "store"

    async def scenario() -> None:
        store = FileStore(folder)
        await store.open("a:1")
        backup = (folder / "log").read_bytes()
        await store.append([examples.saved()])
        match how:
            case "deleted":
                (folder / "log").unlink()
            case "replaced":
                (folder / "copy").write_bytes((folder / "log").read_bytes())
                os.replace(folder / "copy", folder / "log")
            case "overwritten":  # by an older backup, which `cp` writes into the same file
                (folder / "log").write_bytes(backup)
            case "cut off":
                (folder / "log").write_bytes(b"")
            case "written to":
                with (folder / "log").open("ab") as log:
                    log.write(frame([examples.moved(9)]))
            case _:
                folder.rename(tmp_path / "elsewhere")
        with pytest.raises(StoreLost, match="moved, deleted, replaced or overwritten"):
            await store.append([examples.moved(1)])
        assert "moved, deleted, replaced or overwritten" in await store.lost()
        assert store.leader == ""
        await store.close()

    run(scenario)


def test_a_term_grows_although_the_log_is_deleted_and_the_clock_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run(lambda: check_term_grows(FileStore(tmp_path), (tmp_path / "log").unlink, monkeypatch))


def test_a_deleted_lock_file_does_not_make_two_leaders_of_the_next_two(tmp_path: Path):
    """The one that waits on the deleted file must not take it for the lock."""

    async def scenario() -> None:
        first, second, third = FileStore(tmp_path), FileStore(tmp_path), FileStore(tmp_path)
        await first.open("a:1")
        (tmp_path / "lock").unlink()
        await second.open("b:1")  # nothing can keep it from that, but the log is its own now
        with pytest.raises(StoreLost):
            await first.append([examples.saved()])
        await second.append([examples.saved(step=1)])
        waiting = asyncio.create_task(third.open("c:1"))
        await first.close()
        await until(lambda: third.leader == "b:1")
        assert not waiting.done()
        await second.close()
        assert examples.step_of(await waiting) == 1
        await third.close()

    run(scenario)


def test_a_caller_that_stops_waiting_leaves_the_store_in_order(tmp_path: Path):
    async def scenario() -> None:
        store = FileStore(tmp_path)
        await store.open("a:1")
        await store.append([examples.saved()])
        for step in range(1, 100):
            append = asyncio.create_task(store.append([examples.moved(step)]))
            await asyncio.sleep(0)
            append.cancel()
            await asyncio.wait([append])
        await store.append([examples.moved(100)])
        await store.close()
        assert examples.step_of(await written(tmp_path)) == 100

    run(scenario)


def test_a_long_wait_is_said_again_and_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_store, "SAY_EVERY_S", 0.05)
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        with _store.saying("waits for the disk"):
            assert not caplog.text
            await until(lambda: caplog.text.count("waits for the disk") >= 2)
        said = caplog.text.count("waits for the disk")
        await asyncio.sleep(0.2)
        assert caplog.text.count("waits for the disk") == said

    run(scenario)


def test_a_folder_that_cannot_be_written_to_is_an_error_that_says_so(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "lock" / "lock").mkdir(parents=True)
    (tmp_path / "log" / "log").mkdir(parents=True)
    own = "Name a folder of the coordinator's own: in it, `log` and `lock` are files"

    async def scenario() -> None:
        for folder, says in (
            (
                Path("/proc/jaxft"),
                "cannot keep the coordinator's state in /proc/jaxft: .* Name a folder that can be made there",
            ),
            (tmp_path / ("x" * 300), "Name a folder that can be made there"),
            (tmp_path / "lock", f"cannot keep the coordinator's state in .*{own}"),
            (tmp_path / "log", f"cannot read {tmp_path}/log/log: Is a directory.*{own}"),
            (tmp_path / "file", "Name a folder, not a file"),
            (tmp_path / "file" / "state", "Name a folder, not a file"),
        ):
            with pytest.raises(OSError, match=says):
                await FileStore(folder).open("a:1")

    run(scenario)
