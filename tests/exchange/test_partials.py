"""A group's contributions to one step."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._errors import ConfigurationError
from jaxft._exchange._partials import Partials
from jaxft._exchange._tree import Node, cover

from .members import MIXED, assert_same_bits, contribution, partials_of, reference_means, regions_of

LAYOUT = Layout.of(MIXED)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 13).flatmap(lambda total: st.permutations(range(total))))
def test_alone_the_mean_is_the_reference_in_whatever_order_shards_come(order: list[int]) -> None:
    total = len(order)
    partials = partials_of(LAYOUT, total, order)
    assert partials.nodes == (Node(0, total),)
    assert_same_bits(partials.mean_alone(), reference_means(MIXED, total))


@settings(deadline=None)
@given(st.sets(st.integers(0, 10)))
def test_what_is_held_is_the_cover(shards: set[int]) -> None:
    layout = Layout.of([LeafSpec("x", (3,), "float32")])
    partials = partials_of(layout, 11, sorted(shards))
    assert partials.nodes == cover(shards, 11)
    assert [shard for shard in range(11) if partials.has(shard)] == sorted(shards)


def test_a_single_contribution_keeps_its_dtype_and_a_sum_does_not() -> None:
    partials = partials_of(LAYOUT, 4, [0])
    assert [buffer.dtype.name for buffer in regions_of(partials, Node(0, 1))] == [
        region.dtype for region in LAYOUT.regions
    ]
    partials.add(1, contribution(MIXED, 1))
    assert [buffer.dtype.name for buffer in regions_of(partials, Node(0, 2))] == [
        region.sum_dtype for region in LAYOUT.regions
    ]
    with pytest.raises(KeyError):
        regions_of(partials, Node(0, 1))  # merged: its memory is free


@pytest.mark.parametrize(("first", "rest"), [([0, 1], [2, 3]), ([0, 1, 2], [3])])
def test_sums_are_merged_in_place(first: list[int], rest: list[int]) -> None:
    layout = Layout.of([LeafSpec("x", (5,), "float32")])
    partials = partials_of(layout, 4, first)
    (before,) = regions_of(partials, Node(first[0], first[0] + 2))
    for shard in rest:
        partials.add(shard, contribution(layout.specs, shard))
    assert np.shares_memory(regions_of(partials, Node(0, 4))[0], before)
    assert_same_bits(partials.mean_alone(), reference_means(layout.specs, 4))


def test_arrays_of_jax_are_read_where_they_lie() -> None:
    layout = Layout.of([LeafSpec("x", (64, 3), "float32"), LeafSpec("y", (100,), "float32")])
    leaves = [jax.numpy.asarray(leaf) for leaf in contribution(layout.specs, 0)]
    partials = Partials(layout, 2)
    partials.add(0, leaves)
    for leaf, extent in zip(leaves, layout.extents, strict=True):
        part = partials.part(Node(0, 1), extent.region, extent.offset + 1, extent.stop)
        assert np.shares_memory(part, np.asarray(leaf))


SIZES = st.lists(st.integers(0, 200), min_size=1, max_size=8)


@settings(deadline=None)
@given(SIZES, st.data())
def test_any_part_is_what_the_layout_says(sizes: list[int], data: st.DataObject) -> None:
    layout = Layout.of([LeafSpec(f"{number}", (size,), "float32") for number, size in enumerate(sizes)])
    leaves = contribution(layout.specs, 0)
    whole = np.zeros(layout.regions[0].size, np.float32)
    for leaf, extent in zip(leaves, layout.extents, strict=True):
        whole[extent.offset : extent.stop] = leaf
    partials = partials_of(layout, 2, [0])
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    assert_same_bits([partials.part(Node(0, 1), 0, start, stop)], [whole[start:stop]])


def test_padding_is_zero() -> None:
    partials = partials_of(LAYOUT, 2, [0, 1])
    for gap in LAYOUT.gaps():
        assert not regions_of(partials, Node(0, 2))[gap.region][gap.offset : gap.stop].any()


def test_results_are_fresh_aligned_and_contiguous() -> None:
    partials = partials_of(LAYOUT, 2, [0, 1])
    first, second = partials.mean_alone(), partials.mean_alone()
    assert_same_bits(first, second)
    for each, other, spec in zip(first, second, MIXED, strict=True):
        assert not np.shares_memory(each, other)
        assert (each.shape, each.dtype.name) == (spec.shape, spec.result_dtype)
        assert each.flags.c_contiguous
        assert each.ctypes.data % 64 == 0


def test_contributions_are_copied() -> None:
    leaves = [leaf.copy() for leaf in contribution(MIXED, 0)]
    partials = Partials(LAYOUT, 1)
    partials.add(0, leaves)
    wanted = partials.mean_alone()
    for leaf in leaves:
        leaf[...] = 0
    assert_same_bits(partials.mean_alone(), wanted)


def test_a_shard_is_added_once() -> None:
    partials = partials_of(LAYOUT, 4, [0, 1])
    with pytest.raises(AssertionError, match="shard 1 was already added"):
        partials.add(1, contribution(MIXED, 1))
    with pytest.raises(AssertionError):
        partials.add(4, contribution(MIXED, 4))


def test_alone_needs_every_shard() -> None:
    with pytest.raises(AssertionError, match=r"holds \(\[0,1\),\) of \[0,2\)"):
        partials_of(LAYOUT, 2, [0]).mean_alone()


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda leaves: leaves[:-1], "A contribution has 11 leaves, .* laid out for 12"),
        (
            lambda leaves: [leaves[0].T, *leaves[1:]],
            r"'matrix' has shape \(70, 130\) .* laid out for \(130, 70\)",
        ),
        (lambda leaves: [*leaves[:-1], leaves[-1].astype(np.float32)], "'quantised' .* dtype float32"),
    ],
)
def test_other_leaves_are_refused_and_change_nothing(spoil, match) -> None:
    partials = partials_of(LAYOUT, 4, [0])
    before = [buffer.copy() for buffer in regions_of(partials, Node(0, 1))]
    with pytest.raises(ConfigurationError, match=match):
        partials.add(1, spoil(contribution(MIXED, 1)))
    assert partials.nodes == (Node(0, 1),)
    assert_same_bits(regions_of(partials, Node(0, 1)), before)


def test_a_leaf_that_cannot_be_read_changes_nothing() -> None:
    partials = partials_of(LAYOUT, 2, [0])
    leaves = [jax.numpy.asarray(leaf) for leaf in contribution(MIXED, 1)[:2]] + contribution(MIXED, 1)[2:]
    leaves[1].delete()
    with pytest.raises(RuntimeError):
        partials.add(1, leaves)
    assert partials.nodes == (Node(0, 1),)
    partials.add(1, contribution(MIXED, 1))
    assert_same_bits(partials.mean_alone(), reference_means(MIXED, 2))


@pytest.mark.parametrize(
    "spec",
    [P("a", "b"), P("b"), P(None, "a"), P(("a", "b")), P()],
    ids=["2d", "rows", "columns", "both", "copies"],
)
def test_arrays_on_several_devices_are_put_together(spec: P) -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = (LeafSpec("x", (8, 12), "float32"), LeafSpec("y", (4, 4, 3), "bfloat16"))
    leaves = contribution(specs, 0)
    partials = Partials(Layout.of(specs), 1)
    partials.add(0, [jax.device_put(leaf, NamedSharding(mesh, spec)) for leaf in leaves])
    assert_same_bits(partials.mean_alone(), leaves)


def test_scalars_and_arrays_of_one_device() -> None:
    layout = Layout.of(
        [
            LeafSpec("loss", (), "float32"),
            LeafSpec("x", (2, 3), "bfloat16"),
            LeafSpec("none", (0,), "float32"),
        ]
    )
    leaves = contribution(layout.specs, 0)
    partials = Partials(layout, 1)
    partials.add(0, [np.float32(leaves[0]), jax.device_put(leaves[1]), jax.numpy.zeros((0,))])
    assert_same_bits(partials.mean_alone(), leaves)


def test_some_blocks_of_the_leaves_have_the_same_values_at_the_same_nodes() -> None:
    layout = Layout.of(MIXED)
    partials = partials_of(layout, 4, (0, 1, 3))
    matrix = LeafSpec("matrix[60:130,10:20]", (70, 10), "float32")
    part = Layout.of([MIXED[5], matrix])
    some = partials.select(part, [(5, (slice(0, 5000),)), (0, (slice(60, 130), slice(10, 20)))])
    assert some.nodes == partials.nodes
    for node in partials.nodes:
        whole = partials.part(node, 0, 0, 130 * 70).reshape(130, 70)
        np.testing.assert_array_equal(some.part(node, 1, 0, 700), whole[60:, 10:20].reshape(-1))
        number = layout.extents[5].region
        start = layout.extents[5].offset
        brain = partials.part(node, number, start, start + 5000)
        np.testing.assert_array_equal(some.part(node, 0, 0, 5000), brain)
        assert some.part(node, 0, 0, 5000).dtype == brain.dtype, "sums keep the dtype of sums"
