"""The overhead benchmark runs at a tiny size and fills its rows; the figures are not checked."""

import pytest

from benchmarks import overhead
from tests.figures.peers import leave_out_the_peer

TINY = overhead.Options(step_ms=(1.0,), groups=(2,), megabytes=0.1, rounds=4, leaves=3, calls=20)


@pytest.mark.long
def test_steps_are_measured_beside_plain_ones(monkeypatch: pytest.MonkeyPatch):
    leave_out_the_peer(monkeypatch)
    rows, notes = overhead.run(TINY)
    assert [row.case for row in rows] == [
        "2 groups, 1 ms steps: step",
        "2 groups, 1 ms steps: beyond a plain step and the exchange",
        "2 groups of 2 processes, 1 ms steps: step",
        "2 groups of 2 processes, 1 ms steps: beyond a plain step and the exchange",
        "dispatch beyond the two compiled programs, 3 leaves",
    ]
    assert rows[0].ours
    assert rows[0].limit
    assert all(row.peer is None for row in rows)
    assert "exchange" in notes[0]
