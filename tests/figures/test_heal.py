"""The heal benchmark runs at tiny sizes and fills its rows; the figures are not checked."""

import dataclasses

import pytest

from benchmarks import _peer, heal
from benchmarks._state import sizes, sums, values

TINY = heal.Options(
    megabytes=(2,),
    leaves=12,
    rounds=1,
    http_chunks=(0, 2),
    capped_donors=0,
    capped_megabytes=1,
    capped_rounds=1,
)


def test_a_state_has_its_size_in_leaves_of_whole_lines():
    found = sizes(12, 30)
    assert len(found) == 30
    assert 4 * sum(found) == pytest.approx(12e6, rel=0.01)
    assert all(size > 0 and size % 16 == 0 for size in found)


def test_sums_know_leaves_by_their_bits_and_places():
    leaves = list(values([32, 32], seed=1))
    known = sums(leaves)
    assert known == sums(values([32, 32], seed=1))
    assert known != sums(reversed(leaves))
    leaves[0].view("uint8")[5] ^= 1
    assert known != sums(leaves)


@pytest.mark.long
def test_it_measures_ours_and_leaves_the_peer_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXFT_BENCH_PEER", "none")
    _peer.python.cache_clear()
    try:
        rows, notes = heal.run(dataclasses.replace(TINY, token=True))
    finally:
        _peer.python.cache_clear()
    assert [row.case for row in rows] == [
        "2 MB from 1 donor, against HTTP at its default",
        "2 MB from 2 donors, against HTTP at its default",
        "2 MB from 1 donor, against HTTP at its best",
        "2 MB from 1 donor, against the process group in place",
        "2 MB from 1 donor, with a token",
        "2 MB from 2 donors, with a token",
        "2 MB to 2 ranks, a half each",
        "2 MB: the joiner's peak memory",
    ]
    assert all(row.ours is not None and row.peer is None for row in rows)
    assert all(row.limit for row in rows[:2])
    assert notes == []


def test_a_way_that_moves_something_else_is_no_figure():
    ways = {"good": lambda: {"sums": [1], "seconds": 1.0}, "bad": lambda: {"sums": [2], "seconds": 1.0}}
    with pytest.raises(heal.WrongState, match="bad moved other values"):
        heal._rounds(ways, 1, [1])
