"""A round of inner steps in groups that die: any group computes any shard, with the same bits."""

from pathlib import Path

import pytest

from tests.clusters import digest_alone
from tests.processes.returns import group_that_returns

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

ROUNDS = 14
EVERY = 3  # of the workers


def test_a_kill_in_an_inner_step_changes_nothing(tmp_path: Path) -> None:
    flags = ("--steps", str(ROUNDS), "--diloco", "average")
    stayed, back = group_that_returns(tmp_path, flags, die=f"inner step {4 * EVERY + 1} shard")
    taken_over = next(event["shards"] for event in stayed.steps() if event["step"] == 5)
    assert sorted(taken_over) == [0, 1, 2, 3], "the two of each group, and none twice"
    assert stayed.digest == back.digest == digest_alone(ROUNDS, "--diloco", "average")
