"""Memory is recycled, and never under anybody who still reads it."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft._exchange import _memory
from jaxft._exchange._layout import Layout
from jaxft._exchange._memory import aligned_empty, empty_regions, leaves_of

from .members import MIXED

MB = 1 << 20


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("size_bytes", [1, 63, 64, 1000, MB - 1, MB, 5 * MB + 3])
def test_alignment(size_bytes: int) -> None:
    array = aligned_empty(size_bytes)
    assert array.nbytes == size_bytes
    assert address(array) % 64 == 0
    array[:] = 7


def test_a_block_is_used_again_once_nobody_sees_it() -> None:
    size = 3 * MB + 64  # a size that no other test uses
    array = aligned_empty(size)
    where = address(array)
    view = array[100:200].view(np.uint16).reshape(5, 10)
    del array
    other = aligned_empty(size)
    assert address(other) != where
    del view
    assert address(aligned_empty(size)) == where


def test_idle_blocks_are_bounded() -> None:
    arrays = [aligned_empty(MB + 128 * k) for k in range(40)]
    del arrays
    assert _memory._idle.maxlen is not None
    assert len(_memory._idle) <= _memory._idle.maxlen


def test_a_jax_array_that_aliases_a_result_keeps_it() -> None:
    size = 2 * MB + 4096
    array = aligned_empty(size).view(np.float32)
    array[:] = np.arange(array.size)
    where = address(array)
    alias = jax.device_put(array)
    assert alias.unsafe_buffer_pointer() == where, "expected no copy of an aligned array"
    wanted = array.copy()
    del array
    for _ in range(3):
        fresh = aligned_empty(size)
        assert address(fresh) != where
        fresh[:] = 0
        del fresh
    assert np.array_equal(np.asarray(alias), wanted)
    del alias
    gc.collect()


def test_a_computation_that_still_reads_its_argument_keeps_it() -> None:
    size = 4 * MB + 64
    slow = jax.jit(lambda x: jnp.sum(jnp.sin(jnp.cumsum(jnp.tanh(x)))))
    array = aligned_empty(size).view(np.float32)
    array[:] = 0.001
    wanted = float(slow(array.copy()))
    for _ in range(5):
        array = aligned_empty(size).view(np.float32)
        array[:] = 0.001
        pending = slow(array)
        del array
        aligned_empty(size)[:] = 255  # would spoil the argument if it were the same memory
        assert float(pending) == wanted


def test_leaves_are_views_of_regions() -> None:
    layout = Layout.of(MIXED)
    regions = empty_regions(layout, [region.dtype for region in layout.regions])
    leaves = leaves_of(layout, regions)
    for leaf, spec, place in zip(leaves, MIXED, layout.places, strict=True):
        assert leaf.shape == spec.shape
        assert leaf.dtype.name == spec.dtype
        assert leaf.flags.c_contiguous
        assert address(leaf) % 64 == 0
        assert np.shares_memory(leaf, regions[place.region]) == (leaf.size > 0)
