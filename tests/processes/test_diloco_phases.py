"""Rounds of inner steps: kills in other phases, checkpoints between two rounds, and groups of two processes."""

from pathlib import Path

import pytest

from tests.clusters import Worker, cluster, digest_alone
from tests.processes.ranks import digest_of
from tests.processes.returns import group_that_returns, ranks_that_return

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.long]

ROUNDS = 14
EVERY = 3  # of the workers


def flags(carry: str) -> tuple[str, ...]:
    return "--steps", str(ROUNDS), "--diloco", carry


@pytest.mark.parametrize(
    ("die", "carry"),
    [
        (f"inner step {5 * EVERY - 1} shard", "reset"),
        ("exchange step 4", "second"),
        ("vote step 4", "average"),
        ("apply step 4", "reset"),
    ],
)
def test_a_kill_in_a_round_changes_nothing(die: str, carry: str, tmp_path: Path) -> None:
    stayed, back = group_that_returns(tmp_path, flags(carry), die=die)
    taken = next(event["shards"] for event in stayed.steps() if event["step"] == 5)
    assert len(set(taken)) == len(taken), "computed twice"
    assert stayed.digest == back.digest == digest_alone(ROUNDS, *flags(carry)[2:])


def test_a_resumed_job_goes_on_between_two_rounds(tmp_path: Path) -> None:
    saved = ("--checkpoints", str(tmp_path / "saved"), "--checkpoint-every", "3")
    lives: list[Worker] = []
    for life, rounds in enumerate((6, ROUNDS)):
        folder = tmp_path / str(life)
        folder.mkdir()
        with cluster(folder) as here:
            here.start_coordinator()
            lives.append(here.start("group-0", "--steps", str(rounds), "--diloco", "average", *saved))
            here.until_finished(lives[-1])
    assert lives[-1].steps()[0]["step"] == 7
    assert lives[-1].digest == digest_alone(ROUNDS, "--diloco", "average")


def test_groups_of_several_processes(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    die = f"inner step {4 * EVERY + 1} shard"
    first, back = ranks_that_return(tmp_path, flags("average"), die=die)
    assert first.leader.digest == back.leader.digest == digest_of(tmp_path / "alone", 2, *flags("average"))
