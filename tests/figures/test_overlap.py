"""The overlap benchmark runs at a tiny size and fills its rows; the figures are not checked."""

import pytest

from benchmarks import overlap

TINY = overlap.Options(overlaps=(2,), step_ms=4.0, megabytes=(0.1,), leaves=4, turns=1, rounds=4)


@pytest.mark.long
def test_an_overlapped_step_is_measured_beside_one_that_is_not():
    rows, _ = overlap.run(TINY)
    assert [row.case for row in rows] == [
        f"2 groups, 4 ms steps, 0.1 MB: overlap={number}" for number in (1, 2)
    ]
    assert all(row.ours and row.limit == 4.0 and row.rounds == 4 for row in rows)
    assert "1.00 times as fast" in rows[0].note
