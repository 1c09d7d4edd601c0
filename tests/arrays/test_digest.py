"""Equal trees have equal digests, wherever they lie; whatever differs shows."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxft import digest

RNG = np.random.default_rng(5)
ARRAY = RNG.standard_normal((8, 12), dtype=np.float32)


def sharded(array: Any, devices: int, *spec: str | None) -> jax.Array:
    shape = (2, 2) if devices == 4 and len({*spec} - {None}) == 2 else (devices, 1)
    over = Mesh(np.array(jax.devices()[:devices]).reshape(shape), ("x", "y"))
    return jax.device_put(array, NamedSharding(over, PartitionSpec(*spec)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_the_sharding_does_not_matter(dtype: str) -> None:
    array = ARRAY.astype(dtype)
    wanted = digest({"w": array})
    for devices, spec in itertools.product((1, 2, 4), [(), ("x",), (None, "x"), ("x", "y"), ("y", "x")]):
        assert digest({"w": sharded(array, devices, *spec)}) == wanted
    assert len(wanted) == 32
    assert int(wanted, 16) >= 0


def test_memory_order_and_byte_order_do_not_matter() -> None:
    assert digest(np.asfortranarray(ARRAY)) == digest(ARRAY)
    assert digest(np.repeat(ARRAY, 2, axis=1)[:, ::2]) == digest(ARRAY)
    assert digest(ARRAY.astype(">f4")) == digest(ARRAY) == digest(ARRAY.astype("<f4"))
    assert digest(ARRAY.T) != digest(ARRAY)


def test_jax_and_numpy_agree() -> None:
    for dtype in ("float32", "bfloat16", "float16", "int4", "float8_e4m3fn", "uint32", "complex64"):
        array = np.abs(ARRAY).astype(dtype)
        assert digest([jnp.asarray(array)]) == digest([array])


TREE = {
    "a": [ARRAY, np.arange(4)],
    "b": (np.float32(1.5), np.zeros((0, 3), np.float32)),
    "c": np.ones((2, 2)),
}


OTHERS = {
    "path": {"a": TREE["a"], "b": TREE["b"], "d": TREE["c"]},
    "nesting": {"a": TREE["a"], "b": TREE["b"], "c": [TREE["c"]]},
    "order": {**TREE, "a": TREE["a"][::-1]},
    "shape": {**TREE, "c": np.ones(4)},
    "shape of the same rank": {**TREE, "c": np.ones((4, 1))},
    "shape of an empty leaf": {**TREE, "b": (np.float32(1.5), np.zeros((3, 0), np.float32))},
    "dtype": {**TREE, "c": np.ones((2, 2)).view(np.int64)},
    "dtype of an empty leaf": {**TREE, "b": (np.float32(1.5), np.zeros((0, 3), np.int32))},
    "a leaf less": {"a": TREE["a"], "b": TREE["b"]},
    "an empty leaf less": {**TREE, "b": (np.float32(1.5),)},
    "signs": {**TREE, "c": -TREE["c"]},
}


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_differs_shows(what: str) -> None:
    assert digest(OTHERS[what]) != digest(TREE)


@settings(max_examples=30, deadline=None)
@given(bit=st.integers(0, ARRAY.nbytes * 8 - 1))
def test_each_bit_shows(bit: int) -> None:
    flipped = ARRAY.copy()
    flipped.view(np.uint8).reshape(-1)[bit // 8] ^= 1 << bit % 8
    assert digest({"w": flipped}) != digest({"w": ARRAY})


@settings(max_examples=30, deadline=None)
@given(one=st.integers(0, ARRAY.size - 1), other=st.integers(0, ARRAY.size - 1))
def test_a_swap_of_two_elements_shows(one: int, other: int) -> None:
    swapped = ARRAY.copy().reshape(-1)
    swapped[[one, other]] = swapped[[other, one]]
    same = one == other or ARRAY.reshape(-1)[one] == ARRAY.reshape(-1)[other]
    assert (digest(swapped.reshape(ARRAY.shape)) == digest(ARRAY)) == same


def test_equal_values_of_other_bits_show() -> None:
    assert digest(np.float32(0.0)) != digest(np.float32(-0.0))
    quiet, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert digest(quiet) != digest(other)
    assert digest(quiet) == digest(np.float32(quiet))


def test_keys() -> None:
    key = jax.random.key(3)
    assert digest(key) == digest(jax.random.key(3))
    assert digest(key) != digest(jax.random.key(4))
    assert digest(key) != digest(jax.random.key_data(key)), "a key is no pair of numbers"
    one, other = (
        jax.random.wrap_key_data(jnp.zeros(4, jnp.uint32), impl=name) for name in ("rbg", "unsafe_rbg")
    )
    assert digest(one) != digest(other), "they make other numbers"
    keys = jax.random.split(key, 8)
    assert digest({"keys": sharded(keys, 4, "x")}) == digest({"keys": keys})


def test_numbers_count_as_numpy_makes_them() -> None:
    assert digest({"step": 3}) == digest({"step": np.int64(3)})
    assert digest({"rate": 0.5}) == digest({"rate": np.float64(0.5)})
    assert digest({"on": True}) == digest({"on": np.bool_(True)}) != digest({"on": 1})
    assert digest({"step": 3}) != digest({"step": 3.0})


def test_trees_without_leaves() -> None:
    assert digest({}) == digest([]) == digest(None)
    assert digest({}) != digest(np.zeros(0))
    assert digest(np.zeros(3, jax.dtypes.float0)) == digest(np.zeros(3, jax.dtypes.float0))


def test_no_name_can_pass_for_the_bytes_of_another_leaf() -> None:
    """The hashed bytes can be read in one way only."""
    whole = {"a": np.frombuffer(b"1234", np.uint8), "b": np.frombuffer(b"5678", np.uint8)}
    head = b"['b'] uint8 (4,)"
    forged = {"a": np.frombuffer(b"1234" + head + b"5678", np.uint8)}
    renamed = {"a'] uint8 (4,)1234['b": np.frombuffer(b"5678", np.uint8)}
    assert len({digest(whole), digest(forged), digest(renamed)}) == 3


@pytest.mark.parametrize(
    "leaf",
    [object(), 2**70, np.array([None, 1]), "adam", np.datetime64("2026-01-01")],
    ids=["object", "huge", "array of objects", "text", "time"],
)
def test_what_is_no_array_is_refused(leaf: Any) -> None:
    """The bytes of an object would be addresses: other ones in each process."""
    with pytest.raises(
        TypeError, match=r"jaxft\.digest takes arrays and numbers, but the leaf \['a'\]\[0\] is"
    ):
        digest({"a": [leaf]})
    with pytest.raises(TypeError, match=r"the leaf itself is .* Pass the arrays alone"):
        digest(leaf)


def test_arrays_are_left_as_they_were() -> None:
    """Reading an array keeps no view of it, so the next step can still write in its place."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    for devices in (1, 4):
        array = jax.block_until_ready(step(sharded(ARRAY, devices, "x")))
        pointers = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
        digest({"w": array})
        after = jax.block_until_ready(step(array))
        assert [shard.data.unsafe_buffer_pointer() for shard in after.addressable_shards] == pointers
