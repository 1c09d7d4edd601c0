"""The canonical order of summation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft._exchange._tree import Node, cover, parent, root


def brackets(first: int, stop: int) -> str:
    """The whole sum as text, written apart from the code under test."""
    if stop - first == 1:
        return str(first)
    half = max(power for power in (2**k for k in range(20)) if power < stop - first)
    return f"({brackets(first, first + half)}+{brackets(first + half, stop)})"


def combine(node: Node, held: dict[Node, str]) -> str:
    if node in held:
        return held[node]
    left, right = node.children
    return f"({combine(left, held)}+{combine(right, held)})"


@st.composite
def assignments(draw: st.DrawFn) -> list[list[int]]:
    """Some number of shards, dealt out among members in any way; members may have none."""
    total = draw(st.integers(1, 40))
    members = draw(st.integers(1, 6))
    owners = draw(st.lists(st.integers(0, members - 1), min_size=total, max_size=total))
    return [[shard for shard in range(total) if owners[shard] == member] for member in range(members)]


@settings(deadline=None)
@given(assignments())
def test_the_order_does_not_depend_on_who_holds_what(shards: list[list[int]]) -> None:
    total = sum(map(len, shards))
    held = {
        node: combine(node, {Node(k, k + 1): str(k) for k in range(total)})
        for mine in shards
        for node in cover(mine, total)
    }
    assert combine(root(total), held) == brackets(0, total)


@settings(deadline=None)
@given(assignments())
def test_a_cover_is_exact_ordered_and_as_small_as_it_can_be(shards: list[list[int]]) -> None:
    total = sum(map(len, shards))
    for mine in shards:
        nodes = cover(mine, total)
        assert [shard for node in nodes for shard in range(node.start, node.stop)] == mine
        for node in nodes:
            if node != root(total):
                above = parent(node, total)
                assert not set(range(above.start, above.stop)) <= set(mine)


@settings(deadline=None)
@given(st.integers(2, 300), st.data())
def test_parent_undoes_children(total: int, data: st.DataObject) -> None:
    node = root(total)
    while node.size > 1:
        left, right = node.children
        assert parent(left, total) == node
        assert parent(right, total) == node
        assert left.size >= right.size
        assert left.size & (left.size - 1) == 0
        node = data.draw(st.sampled_from([left, right]))


def test_seven_shards() -> None:
    assert root(7).children == (Node(0, 4), Node(4, 7))
    assert Node(4, 7).children == (Node(4, 6), Node(6, 7))
    assert cover([0, 1, 2, 4, 5, 6], 7) == (Node(0, 2), Node(2, 3), Node(4, 7))
    assert cover([], 7) == ()
    assert cover(range(7), 7) == (root(7),)
    assert repr(Node(4, 7)) == "[4,7)"


def test_neighbours_that_are_no_siblings_stay_apart() -> None:
    assert cover([1, 2], 4) == (Node(1, 2), Node(2, 3))


def test_impossible_questions() -> None:
    with pytest.raises(AssertionError):
        cover([4], 4)
    with pytest.raises(AssertionError):
        root(0)
    with pytest.raises(AssertionError):
        _ = Node(3, 4).children
    with pytest.raises(AssertionError):
        parent(root(4), 4)
