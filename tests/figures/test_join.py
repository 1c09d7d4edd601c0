"""The join benchmark runs at a tiny size and fills its rows; the figures are not checked."""

import os

import pytest

from benchmarks import join
from tests.figures.peers import leave_out_the_peer

TINY = join.Options(step_ms=20.0, megabytes=0.1, joins=1, peer_joins=1, unrelated=1, settled=2, warm_ups=0)


@pytest.mark.long
def test_a_join_is_seen_in_the_steps_of_the_others(monkeypatch: pytest.MonkeyPatch):
    leave_out_the_peer(monkeypatch)
    rows, notes = join.run(TINY)
    cores = len(os.sched_getaffinity(0))
    assert len(rows) == (7 if cores > 1 else 4)
    assert all(row.ours and row.peer is None for row in rows)
    assert [row.case for row in rows if row.met is not None] == [
        f"20 ms steps, 0.3 MB state, the joiner on its own core: {what}"
        for what in ("mean step during a join", "slowest step of a join")
        if cores > 1
    ]
    assert all(row.limit for row in rows if row.met is not None)
    assert all("healing itself takes" in note for note in notes)
