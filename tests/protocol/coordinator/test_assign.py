from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxft_protocol.coordinator import assign

NAMES = [f"g-{i}" for i in range(12)]
WEIGHTS = st.lists(st.sampled_from((1, 2, 3, 4, 8, 65536)), min_size=1, max_size=12)


def alike(*names: str) -> dict[str, int]:
    """Members that compute equally fast."""
    return dict.fromkeys(names, 8)


def ends(dealt: dict[str, assign.Shards], weights: dict[str, int]) -> Fraction:
    """When all have computed their shards."""
    return max(Fraction(len(shards), weights[name]) for name, shards in dealt.items())


def test_each_member_gets_one_run_of_shards():
    assert assign.at_boundary(8, alike("a", "b", "c")) == {"a": (0, 1, 2), "b": (3, 4, 5), "c": (6, 7)}


def test_who_lives_keeps_its_shards_and_the_missing_ones_go_to_the_poorest():
    held = {"a": (0, 1), "b": (2, 3), "c": (4, 5)}
    assert assign.after_loss(6, alike("a", "c"), held) == {"a": (0, 1, 2), "c": (3, 4, 5)}


@pytest.mark.parametrize("total", [1, 5, 64])
@given(count=st.integers(1, 12))
def test_at_a_boundary_every_shard_has_one_owner_and_lengths_differ_by_one_at_most(total: int, count: int):
    dealt = assign.at_boundary(total, alike(*NAMES[:count]))
    assert [shard for shards in dealt.values() for shard in shards] == list(range(total))
    lengths = [len(shards) for shards in dealt.values()]
    assert max(lengths) - min(lengths) <= 1


@given(
    total=st.integers(1, 40), before=st.integers(1, 12), living=st.sets(st.sampled_from(NAMES), min_size=1)
)
def test_after_a_loss_every_shard_has_one_owner_and_nobody_gives_one_up(
    total: int, before: int, living: set[str]
):
    held = assign.at_boundary(total, alike(*NAMES[:before]))
    dealt = assign.after_loss(total, alike(*sorted(living)), held)
    assert sorted(shard for shards in dealt.values() for shard in shards) == list(range(total))
    assert dealt.keys() == living
    assert all(set(held.get(name, ())) <= set(dealt[name]) for name in living)


def test_a_member_with_half_of_the_devices_gets_half_as_many_shards():
    weights = {"a": 8, "b": 4, "c": 8}
    assert assign.at_boundary(10, weights) == {"a": (0, 1, 2, 3), "b": (4, 5), "c": (6, 7, 8, 9)}


def test_what_a_dead_member_had_goes_to_those_that_compute_it_first():
    held = {"a": (0, 1, 2, 3), "b": (4, 5), "c": (6, 7, 8, 9)}
    dealt = assign.after_loss(10, {"a": 8, "b": 4}, held)
    assert dealt == {"a": (0, 1, 2, 3, 6, 7, 8), "b": (4, 5, 9)}


@pytest.mark.parametrize("total", [64, 256, 4096, 65536])
def test_after_a_loss_each_member_gets_one_run_of_what_is_missing(total: int):
    """A member keeps and sends a gradient for each node of the tree that it holds, which a run has few of."""
    held = assign.at_boundary(total, alike("a", "b", "c", "d"))
    dealt = assign.after_loss(total, alike("a", "c", "d"), held)
    for name, shards in dealt.items():
        more = sorted({*shards} - {*held[name]})
        assert more == list(range(more[0], more[0] + len(more)))


@given(total=st.integers(1, 40), weights=WEIGHTS)
def test_no_other_lengths_end_earlier(total: int, weights: list[int]):
    members = dict(zip(NAMES, weights, strict=False))
    dealt = assign.at_boundary(total, members)
    assert [shard for shards in dealt.values() for shard in shards] == list(range(total))
    # In less time than this, the members compute fewer shards than there are.
    last = ends(dealt, members)
    assert sum(-(-last * weight // 1) - 1 for weight in weights) < total


@given(total=st.integers(1, 40), weights=WEIGHTS, lost=st.integers(0, 11))
def test_of_what_is_missing_each_shard_goes_to_a_member_that_does_not_end_last(
    total: int, weights: list[int], lost: int
):
    members = dict(zip(NAMES, weights, strict=False))
    held = assign.at_boundary(total, members)
    living = {name: weight for name, weight in members.items() if name != NAMES[lost]}
    if not living:
        return
    dealt = assign.after_loss(total, living, held)
    assert sorted(shard for shards in dealt.values() for shard in shards) == list(range(total))
    for name, shards in dealt.items():
        if len(shards) > len(held[name]):
            # When it had one less, no other could have computed it earlier.
            took = Fraction(len(shards), living[name])
            assert all(took <= Fraction(len(dealt[other]) + 1, living[other]) for other in living)


@given(first=st.integers(1, 65536), second=st.integers(1, 65536), length=st.integers(0, 65536))
def test_moments_are_compared_exactly(first: int, second: int, length: int):
    one, other = assign._ends(length, first), assign._ends(length + 1, second)
    exact = Fraction(length + 1, first), Fraction(length + 2, second)
    assert (one < other, one == other) == (exact[0] < exact[1], exact[0] == exact[1])


@pytest.mark.parametrize("total", [1, 7, 64, 1000])
def test_equal_weights_are_no_weights(total: int):
    for weight in (1, 3, 8, 65536):
        members = dict.fromkeys(NAMES, weight)
        assert assign.at_boundary(total, members) == assign.at_boundary(total, dict.fromkeys(NAMES, 1))
