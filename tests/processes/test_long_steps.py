"""Steps that are long or uneven, and groups that take their time between two steps: no group is evicted for that."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import patience
from tests.clusters import Cluster, Worker, cluster, digest_alone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

Log = Callable[[], str]


@contextmanager
def training(
    folder: Path,
    groups: tuple[str, ...],
    *flags: str,
    coordinator: tuple[str, ...] = (),
    own: Callable[[str], tuple[str, ...]] = lambda _group: (),
) -> Iterator[tuple[Cluster, dict[str, Worker], Log]]:
    with cluster(folder) as here:
        here.start_coordinator(*coordinator)
        workers = here.start_together(groups, lambda group: (*flags, *own(group)))
        yield here, workers, here.coordinator_log.read_text


def until_the_end(here: Cluster, workers: dict[str, Worker]) -> None:
    """Wait for as long as steps are taken: there may be many."""
    for worker in workers.values():
        while worker.process.poll() is None:
            taken = len(worker.steps())
            here.until(
                lambda worker=worker, taken=taken: (
                    worker.process.poll() is not None or len(worker.steps()) > taken
                ),
                "the next step",
            )
    here.until_finished(*workers.values())


def uneven(folder: Path, groups: int, shards: int, shard_s: float, steps: int) -> None:
    """Shards that take as long as the failure timeout, and one group has one more of them than the others."""
    names = tuple(f"group-{i}" for i in range(groups))
    flags = ("--steps", str(steps), "--shards", str(shards), "--pace", str(shard_s))
    with training(folder, names, *flags, "--failure-timeout-s", str(shard_s)) as (here, workers, log):
        until_the_end(here, workers)
        assert "evicts" not in log()
        assert "goes on without" not in log()
        for worker in workers.values():
            assert [event["attempts"] for event in worker.steps()] == [1] * steps
            assert len({len(event["shards"]) for worker in workers.values() for event in worker.steps()}) == 2
    alone = digest_alone(steps, "--shards", str(shards))
    assert {worker.digest for worker in workers.values()} == {alone}


def test_an_uneven_deal_of_long_shards_puts_nobody_out(tmp_path: Path) -> None:
    # An exchange fails when no byte has moved for a part of the failure timeout: 2 s when its links are made.
    uneven(tmp_path, groups=2, shards=3, shard_s=8.0, steps=2)


@pytest.mark.storm
@pytest.mark.timeout(1200)
def test_fifty_steps_of_long_shards_put_nobody_out(tmp_path: Path) -> None:
    uneven(tmp_path, groups=3, shards=4, shard_s=4.0, steps=50)


def paused(gate: Path, at: int = 3) -> Callable[[str], tuple[str, ...]]:
    return lambda group: ("--pause", f"{at}:{gate}") if group == "group-1" else ()


def until_paused(here: Cluster, worker: Worker) -> None:
    here.until(lambda: any(e["event"] == "paused" for e in worker.events()), "the pause to begin")


def finished_alike(_folder: Path, workers: dict[str, Worker], steps: int) -> None:
    alone = digest_alone(steps)
    assert {worker.digest for worker in workers.values()} == {alone}
    for worker in workers.values():
        taken = [event["step"] for event in worker.steps()]
        assert taken == sorted(set(taken)), "a step back"


def test_a_pause_shorter_than_the_jobs_patience_costs_nothing_but_time(tmp_path: Path) -> None:
    """A pause longer than the failure timeout, and than the patience with a group that hangs, which is 10 s."""
    gate, steps, names = tmp_path / "go-on", 12, ("group-0", "group-1", "group-2")
    flags = ("--steps", str(steps), "--failure-timeout-s", "12")
    with training(tmp_path, names, *flags, own=paused(gate)) as (here, workers, log):
        until_paused(here, workers["group-1"])
        time.sleep(15.0)  # the pause
        gate.touch()
        until_the_end(here, workers)
        assert "evicts" not in log()
        assert "goes on without" not in log()
        for worker in workers.values():
            assert [event["attempts"] for event in worker.steps()] == [1] * steps
    finished_alike(tmp_path, workers, steps)


def aside(folder: Path, steps: int, pause: Callable[[dict[str, Worker]], None], *coordinator: str) -> None:
    """group-1 pauses for longer than the job waits, continues without it and takes it back."""
    gate, names = folder / "go-on", ("group-0", "group-1", "group-2")
    hurry = folder / "hurry"
    flags = ("--steps", str(steps), "--pace", "0.1", "--hurry", str(hurry))
    with training(folder, names, *flags, coordinator=coordinator, own=paused(gate)) as (here, workers, log):
        until_paused(here, workers["group-1"])
        pause(workers)
        assert "goes on without group-1: it is away from training" in log()
        others = workers["group-0"]
        before = others.step
        here.until(lambda: others.step > before + 3, "steps without group-1")
        gate.touch()
        here.until(
            lambda: any("group-1" in e["members"] and e["step"] > before for e in others.steps()),
            "group-1 to take part again",
        )
        hurry.touch()
        until_the_end(here, workers)
        assert "evicts" not in log()
        assert "group-1 heals to step" in log()
        assert "the job goes on without this group: it is away" in workers["group-1"].log()
        assert "[jaxft group-1] heals to step" in workers["group-1"].log()
        assert "lost the coordinator" not in workers["group-1"].log()
    finished_alike(folder, workers, steps)


def test_a_group_away_for_long_is_stood_aside_and_comes_back(tmp_path: Path) -> None:
    def pause(_workers: dict[str, Worker]) -> None:
        log = tmp_path / "coordinator-0.log"
        patience.until(
            lambda: "goes on without group-1" in log.read_text(), "the job to go on", context=log.read_text
        )

    aside(tmp_path, 200, pause, "--join-timeout-ms", "2000")


@pytest.mark.storm
@pytest.mark.timeout(900)
def test_a_pause_of_three_minutes_loses_nothing(tmp_path: Path) -> None:
    """At the timeouts that we ship."""
    aside(tmp_path, 3000, lambda _workers: time.sleep(180.0))


def test_a_group_that_is_needed_is_waited_for_and_named(tmp_path: Path) -> None:
    gate, steps, names = tmp_path / "go-on", 8, ("group-0", "group-1")
    flags = ("--steps", str(steps), "--min-replicas", "2")
    quick = ("--join-timeout-ms", "2000")
    with training(tmp_path, names, *flags, coordinator=quick, own=paused(gate)) as (here, workers, log):
        until_paused(here, workers["group-1"])
        text = "waiting: step 3 waits for group-1, away from training"
        here.until(lambda: text in log(), "the coordinator to say for whom the job waits")
        here.until(lambda: workers["group-0"].logged(text), "group-0 to say it too")
        gate.touch()
        until_the_end(here, workers)
        assert log().count("waiting: step 3") == 1
        assert "evicts" not in log()
        assert "goes on without" not in log()
        for worker in workers.values():
            assert [event["attempts"] for event in worker.steps()] == [1] * steps
    finished_alike(tmp_path, workers, steps)
