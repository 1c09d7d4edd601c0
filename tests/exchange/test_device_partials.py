"""Contributions that stay on an accelerator until they are exchanged. CPU devices take its place."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxft._arrays import _device_sums
from jaxft._arrays._device_sums import DeviceSums, device_sums
from jaxft._arrays._host_copies import host_copies
from jaxft._arrays._layout import Layout
from jaxft._exchange._partials import Partials
from jaxft._exchange._tree import Node, cover
from tests.accelerators import pretended

from .members import MIXED, assert_same_bits, contribution, exchange_all, mesh, reference_means, regions_of

SPECS = tuple(spec for spec in MIXED if spec.dtype != "float64")  # JAX has none without x64
LAYOUT = Layout.of(SPECS)


@pytest.fixture(autouse=True, scope="module")
def _accelerator() -> Iterator[None]:
    with pretended():
        yield


def on_one() -> list[Sharding]:
    return [SingleDeviceSharding(jax.devices()[0])] * len(SPECS)


def on_four() -> list[Sharding]:
    """Leaves that are divided among four devices where their shape allows it, and copied to them where not."""
    devices = jax.make_mesh((4,), ("x",))
    return [NamedSharding(devices, P("x") if spec.shape[:1] == (5000,) else P()) for spec in SPECS]


def placed(shard: int, shardings: Sequence[Sharding]) -> list[jax.Array]:
    return jax.device_put(contribution(SPECS, shard), list(shardings))


def held(total: int, shards: Sequence[int], shardings: Sequence[Sharding]) -> Partials:
    made = Partials(LAYOUT, total, device_sums(LAYOUT, tuple(shardings)))
    for shard in shards:
        made.add(shard, placed(shard, shardings))
    return made


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9).flatmap(lambda total: st.permutations(range(total))))
def test_the_mean_is_the_reference_in_whatever_order_shards_come(order: list[int]) -> None:
    total = len(order)
    partials = held(total, order, on_one())
    assert partials.nodes == (Node(0, total),)
    assert_same_bits(partials.mean_alone(), reference_means(SPECS, total))


def test_leaves_on_several_devices_are_added_where_they_are() -> None:
    partials = held(5, range(5), on_four())
    assert_same_bits(partials.mean_alone(), reference_means(SPECS, 5))


@settings(deadline=None)
@given(st.sets(st.integers(0, 10)))
def test_what_is_held_is_the_cover(shards: set[int]) -> None:
    partials = held(11, sorted(shards), on_one())
    assert partials.nodes == cover(shards, 11)
    assert [shard for shard in range(11) if partials.has(shard)] == sorted(shards)


def test_nothing_is_on_the_host_before_it_is_asked_for() -> None:
    partials = held(4, [0, 1, 2], on_one())
    for node in partials.nodes:
        with pytest.raises(KeyError):
            partials.part(node, 0, 0, 1)
    partials.start_copies()
    partials.to_host()
    dtypes = {node: [region.dtype.name for region in regions_of(partials, node)] for node in partials.nodes}
    assert dtypes == {
        Node(0, 2): [region.sum_dtype for region in LAYOUT.regions],
        Node(2, 3): [region.dtype for region in LAYOUT.regions],
    }


def test_a_contribution_outlives_the_sum_and_a_sum_does_not() -> None:
    shardings = on_one()
    partials = Partials(LAYOUT, 4, device_sums(LAYOUT, tuple(shardings)))
    first, *rest = [placed(shard, shardings) for shard in range(4)]
    partials.add(0, first)
    partials.add(1, rest[0])
    sums = partials._on_device[Node(0, 2)].arrays
    for shard, leaves in enumerate(rest[1:], 2):
        partials.add(shard, leaves)
    assert not any(leaf.is_deleted() for leaves in (first, *rest) for leaf in leaves)
    assert all(leaf.is_deleted() for leaf in sums if leaf.size)
    assert_same_bits(partials.mean_alone(), reference_means(SPECS, 4))


@pytest.mark.parametrize("copied", [[0], [0, 1], [0, 1, 2]])
def test_shards_that_come_after_the_copies_are_added_on_the_host(copied: list[int]) -> None:
    """As a group gets more of them after another one has died in the exchange."""
    for ready in (Partials.start_copies, Partials.to_host):
        partials = held(4, copied, on_one())
        ready(partials)
        for shard in range(len(copied), 4):
            partials.add(shard, placed(shard, on_one()))
        assert_same_bits(partials.mean_alone(), reference_means(SPECS, 4))


def test_a_device_without_room_leaves_the_sums_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = DeviceSums(LAYOUT, on_four(), 0)
    needed = sum(
        spec.size // (4 if spec.shape[:1] == (5000,) else 1) * region.sum_item_bytes
        for spec, region in (
            (s, LAYOUT.regions[e.region]) for s, e in zip(SPECS, LAYOUT.extents, strict=True)
        )
    )
    for free, room in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(_device_sums, "free_bytes", lambda _, free=free: free)
        assert sums.have_room() is room
    # No contribution is kept there either: the next `compute` needs the memory.
    partials = held(4, range(3), on_four())
    assert set(partials._values) == {Node(0, 2), Node(2, 3)}
    partials.add(3, placed(3, on_four()))
    assert_same_bits(partials.mean_alone(), reference_means(SPECS, 4))


def test_room_that_is_gone_between_two_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    partials = held(4, [0], on_four())
    assert set(partials._on_device) == {Node(0, 1)}
    monkeypatch.setattr(_device_sums, "free_bytes", lambda _: 0)
    for shard in (1, 2, 3):
        partials.add(shard, placed(shard, on_four()))
    assert not partials._on_device
    assert_same_bits(partials.mean_alone(), reference_means(SPECS, 4))


def test_copies_that_are_on_their_way_are_added_like_arrays() -> None:
    partials = Partials(LAYOUT, 3)
    for shard in range(3):
        partials.add(shard, host_copies(placed(shard, on_four())))
    assert_same_bits(partials.mean_alone(), reference_means(SPECS, 3))


def test_members_with_and_without_an_accelerator_get_the_same_means() -> None:
    dealt = [[0, 1, 2], [3, 5], [4]]
    with mesh(dealt) as links:
        members = [held(6, dealt[0], on_one()), held(6, dealt[1], on_four()), Partials(LAYOUT, 6)]
        members[2].add(4, contribution(SPECS, 4))
        for mine in members:
            mine.to_host()
        for means in exchange_all(links, members):
            assert_same_bits(means, reference_means(SPECS, 6))


def test_leaves_on_different_devices_are_added_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the parts of a process with several devices, in a group of several processes."""
    one, other = jax.devices()[:2]
    shardings = [SingleDeviceSharding(other if number % 3 else one) for number in range(len(SPECS))]
    partials = held(5, range(5), shardings)
    assert [held.summed for held in partials._on_device.values()] == [True]
    assert_same_bits(partials.mean_alone(), reference_means(SPECS, 5))
    sums = device_sums(LAYOUT, tuple(shardings))
    assert sums is not None
    needed = {
        device: sum(
            spec.size * LAYOUT.regions[extent.region].sum_item_bytes
            for spec, extent, at in zip(SPECS, LAYOUT.extents, shardings, strict=True)
            if at.device_set == {device}
        )
        for device in (one, other)
    }
    for free, room in (
        (needed, True),
        ({**needed, one: needed[one] - 1}, False),
        ({**needed, other: needed[other] - 1}, False),
    ):
        monkeypatch.setattr(_device_sums, "free_bytes", lambda device, free=free: free[device])
        assert sums.have_room() is room


def test_nothing_to_add() -> None:
    assert device_sums(Layout.of([]), ()) is None
    partials = Partials(Layout.of([]), 1)
    partials.add(0, [])
    assert partials.mean_alone() == []


def test_numpy_arrays_are_copied_at_once() -> None:
    partials = Partials(LAYOUT, 2)
    leaves = [np.array(leaf) for leaf in contribution(SPECS, 0)]
    partials.add(0, leaves)
    for leaf in leaves:
        leaf[...] = 0
    partials.add(1, placed(1, on_one()))
    assert_same_bits(partials.mean_alone(), reference_means(SPECS, 2))
