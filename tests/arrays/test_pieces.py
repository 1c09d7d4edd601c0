"""The blocks of spread arrays on one process, here with all devices, pretending that some are elsewhere."""

from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxft._arrays._pieces import Spread


class SomeDevices:
    """A sharding of which only the first devices belong to this process."""

    is_fully_addressable = False

    def __init__(self, sharding: NamedSharding, count: int) -> None:
        self._sharding = sharding
        self._count = count

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> Any:
        items = self._sharding.devices_indices_map(shape).items()
        return dict(list(items)[: self._count])


def sharded(spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), spec)


def spread(shape: tuple[int, ...], spec: PartitionSpec, count: int) -> Spread:
    return Spread(shape, cast(Sharding, SomeDevices(sharded(spec), count)))


def test_a_leaf_of_one_process_is_its_only_piece() -> None:
    leaf = jax.device_put(np.arange(8.0), sharded(PartitionSpec("x")))
    whole = Spread.of(leaf.shape, leaf.sharding)
    assert whole.sharding is None
    assert whole.split(leaf)[0] is leaf
    assert whole.join([leaf]) is leaf


def test_the_blocks_of_this_process_are_in_order_and_each_counts_once() -> None:
    rows = spread((8, 3), PartitionSpec("x"), 2)
    assert rows.blocks == (((0, 2), (0, 3)), ((2, 4), (0, 3)))
    everywhere = spread((8,), PartitionSpec(), 3)
    assert everywhere.blocks == (((0, 8),),)


@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec()])
def test_joined_pieces_are_the_leaf(spec: PartitionSpec) -> None:
    host = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    sharding = sharded(spec)
    leaf = jax.device_put(host, sharding)
    whole = Spread((8, 3), sharding)  # every device is ours: split and joined all the same
    joined = whole.join([np.asarray(piece) for piece in whole.split(leaf)])
    assert joined.sharding == sharding
    np.testing.assert_array_equal(joined, host)


@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec()])
def test_typed_keys_are_split_and_joined_like_numbers(spec: PartitionSpec) -> None:
    sharding = sharded(spec)
    leaf = jax.device_put(jax.random.split(jax.random.key(0), 8), sharding)
    whole = Spread((8,), sharding)
    joined = whole.join(whole.split(leaf))
    assert joined.dtype == leaf.dtype
    assert joined.sharding.is_equivalent_to(sharding, 1)
    np.testing.assert_array_equal(jax.random.key_data(joined), jax.random.key_data(leaf))


def test_too_few_pieces_are_a_fault() -> None:
    with pytest.raises(ValueError, match="zip"):
        spread((8,), PartitionSpec("x"), 2).join([np.zeros(2)])
