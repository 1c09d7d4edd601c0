"""The spare benchmark runs at a tiny size; that the spare is in time is checked."""

from benchmarks import spare

TINY = spare.Options(step_ms=(20.0,), megabytes=0.1, kills=1, warm_ups=0)


def test_a_spare_contributes_to_the_step_that_lost_a_group():
    steps, time = spare.run(TINY)[0]
    assert steps.ours == 0
    assert time.ours
    assert time.limit
