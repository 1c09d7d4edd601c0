"""The spare benchmark runs at a tiny size; that the spare is in the first step without the group is checked."""

import pytest

from benchmarks import spare

TINY = spare.Options(step_ms=(20.0,), megabytes=0.1, rounds=1, warm_ups=0)


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_killed_group_and_of_a_drained_one():
    rows = spare.run(TINY)[0]
    kill, drain = rows[:5], rows[5:]
    for later, _, tried_again, time, longest in (kill, drain):
        assert later.ours == 0
        assert tried_again.met is not False
        assert time.ours
        assert longest.ours
        assert longest.limit
    assert "kill -9" in kill[0].case
    assert "drain" in drain[0].case
    assert drain[2].ours == 0
    assert kill[1].met
    assert drain[1].ours is not None
    assert drain[1].ours <= 2  # a request that comes just after a decision is a step later
