"""The exchange benchmark runs, checks its sums, and fills its columns."""

import pytest

from benchmarks import _peer, exchange
from benchmarks._result import Row

from .peers import leave_out_the_peer

TINY = exchange.Options(groups=(3,), sizes=(4096, 1 << 20), half_sizes=(4096,), llama=False, rounds=2)


def check(rows: list[Row], *, peer: bool) -> None:
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
        assert (row.peer is not None) is peer


@pytest.mark.long
def test_without_the_peer_its_column_is_empty(monkeypatch: pytest.MonkeyPatch):
    leave_out_the_peer(monkeypatch)
    rows, notes = exchange.run(TINY)
    check(rows, peer=False)
    assert "its column is empty" in notes[0]


@pytest.mark.storm
def test_beside_the_peer():
    if _peer.python() is None:
        pytest.skip("TorchFT is not available here")
    rows, notes = exchange.run(TINY)
    check(rows, peer=True)
    assert notes == []
