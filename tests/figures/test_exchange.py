"""The exchange benchmark runs, checks its sums, and fills its columns."""

import pytest

from benchmarks import exchange

from .peers import leave_out_the_peer

TINY = exchange.Options(groups=(3,), sizes=(4096, 1 << 20), half_sizes=(4096,), llama=False, rounds=2)


@pytest.mark.long
def test_each_size_has_a_row(monkeypatch: pytest.MonkeyPatch):
    leave_out_the_peer(monkeypatch)
    rows, notes = exchange.run(TINY)
    assert "its column is empty" in notes[0]
    assert [(row.case, row.unit) for row in rows] == [
        ("3 groups, 4 KB float32", "ms"),
        ("3 groups, 1 MB float32", "ms"),
        ("3 groups, 1 MB float32", "CPU s/GB"),
        ("3 groups, 4 KB bfloat16", "ms"),
    ]
    for row in rows:
        assert row.ours is not None
        assert row.limit is not None
        assert 0.0 < row.limit
        assert 0.0 < row.ours < 60_000.0
        assert row.peer is None
