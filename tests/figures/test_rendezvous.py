"""The rendezvous benchmark runs, and fills its rows and notes."""

import pytest

from benchmarks import _peer, rendezvous

_TINY = rendezvous.Options(groups=(2, 3), turns=1, seconds=0.001, idle_s=0.05, state=False, watched=False)


@pytest.mark.long
def test_every_size_has_its_figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_peer, "python", lambda: None)
    rows, notes = rendezvous.run(_TINY)
    named = {row.case: row for row in rows}
    for case in ("2 groups", "3 groups"):
        assert named[case].ours is not None
        assert named[case].limit is not None
        assert named[case].peer is None
    assert named["2 groups"].goal.peer == 1.0
    assert (named["the coordinator with 3 groups: memory"].ours or 0) > 1
    assert any(note.startswith("p99 of 3 groups: ours ") for note in notes)
