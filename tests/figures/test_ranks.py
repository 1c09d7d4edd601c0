"""The benchmark of groups of several processes runs at a tiny size and fills its rows; no figure is checked."""

import pytest

from benchmarks import ranks
from benchmarks.restart import PARTS

TINY = ranks.Options(step_ms=20.0, megabytes=0.1, steps=3, restarts=1, state_megabytes=(), heals=1)


@pytest.mark.timeout(180)
def test_steps_and_restarts_of_two_processes_are_measured_beside_one():
    rows = ranks.run(TINY)[0]
    assert [row.case for row in rows[:2]] == [
        "2 processes, 20 ms steps: step",
        "2 processes, 20 ms steps: vote",
    ]
    assert [row.case.rpartition(": ")[2] for row in rows[3:]] == list(PARTS)
    assert all(row.ours and row.limit for row in rows)
    assert rows[-1].note.endswith("times one process")


def test_a_heal_by_two_ranks_is_measured_beside_one():
    row = ranks.heals(1.0, 2)
    assert row.ours
    assert row.limit
    assert row.rounds == 2
