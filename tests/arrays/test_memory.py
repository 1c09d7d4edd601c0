"""Memory is recycled, and never while something still reads it."""

import gc
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft._arrays import _memory
from jaxft._arrays._memory import aligned_empty, not_idle, touch_ahead
from tests.exchange.members import together

MB = 1 << 20


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_alignment() -> None:
    for size_bytes in (1, 64, 1000, MB - 1, MB, 5 * MB + 3):
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


def test_a_block_that_no_step_takes_again_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The additional blocks of a heal must not be held for the rest of the run."""
    monkeypatch.setattr(_memory, "_STALE_S", 0.0)
    of_a_heal, of_a_step = 2 * MB + 64 * 11, 2 * MB + 64 * 12
    kept = [aligned_empty(of_a_heal) for _ in range(3)]
    del kept
    assert idle_blocks(of_a_heal) == 3
    for _ in range(_memory._STALE_TAKES + 1):
        assert idle_blocks(of_a_step) <= 1
        aligned_empty(of_a_step)
    assert idle_blocks(of_a_heal) == 0
    assert idle_blocks(of_a_step) == 1


def test_a_long_step_finds_its_blocks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have waited for long, and it takes more than the first."""
    monkeypatch.setattr(_memory, "_STALE_S", 0.0)
    sizes = [2 * MB + 64 * (20 + k) for k in range(_memory._MOST_IDLE)]
    places = [address(aligned_empty(size)) for size in sizes]
    for _ in range(8):
        assert [address(aligned_empty(size)) for size in sizes] == places


def test_a_step_that_takes_many_blocks_first_finds_the_others_again() -> None:
    """Chunks that lie over several leaves are gathered in blocks: hundreds in a step."""
    size, gathered = 2 * MB + 64 * 13, MB
    where = address(aligned_empty(size))
    for _ in range(3):
        for _ in range(4 * _memory._STALE_TAKES):
            aligned_empty(gathered)
        assert address(aligned_empty(size)) == where


def test_a_block_that_was_touched_ahead_is_the_next_to_be_taken_and_is_in_memory() -> None:
    size = 24 * MB + 64 * 14
    small = 100
    assert not_idle([size, small]) == [size]
    touch_ahead([size])
    assert not_idle([size, small]) == [], "asking takes none"
    assert not_idle([size, size]) == [size]
    before = faults()
    aligned_empty(size)[:] = 1
    touched_ahead = faults() - before
    fresh = size + 64  # no block of this size waits
    before = faults()
    aligned_empty(fresh)[:] = 1
    assert touched_ahead < (faults() - before) / 2


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def idle_blocks(size: int) -> int:
    return sum(len(idle.block) == size for idle in _memory._idle)


def test_a_garbage_collection_may_recycle_at_any_moment() -> None:
    # A copy of the idle blocks is a tuple, and making one may collect garbage, which adds a block to them: that
    # once ended an exchange. Small tuples come without a collection while there are used ones to be had.
    used_up = [tuple(range(size)) for size in range(1, 20) for _ in range(2100)]
    blocks = [aligned_empty(MB + 64 * k) for k in range(20)]
    del blocks
    thresholds = gc.get_threshold()
    try:
        for allocations in range(1, 6):  # the collection comes with a later allocation
            gc.disable()
            circle: list[object] = [aligned_empty(MB + 64)]
            circle.append(circle)
            del circle
            used_up += [tuple(range(size)) for size in range(1, 20) for _ in range(5)]
            gc.set_threshold(gc.get_count()[0] + allocations)
            gc.enable()
            aligned_empty(MB + 128)[:] = 0
            gc.set_threshold(*thresholds)
            gc.collect()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


def test_threads_do_not_get_into_each_others_way() -> None:
    def churn(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(400):
            array = aligned_empty(MB + 64 * int(rng.integers(0, 6)))
            array[:64] = seed
            time.sleep(0)  # let the others run
            assert (array[:64] == seed).all()

    assert together([lambda seed=seed: churn(seed) for seed in range(6)]) == [None] * 6


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
