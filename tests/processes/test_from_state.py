"""Batches that are made of the state: any group makes the batch of any shard, at any time, with the same bits."""

from pathlib import Path

import pytest

from tests.clusters import Worker, cluster, digest_alone
from tests.processes.ranks import digest_of
from tests.processes.returns import group_that_returns, ranks_that_return

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

OF_STATE = "--of-state"
STEPS = ("--steps", "14", OF_STATE)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["compute step 4 shard", "exchange step 4"])
def test_the_others_make_what_a_dead_group_had_made(phase: str, tmp_path: Path) -> None:
    stayed, back = group_that_returns(tmp_path, STEPS, die=phase)
    taken_over = next(event["shards"] for event in stayed.steps() if event["step"] == 5)
    assert sorted(taken_over) == [0, 1, 2, 3]
    assert stayed.digest == back.digest == digest_alone(14, OF_STATE)


@pytest.mark.long
def test_a_spare_makes_them(tmp_path: Path) -> None:
    started = tmp_path / "started"
    flags = (*STEPS, "--gate", f"3:{started}")
    with cluster(tmp_path) as here:
        here.start_coordinator()
        # First, so that it is there before the groups stand at the gate, where they take no digest for it.
        spare = here.start("spare-0", *flags, "--spare")
        groups = here.start_together(
            ("group-0", "group-1"),
            lambda group: (*flags, *(("--die", "exchange step 6") if group == "group-1" else ())),
        )
        here.until(lambda: spare.step == 3, "the spare to follow")
        started.touch()
        here.until_dead(groups["group-1"])
        here.until_finished(groups["group-0"], spare)
        contributed = [event["step"] for event in spare.steps() if event["shards"]]
    assert contributed[0] == 7
    assert groups["group-0"].digest == spare.digest == digest_alone(14, OF_STATE)


@pytest.mark.long
def test_a_resumed_job_makes_them_of_the_checkpoint(tmp_path: Path) -> None:
    saved = ("--checkpoints", str(tmp_path / "saved"), "--checkpoint-every", "3")
    lives: list[Worker] = []
    for life, steps in enumerate((6, 14)):
        folder = tmp_path / str(life)
        folder.mkdir()
        with cluster(folder) as here:
            here.start_coordinator()
            lives.append(here.start("group-0", "--steps", str(steps), OF_STATE, *saved))
            here.until_finished(lives[-1])
    assert lives[-1].steps()[0]["step"] == 7
    assert lives[-1].digest == digest_alone(14, OF_STATE)


@pytest.mark.long
def test_groups_of_several_processes(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    first, back = ranks_that_return(tmp_path, STEPS, die="exchange step 4")
    assert first.leader.digest == back.leader.digest == digest_of(tmp_path / "alone", 2, *STEPS)
