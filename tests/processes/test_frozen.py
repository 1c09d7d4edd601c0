"""A step that closes over frozen weights: each group brings them, and none fetches or saves them."""

from pathlib import Path

import pytest

from tests.clusters import Worker, cluster, digest_alone
from tests.processes.ranks import start_ranks
from tests.processes.returns import group_that_returns

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STEPS = ("--steps", "14")
FROZEN = ("--frozen", "3")


@pytest.mark.long
def test_a_group_that_returns_heals_without_them(tmp_path: Path) -> None:
    stayed, back = group_that_returns(tmp_path, (*STEPS, *FROZEN), die="exchange step 4")
    healed = next(event["healed_bytes"] for event in back.steps() if event["healed_bytes"])
    assert healed < 1 << 16
    assert stayed.digest == back.digest == digest_alone(14, *FROZEN)


def test_a_group_with_others_is_refused(tmp_path: Path) -> None:
    gate = tmp_path / "refused"
    with cluster(tmp_path) as here:
        here.start_coordinator()
        first = here.start("group-0", *STEPS, *FROZEN, "--gate", f"3:{gate}")
        here.until(lambda: first.step == 3, "the job to run")
        other = here.start("group-1", *STEPS, "--frozen", "4")
        here.until(lambda: other.process.poll() is not None, "the second group to end")
        gate.touch()
        here.until_finished(first)
    assert other.process.returncode == 1
    assert "closed-over arrays: the job has" in other.log()
    assert "program: the job has" not in other.log()


@pytest.mark.long
def test_a_checkpoint_is_refused_on_others(tmp_path: Path) -> None:
    saved = ("--checkpoints", str(tmp_path / "saved"), "--checkpoint-every", "3")
    lives: list[Worker] = []
    for number, (steps, seed) in enumerate(((6, 3), (9, 4), (9, 3))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with cluster(folder) as here:
            here.start_coordinator()
            lives.append(here.start("group-0", "--steps", str(steps), "--frozen", str(seed), *saved))
            here.until(lambda: lives[-1].process.poll() is not None, "the group to end")
    assert [life.process.returncode for life in lives] == [0, 1, 0]
    _, refused, resumed = lives
    assert "closed-over arrays: saved" in refused.log()
    assert "manager.restore(state, changed={'closed-over arrays'})" in refused.log()
    assert not refused.steps()
    assert resumed.steps()[0]["step"] == 7
    assert resumed.digest == digest_alone(9, *FROZEN)


@pytest.mark.long
def test_a_rank_with_others_than_its_rank_0_is_refused(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        group = start_ranks(here, "group-0", 2, STEPS, own={0: FROZEN, 1: ("--frozen", "4")})
        for rank in group.ranks:
            here.until(lambda rank=rank: rank.process.poll() is not None, "the group to end")
    for rank in group.ranks:
        assert (
            "The step closes over an array, float32[262144], that has other values on some devices"
            in rank.log()
        )
        assert not rank.steps()
