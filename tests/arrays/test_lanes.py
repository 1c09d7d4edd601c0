"""How leaves are divided among the devices of a group, here with all devices in one process."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxft_protocol.ranks.lanes import Span

from jaxft._arrays._handover import Handover
from jaxft._arrays._lanes import Lanes, lane_devices
from jaxft._arrays._layout import LeafSpec
from jaxft._arrays._leaf_types import LeafType
from jaxft._arrays._pieces import Pieces, Spread

SHAPES = ((8, 6), (4, 6), (10,), (3, 3), ())
# Rows over all devices, columns over half of them, and three that every device holds.
SPECS = (
    PartitionSpec(("a", "b")),
    PartitionSpec(None, "b"),
    PartitionSpec(),
    PartitionSpec(),
    PartitionSpec(),
)
DTYPES = ("float32", "bfloat16", "float32", "int32", "float32")


def devices() -> list[jax.Device]:
    return jax.devices()[:4]


def lanes() -> Lanes:
    mesh = Mesh(np.array(devices()).reshape(2, 2), ("a", "b"))
    types = [LeafType(*pair) for pair in zip(SHAPES, DTYPES, strict=True)]
    return Lanes.of(SHAPES, types, [NamedSharding(mesh, spec) for spec in SPECS], devices())


def leaves() -> list[np.ndarray]:
    return [
        np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def test_every_element_belongs_to_exactly_one_lane() -> None:
    made = lanes()
    counts = [np.zeros(shape, int) for shape in SHAPES]
    for lane, parts in enumerate(made.by_lane):
        for part in parts:
            counts[part.leaf][part.index] += 1
            assert made.held[part.leaf][lane] == part.block, "the device holds it"
    assert all((count == 1).all() for count in counts)


def test_blocks_that_several_devices_hold_are_dealt_evenly() -> None:
    """Otherwise the first device of each set would send all of them."""
    made = lanes()
    shared = [{part.leaf for part in parts if part.leaf > 0} for parts in made.by_lane]
    assert [len(numbers) for numbers in shared] == [2, 1, 1, 1]


def test_leaves_are_whole_again_from_the_parts_of_all_spans() -> None:
    made = lanes()
    pieces = Pieces(made, devices(), [], rank=0, ranks=1)
    parts = [array for span in pieces.spans((1, 2, 4)) for array in pieces.cut(leaves(), span)]
    for leaf, again in zip(leaves(), pieces.gathered(parts), strict=True):
        np.testing.assert_array_equal(again, leaf)
        assert again.dtype == leaf.dtype


def test_groups_of_other_process_counts_agree_on_the_types_of_a_span() -> None:
    made, span = lanes(), Span(2, 3)
    specs = [LeafSpec(f"leaf{n}", shape, "float32") for n, shape in enumerate(SHAPES)]
    whole = Pieces(made, devices(), [], rank=0, ranks=1)
    half = Pieces(made, devices(), [], rank=1, ranks=2)
    assert half.own == Span(2, 4)
    assert whole.specs(specs, span) == half.specs(specs, span)
    assert whole.specs(specs, span)[0].path == "leaf0[4:6,0:6]"
    named = dict(zip(half.parts, half.cut(pick(leaves(), half), Span(2, 4)), strict=True))
    for part, array in zip(made.parts(span), whole.cut(leaves(), span), strict=True):
        np.testing.assert_array_equal(named[part], array)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_blocks_are_handed_over_although_a_mesh_in_another_order_is_set(
    kind: AxisType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `jax.set_mesh`, as programs do. JAX compiles under it for no other order, such as a hand-over's."""
    monkeypatch.setattr(Handover, "_crosses", lambda *_: True)  # as if these were of several processes
    made, given = lanes(), leaves()
    found = {part: given[part.leaf][part.index] for parts in made.by_lane for part in parts}
    mesh = Mesh(np.array(devices()[::-1]).reshape(2, 2), ("a", "b"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        Handover(made, devices()).complete(found, list(found))
        assert jax.sharding.get_mesh() == mesh


def pick(leaves: list[np.ndarray], pieces: Pieces) -> list[np.ndarray]:
    """What `split` returns in a process of several."""
    return [leaves[part.leaf][part.index] for part in pieces.parts]


def test_other_shardings_have_other_digests() -> None:
    mesh = Mesh(np.array(devices()), ("a",))
    reverse = Mesh(np.array(devices()[::-1]), ("a",))
    digests = {
        Lanes.of([(8,)], [LeafType((8,), "float32")], [NamedSharding(each, spec)], devices()).digest
        for each in (mesh, reverse)
        for spec in (PartitionSpec("a"), PartitionSpec())
    }
    assert len(digests) == 3, "the order of devices counts only where it makes a difference"


def test_a_leaf_on_one_device_does_not_make_lanes() -> None:
    assert lane_devices([None, jax.device_put(1.0).sharding]) == ()
    mesh = Mesh(np.array(devices()[::-1]), ("a",))
    assert list(lane_devices([NamedSharding(mesh, PartitionSpec())])) == devices()


def test_a_group_of_one_process_has_whole_leaves() -> None:
    pieces = Pieces(lanes(), devices(), [Spread((8, 6), None)], rank=0, ranks=1)
    given = leaves()
    assert pieces.split(given) is given
    assert pieces.join(given) is given
    assert pieces.count == 1
