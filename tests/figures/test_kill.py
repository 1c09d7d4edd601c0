"""The kill benchmark runs at a tiny size; that no work was discarded is checked, the times are not."""

import pytest

from benchmarks import kill
from tests.figures.peers import leave_out_the_peer

TINY = kill.Options(step_ms=(20.0,), megabytes=(0.1,), kills=1, peer_kills=1, peer_best_kills=1, warm_ups=0)


@pytest.mark.long
def test_survivors_commit_after_a_kill_and_throw_nothing_away(monkeypatch: pytest.MonkeyPatch):
    leave_out_the_peer(monkeypatch)
    rows, notes = kill.run(TINY)
    assert [row.case.rpartition(": ")[2] for row in rows] == ["median", "slowest", "discarded"]
    assert all(row.peer is None for row in rows)
    assert rows[0].ours
    assert rows[2].ours == 0
    assert "TorchFT" not in notes[0]
