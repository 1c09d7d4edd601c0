import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxft_protocol.coordinator import assign

NAMES = [f"g-{i}" for i in range(12)]


def test_each_member_gets_one_run_of_shards():
    assert assign.at_boundary(8, ["a", "b", "c"]) == {"a": (0, 1, 2), "b": (3, 4, 5), "c": (6, 7)}


def test_members_beyond_the_shards_get_none():
    assert assign.at_boundary(2, ["a", "b", "c"]) == {"a": (0,), "b": (1,), "c": ()}


def test_who_lives_keeps_its_shards_and_the_missing_ones_go_to_the_poorest():
    held = {"a": (0, 1), "b": (2, 3), "c": (4, 5)}
    assert assign.after_loss(6, ["a", "c"], held) == {"a": (0, 1, 2), "c": (3, 4, 5)}


def test_a_newcomer_takes_what_a_dead_member_had():
    held = {"a": (0, 1), "b": (2, 3)}
    assert assign.after_loss(4, ["a", "spare"], held) == {"a": (0, 1), "spare": (2, 3)}


def test_without_a_loss_nothing_moves():
    held = {"a": (0, 3), "b": (1, 2)}
    assert assign.after_loss(4, ["a", "b"], held) == held


@pytest.mark.parametrize("total", [1, 5, 64])
@given(count=st.integers(1, 12))
def test_at_a_boundary_every_shard_has_one_owner_and_lengths_differ_by_one_at_most(total: int, count: int):
    dealt = assign.at_boundary(total, NAMES[:count])
    assert [shard for shards in dealt.values() for shard in shards] == list(range(total))
    lengths = [len(shards) for shards in dealt.values()]
    assert max(lengths) - min(lengths) <= 1


@given(
    total=st.integers(1, 40), before=st.integers(1, 12), living=st.sets(st.sampled_from(NAMES), min_size=1)
)
def test_after_a_loss_every_shard_has_one_owner_and_nobody_gives_one_up(
    total: int, before: int, living: set[str]
):
    held = assign.at_boundary(total, NAMES[:before])
    dealt = assign.after_loss(total, sorted(living), held)
    assert sorted(shard for shards in dealt.values() for shard in shards) == list(range(total))
    assert dealt.keys() == living
    assert all(set(held.get(name, ())) <= set(dealt[name]) for name in living)
