"""A fetched state lies where it was received, for as long as an array reads it."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxft._arrays import _memory
from jaxft._arrays._memory import aligned_empty
from jaxft._arrays._placement import place
from jaxft._heal import _fetch
from jaxft._heal._blob import BlobLayout
from tests.heal.donors import (
    MB,
    donor,
    fetch_state,
    joiner,
    leaf_types,
    mesh,
    own,
    raw,
    same_bits,
    sharded,
    values,
)

HEAL = 5


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def arena_of(arrays: list[np.ndarray], arena: np.ndarray) -> list[np.ndarray]:
    """The leaves of an arena, filled with these values."""
    layout = BlobLayout.of(leaf_types(*((array.shape, array.dtype.name) for array in arrays)))
    views = layout.arrays(arena[: layout.total_bytes])
    for view, array in zip(views, arrays, strict=True):
        view[...] = array
    return views


def test_what_is_placed_is_not_copied() -> None:
    arrays = [values((500, 300)), values((100_000,), "bfloat16")]
    views = arena_of(arrays, aligned_empty(3 * MB))
    placed = place(views, [jnp.zeros_like(array) for array in arrays])
    assert [leaf.unsafe_buffer_pointer() for leaf in placed] == [address(view) for view in views]
    assert same_bits(placed, arrays)


def test_what_was_not_placed_stays_so_although_a_mesh_is_set() -> None:
    """JAX would make keys and numbers of weak type on all devices of the mesh, also of other processes."""
    like = [jax.random.key(0), jnp.asarray(0.5), jnp.zeros(3)]
    data = [np.array([1, 2], np.uint32), np.float32(2.5), np.arange(3, dtype=np.float32)]
    with jax.set_mesh(jax.make_mesh((4,), ("x",))):
        placed = place(list(map(np.asarray, data)), like)
    assert [leaf.sharding for leaf in placed] == [leaf.sharding for leaf in like]
    assert not any(leaf.committed for leaf in placed)
    assert placed[1].weak_type
    assert same_bits([jax.random.key_data(placed[0]), *placed[1:]], data)


def test_a_leaf_lies_as_the_joiners_own() -> None:
    array = values((8, 12), "bfloat16")
    for spec in [("x",), (None, "x"), (), (None, ("x", "y")), ("y", "x")]:
        like = sharded(np.zeros_like(array), mesh(2, 2), *spec)
        (leaf,) = place([array], [like])
        assert leaf.sharding == like.sharding
        assert leaf.committed
        assert same_bits([leaf], [array])


def test_keys_become_keys_again() -> None:
    spread = NamedSharding(mesh(4), PartitionSpec("x"))

    def made(seed: int) -> list[jax.Array]:
        key = jax.random.key(seed)
        rows = jax.random.split(key, 8)
        return [key, jax.random.key(seed, impl="rbg"), rows, jax.device_put(rows, spread)]

    keys, like = made(3), made(0)
    placed = place([np.asarray(jax.random.key_data(key)) for key in keys], like)
    for leaf, key in zip(placed, keys, strict=True):
        assert leaf.dtype == key.dtype
        assert leaf.sharding == key.sharding
        assert leaf.committed == key.committed
        assert raw(leaf) == raw(key)


def test_what_was_not_placed_on_purpose_stays_free() -> None:
    """A scalar that is committed to one device would be refused by a program that spans four."""
    like: list[Any] = [jnp.zeros(()), 0, 1.5, np.zeros(3, np.float32), jax.random.key(1)]
    arrays = [np.float32(2), np.int32(4), np.float32(2.5), values((3,)), values((2,), "uint32")]
    placed = place([np.asarray(array) for array in arrays], like)
    assert not any(leaf.committed for leaf in placed)
    assert same_bits(placed, arrays)
    spread = sharded(values((8,)), mesh(4), "x")
    assert same_bits([jax.jit(jnp.add)(spread, placed[0])], [values((8,)) + np.float32(2)])
    (committed,) = place([np.asarray(arrays[0])], [jax.device_put(np.float32(0), jax.devices()[1])])
    assert committed.committed
    assert committed.devices() == {jax.devices()[1]}


# ---- memory that an array still reads goes to no other ----


def test_no_block_is_handed_out_that_an_array_still_reads() -> None:
    """Arrays of one arena die one after another: only the last frees it. Until then requests get another."""
    size = 2 * MB + 64 * 77  # of no other test
    arrays = [values((64 * 1024,), seed=seed) for seed in range(4)]
    arena = aligned_empty(size)
    where = address(arena)
    views = arena_of(arrays, arena)
    like = [jnp.zeros(1)] * 2 + [sharded(np.zeros(64 * 1024, np.float32), mesh(4), "x")] * 2
    placed = dict(enumerate(place(views, like)))
    pointers = {
        shard.data.unsafe_buffer_pointer() for leaf in placed.values() for shard in leaf.addressable_shards
    }
    assert all(where <= pointer < where + size for pointer in pointers), "this test is of aliases"
    del arena, views
    while placed:
        gc.collect()
        assert where not in scribble(size)
        for number, leaf in placed.items():
            assert raw(leaf) == arrays[number].tobytes()
        del leaf
        placed.popitem()
    gc.collect()
    assert where in scribble(size)


def scribble(size: int) -> list[int]:
    """Write over every block of this size that can be had; returns where they are."""
    blocks = [aligned_empty(size) for _ in range(_idle_blocks(size) + 1)]
    for block in blocks:
        block[:] = 0xFF
    return list(map(address, blocks))


def _idle_blocks(size: int) -> int:
    return sum(len(idle.block) == size for idle in _memory._idle)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_arena_is_not_written_to_by_steps_that_donate_what_lies_in_it(devices: int) -> None:
    step = jax.jit(lambda xs: [x * 2 + 1 for x in xs], donate_argnums=0)
    arrays = [np.arange(100_000, dtype=np.float32), np.ones((512, 64), np.float32)]
    arena = aligned_empty(MB + 64 * 79)
    views = arena_of(arrays, arena)
    like = [sharded(np.zeros_like(array), mesh(devices), "x") for array in arrays]
    leaves = place(views, like)
    wanted = arrays
    for _ in range(3):
        leaves = jax.block_until_ready(step(leaves))
        wanted = [array * 2 + 1 for array in wanted]
        assert same_bits(leaves, wanted)
    assert same_bits(views, arrays)


def test_a_fetched_state_belongs_to_nobody_but_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena of a state is as big as the state: it must not wait to be used again when the state is gone."""
    arenas: list[Any] = []
    make = _fetch._aligned

    def noted(size_bytes: int) -> np.ndarray:
        arena = make(size_bytes)
        arenas.append((address(arena), arena.nbytes))
        return arena

    monkeypatch.setattr(_fetch, "_aligned", noted)
    state = [values((MB,)), own(values((MB,), seed=1))]
    with donor(leaves=state) as one, joiner(one) as fetcher:
        one.store.pin(HEAL, 0)
        fetched = fetch_state(fetcher, 0, [jnp.zeros(MB)] * 2)
        ((where, size),) = arenas
        assert where % 64 == 0
        assert size == 8 * MB
        assert [leaf.unsafe_buffer_pointer() for leaf in fetched] == [where, where + 4 * MB]
        idle = _idle_blocks(size)
        del fetched
        gc.collect()
        assert _idle_blocks(size) == idle


@pytest.mark.parametrize("devices", [1, 4])
def test_no_device_holds_two_states_while_one_takes_the_place_of_another(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step does not consume leaf 2: the program may hold it elsewhere, too."""
    sharding = NamedSharding(
        jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices]), PartitionSpec("x")
    )
    old = [jax.device_put(jnp.full((8, 1000), number, jnp.float32), sharding) for number in range(6)]
    new = [np.full((8, 1000), 10.0 + number, np.float32) for number in range(6)]
    most_bytes, put = 0, jax.device_put

    def watched(arrays: Any, where: Any) -> Any:
        nonlocal most_bytes
        made = put(arrays, where)
        live = {id(each): each.nbytes for each in (*jax.live_arrays(), *made) if each.shape == (8, 1000)}
        most_bytes = max(most_bytes, sum(live.values()))
        return made

    monkeypatch.setattr(jax, "device_put", watched)
    placed = place(new, old, consumed={0, 1, 3, 4, 5})
    assert most_bytes == (len(old) + 1) * old[2].nbytes, "one state, and the leaf that is kept"
    assert [leaf.is_deleted() for leaf in old] == [True, True, False, True, True, True]
    assert [float(np.asarray(leaf)[0, 0]) for leaf in placed] == [10, 11, 12, 13, 14, 15]
    assert all(leaf.sharding == sharding for leaf in placed)


def test_a_random_key_that_is_consumed_gives_up_its_memory() -> None:
    key = jax.random.key(3)
    data = np.array(jax.random.key_data(key))
    (placed,) = place([data], [key], consumed=(0,))
    assert key.is_deleted()
    np.testing.assert_array_equal(jax.random.key_data(placed), data)
