"""The digest of the training state that is taken on the devices."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxft._arrays import _device_digest
from jaxft._arrays._device_digest import StateDigest, period_steps
from jaxft._errors import ConfigurationError
from tests.step_models import mostly_long

pytestmark = pytest.mark.unoptimized

SMALL = ["float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int4", "uint4"]
DTYPES = ["float32", "bfloat16", "float16", "int32", "uint32", "int16", "uint16", *SMALL]
WIDE = ["float64", "int64", "uint64", "complex64", "complex128"]


FOLD = StateDigest()  # for all tests, because compiling takes long


def digest(*leaves: Any) -> int:
    return FOLD.start([jnp.asarray(leaf) for leaf in leaves]).result()


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def on_mesh(array: Any, sizes: Sequence[int], spec: P, axes: AxisType = AxisType.Auto) -> jax.Array:
    names = ("a", "b", "c")[: len(sizes)]
    mesh = jax.make_mesh(tuple(sizes), names, axis_types=(axes,) * len(sizes))
    return jax.device_put(array, NamedSharding(mesh, spec))


def test_the_same_bits_give_the_same_digest_in_every_version() -> None:
    # Groups compare digests, perhaps of two versions of jaxft: a change of the formula must be noticed.
    leaves = np.arange(12, dtype=np.float32).reshape(3, 4), np.int32(7), np.zeros(5, np.float16)
    assert digest(*leaves) == reference([np.asarray(leaf) for leaf in leaves])


def reference(leaves: Sequence[np.ndarray]) -> int:
    """The same digest, written plainly in numpy."""

    def scramble(number: int) -> int:
        x = number * 0x9E3779B97F4A7C15 % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return (x ^ x >> 31) >> 32

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    def place(index: Sequence[int], lane: int) -> int:
        factors = [scramble(lane + 2 * dimension + 2) | 1 for dimension in range(len(index))]
        return (scramble(lane) + sum(map(int.__mul__, index, factors))) % 2**32

    totals = [0, 0]
    for number, leaf in enumerate(leaves):
        sums = [0, 0]
        for index in np.ndindex(leaf.shape):
            word = int.from_bytes(leaf[index].tobytes(), "little")
            first = mix(word ^ place(index, 1))
            sums = [sums[0] + first, sums[1] + mix(first ^ place(index, 2))]
        for lane in (0, 1):
            totals[lane] += mix(mix(sums[lane] % 2**32) ^ place((number, lane), 3))
    return totals[0] % 2**32 | totals[1] % 2**32 << 32


@pytest.mark.parametrize("dtype", mostly_long(DTYPES, "float32", "bfloat16", "int4"))
def test_every_bit_of_every_dtype_counts(dtype: str) -> None:
    clean = jnp.asarray(noise(3, 5)).astype(dtype)
    bits = 4 if dtype.endswith("int4") else 8 * clean.dtype.itemsize
    words = np.asarray(jax.lax.bitcast_convert_type(clean, f"uint{bits}").astype(jnp.uint32))
    seen = {digest(clean)}
    for bit in range(bits):
        flipped = words.copy()
        flipped[2, 1] ^= np.uint32(1 << bit)
        seen.add(
            digest(jax.lax.bitcast_convert_type(jnp.asarray(flipped).astype(f"uint{bits}"), clean.dtype))
        )
    assert len(seen) == 1 + bits


@pytest.mark.parametrize("dtype", mostly_long(WIDE, "float64", "complex64"))
def test_every_bit_of_wide_dtypes_counts(dtype: str) -> None:
    with jax.enable_x64(True):
        seen = {digest(noise(4).astype(dtype))}
        bits = 8 * np.dtype(dtype).itemsize
        for bit in range(bits):
            flipped = noise(4).astype(dtype)
            flipped.view(np.uint8)[bits // 8 + bit // 8] ^= np.uint8(1 << bit % 8)
            seen.add(digest(flipped))
    assert len(seen) == 1 + bits


def test_booleans_and_keys_count() -> None:
    yes, no = np.array([True, False]), np.array([False, False])
    assert digest(yes) != digest(no)
    keys = [jax.random.key(0), jax.random.key(1), jax.random.split(jax.random.key(0), 2)]
    assert len({digest(key) for key in keys}) == 3
    assert digest(keys[0]) == digest(jax.random.key(0))


def test_signs_of_zero_and_nan_payloads_count() -> None:
    zeros = np.zeros(1000, np.float32)
    negative = zeros.copy()
    negative[[3, 700]] = -0.0
    nans = [np.uint32(0x7FC00000 + payload).view(np.float32) for payload in (0, 1, 2)]
    signaling = np.uint32(0x7F800001).view(np.float32)
    assert len({digest(zeros), digest(negative), digest(-zeros)}) == 3
    assert len({digest(nan) for nan in (*nans, signaling)}) == 4


def test_order_counts() -> None:
    leaf, other = noise(6, 7), noise(6, 7, seed=1)
    swapped, rows, crossed = leaf.copy(), leaf.copy(), [leaf.copy(), other.copy()]
    swapped[0, 0], swapped[5, 6] = leaf[5, 6], leaf[0, 0]
    rows[[1, 2]] = rows[[2, 1]]
    crossed[0][2, 3], crossed[1][2, 3] = other[2, 3], leaf[2, 3]
    pairs = [(leaf, other), (other, leaf), (swapped, other), (rows, other), tuple(crossed)]
    assert len({digest(*pair) for pair in pairs}) == len(pairs)


def test_collisions_are_as_rare_as_chance() -> None:
    # 780 states that differ in the signs of two zeros: in 24 bits, half of each lane, 0.02 pairs agree by chance.
    seen: list[int] = []
    for first in range(40):
        for other in range(first):
            leaf = np.zeros(40, np.float32)
            leaf[[first, other]] = -0.0
            seen.append(digest(leaf))
    for low, high in [(0, 32), (20, 52)]:
        parts = {(value >> low & 0xFFF, value >> high & 0xFFF) for value in seen}
        assert len(parts) >= len(seen) - 2


def test_empty_leaves_and_scalars() -> None:
    assert digest() == digest()
    assert digest(np.zeros((0, 3), np.float32), np.float32(1)) != digest(
        np.float32(1), np.zeros((0, 3), np.float32)
    )
    assert digest(np.float32(1)) != digest(np.float32(2))


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
LAYOUTS = [
    ((4,), P("a"), AUTO),
    ((4,), P(), AUTO),
    ((2, 2), P("b", "a"), EXPLICIT),
    ((2, 2), P("b"), AUTO),
    ((2, 2), P(None, ("b", "a")), EXPLICIT),
    ((1, 3), P(None, "b"), AUTO),
    ((2, 1, 2), P("c", ("a", "b")), AUTO),
]


@pytest.mark.parametrize(("sizes", "spec", "axes"), mostly_long(LAYOUTS, LAYOUTS[0], LAYOUTS[2], LAYOUTS[6]))
def test_sharding_does_not_matter(sizes: Sequence[int], spec: P, axes: AxisType) -> None:
    leaf, count = noise(8, 12), np.int32(3)
    keys = jax.random.split(jax.random.key(0), (4, 12))
    sharded = [
        on_mesh(leaf, sizes, spec, axes),
        on_mesh(count, sizes, P(), axes),
        on_mesh(keys, sizes, spec, axes),
    ]
    assert FOLD.start(sharded).result() == digest(leaf, count, keys)


@pytest.mark.parametrize("axes", mostly_long([AUTO, EXPLICIT], EXPLICIT))
def test_leaves_may_lie_on_several_meshes_of_the_same_devices_and_on_none(axes: AxisType) -> None:
    leaf, other, loose = noise(8, 4), noise(4, 4, seed=1), noise(3)
    leaves = [
        on_mesh(leaf, (4,), P("a"), axes),
        jnp.asarray(loose),
        on_mesh(other, (2, 2), P("b", "a"), axes),
    ]
    assert FOLD.start(leaves).result() == digest(leaf, loose, other)


@pytest.mark.unoptimized(False)
@pytest.mark.parametrize("spec", mostly_long([None, P("a"), P()], None, P("a")))
def test_a_leaf_may_be_donated_right_after(spec: P | None) -> None:
    size, expected = 1 << 22, digest(np.zeros(1 << 22, np.float32))
    step = jax.jit(lambda x: x + jnp.float32(1), donate_argnums=0)
    given = jnp.zeros(size) if spec is None else on_mesh(np.zeros(size, np.float32), (4,), spec)
    leaf = given + jnp.float32(0)  # an array from numpy may still be numpy's, and is never written in place
    FOLD.start([leaf]).result()
    step(leaf + jnp.float32(0)).block_until_ready()  # compiled, so that the next call overlaps
    where = addresses(leaf)
    pending = FOLD.start([leaf])
    after = step(leaf)
    # Written in place, and yet the digest is of the old values.
    assert leaf.is_deleted()
    assert addresses(after) == where
    assert pending.result() == expected
    assert FOLD.start([after]).result() == digest(np.ones(size, np.float32))


def addresses(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def test_a_donated_leaf_is_refused() -> None:
    leaf = jnp.zeros(3)
    leaf.delete()
    with pytest.raises(ConfigurationError, match=r"Leaf 1 of the 2 leaves .* consumed by an earlier step"):
        FOLD.start([jnp.zeros(3), leaf])


def test_the_second_digest_does_not_compile(caplog: pytest.LogCaptureFixture) -> None:
    fold = StateDigest()
    with jax.log_compiles():
        fold.start([on_mesh(noise(8), (4,), P("a")), jnp.float32(1)])
        assert "Compiling" in caplog.text
        leaves = [on_mesh(noise(8, seed=1), (4,), P("a")), jnp.float32(2)]
        caplog.clear()
        fold.start(leaves)
    assert "Compiling" not in caplog.text


@pytest.mark.unoptimized(False)
def test_there_is_one_collective_for_all_leaves() -> None:
    leaves = [on_mesh(noise(8, size), (4,), P("a")) for size in (1, 2, 3, 4, 5)]
    fold = StateDigest()
    fold.start(leaves)
    (((program, _),), _) = next(iter(fold._plans.values()))
    text = inspect.getclosurevars(program).nonlocals["program"].as_text()
    assert len(re.findall(r" = \S+ all-gather\(", text)) == 1
    assert "all-reduce" not in text


def test_a_leaf_on_a_mesh_adds_little_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA takes long to compile many small operations: a state of a thousand leaves took half a minute."""
    texts: list[str] = []

    def lowered(jitted: Any, *like: Any) -> Any:
        texts.append(jitted.lower(*like).as_text())
        return jitted

    monkeypatch.setattr(_device_digest, "compiled_ahead", lowered)
    pair = [on_mesh(noise(8), (4,), P("a")), on_mesh(noise(8), (4,), P())]
    for count in (5, 15):
        StateDigest().start(pair * count)
    few, many = (text.count("\n") for text in texts)
    assert many - few <= 10 * 20


@pytest.mark.parametrize("meshed", [False, True])
def test_many_leaves_of_a_kind_are_compiled_as_few(*, meshed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model whose layers are not scanned: XLA takes 9 ms for each leaf that is in a program."""
    compiled: list[int] = []

    def counted(jitted: Any, like: Sequence[Any]) -> Any:
        compiled.append(len(like))
        return jitted

    monkeypatch.setattr(_device_digest, "compiled_ahead", counted)
    monkeypatch.setattr(_device_digest, "_TOGETHER", 4)
    values = [noise(8, 1 + number % 3, seed=number) for number in range(41)]
    leaves = [on_mesh(value, (4,), P("a")) if meshed else jnp.asarray(value) for value in values]
    assert StateDigest().start(leaves).result() == reference(values)
    # 14, 14 and 13 of each kind: three times four of them, and the rest of all.
    assert compiled == [4, 4, 4, 5]


def test_one_program_for_leaves_that_are_committed_and_that_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A first state is often not committed to its devices, and later ones are: jit would compile twice."""
    first = jnp.arange(6.0)
    later = jax.device_put(first, first.sharding)
    assert (first.committed, later.committed) == (False, True)
    digests = StateDigest()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        one = digests.start([first]).result()
        assert "Compiling" in caplog.text
        caplog.clear()
        assert digests.start((later,)).result() == one
    assert caplog.text == ""


@pytest.mark.parametrize("axes", mostly_long([AUTO, EXPLICIT], EXPLICIT))
def test_one_program_for_leaves_that_the_first_step_brings_to_a_mesh(
    axes: AxisType, caplog: pytest.LogCaptureFixture
) -> None:
    """As the counter of an optimizer and a key are: a step leaves them replicated on the mesh of the parameters."""
    params = on_mesh(noise(8, 4), (2, 2), P("a", "b"), axes)
    first = [jnp.int32(3), jax.random.key(1), params, jnp.asarray(0.5)]
    later = [on_mesh(np.int32(3), (2, 2), P(), axes), on_mesh(jax.random.key(1), (2, 2), P(), axes), params]
    later.append(on_mesh(np.float32(0.5), (2, 2), P(), axes))
    digests = StateDigest()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        one = digests.start(first).result()
        assert "Compiling" in caplog.text
        caplog.clear()
        assert digests.start(later).result() == one
    assert caplog.text == ""
    assert one == digest(jnp.int32(3), jax.random.key(1), noise(8, 4), np.float32(0.5))


def test_a_leaf_that_changes_its_layout_in_memory_is_compiled_for_again() -> None:
    """XLA keeps two numbers of four bits in a byte, and JAX does not when it brings them to a device."""
    brought = jax.device_put(np.arange(5).astype(jnp.int4))
    made = jax.jit(lambda x: x + jnp.int4(0))(brought)
    digests = StateDigest()
    assert len({digests.start([leaf]).result() for leaf in (brought, made, brought)}) == 1


def test_the_period_grows_with_the_state() -> None:
    assert [period_steps(size, "cpu") for size in (0, 5_000_000, 5_000_001, 200_000_000)] == [1, 1, 2, 40]
    assert period_steps(16 * 10**9, "rocm") == 32


@pytest.mark.parametrize("kind", mostly_long(["pinned_host", "unpinned_host"], "pinned_host"))
def test_the_memory_in_which_a_leaf_lies_does_not_matter(kind: str) -> None:
    leaf, other = noise(8, 4), noise(3, seed=1)
    keys = jax.random.split(jax.random.key(0), 4)
    device = jax.devices()[0]
    alone = [
        jax.device_put(one, SingleDeviceSharding(device, memory_kind=kind)) for one in (leaf, other, keys)
    ]
    assert FOLD.start(alone).result() == digest(leaf, other, keys)
    mesh = Mesh(np.array(jax.devices()), ("a",))
    spread = jax.device_put(leaf, NamedSharding(mesh, P("a"), memory_kind=kind))
    whole = jax.device_put(keys, NamedSharding(mesh, P(), memory_kind=kind))
    assert FOLD.start([spread, jnp.asarray(other), whole]).result() == digest(leaf, other, keys)


@pytest.mark.parametrize("spec", mostly_long([P(), P("x"), P(None, "y")], P("x")))
def test_a_bit_that_flips_in_any_copy_changes_the_digest(spec: P) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    leaf = jax.device_put(np.arange(24, dtype=np.float32).reshape(4, 6), NamedSharding(mesh, spec))
    before = FOLD.start([leaf, leaf])
    for copy in range(4):
        after = FOLD.start([leaf, with_a_flipped_bit(leaf, copy)])
        assert before.result() != after.result()
        assert (before.apart(), after.apart()) == ([], [1])


def with_a_flipped_bit(leaf: jax.Array, copy: int) -> jax.Array:
    """The same leaf, but for one device."""
    blocks = [np.array(shard.data) for shard in leaf.addressable_shards]
    blocks[copy].view(np.uint32)[(-1,) * leaf.ndim] ^= 1 << 20
    arrays = [
        jax.device_put(block, shard.device)
        for block, shard in zip(blocks, leaf.addressable_shards, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)
