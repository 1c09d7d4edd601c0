"""The restart benchmark runs at a tiny size; only the sum of its parts is checked."""

from dataclasses import replace

import pytest

from benchmarks import restart
from benchmarks._job import Ours, Shape

TINY = restart.Options(step_ms=20.0, megabytes=0.1, restarts=1, warm_ups=0)
SHAPE = Shape(TINY.step_ms, TINY.megabytes, groups=2, moments=True)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_parts_of_a_restart_are_all_of_it(ranks: int):
    parts = restart.measure(Ours(), replace(SHAPE, ranks=ranks), TINY)
    assert tuple(parts) == restart.PARTS
    assert sum(parts[name][0] for name in restart.PARTS[:-1]) == pytest.approx(parts["in all"][0])
