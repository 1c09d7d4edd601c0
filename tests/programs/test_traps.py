"""Memory: donated, shared, borrowed, and gone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_models
from step_models import mlp_adam

import jaxft
from jaxft._errors import ConfigurationError
from jaxft._programs._build import cut_programs


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """A float32 array at a 64-byte boundary, which a CPU device borrows instead of copying."""
    size = int(np.prod(shape)) * 4
    buffer = np.zeros(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(np.float32).reshape(shape)


def add_mean(state: Any, batch: Any) -> Any:
    means = jaxft.pmean(batch)
    return jax.tree.map(jnp.add, state, means), {"means": means}


# Donation


def test_donation_is_the_identity_alias() -> None:
    """Moments before parameters: paired in any other order, XLA copies into temporaries."""
    model = mlp_adam(width=4096, columns=64)
    programs = cut_programs(model.step(jaxft.pmean), model.state(), model.batch(0))
    memory = programs.executables.apply.memory_analysis()
    donated = sum(leaf.nbytes for leaf in jax.tree.leaves(model.state()))
    assert memory.alias_size_in_bytes == donated
    assert memory.temp_size_in_bytes < 0.01 * donated
    assert programs.executables.computes[0].memory_analysis().alias_size_in_bytes == 0


def test_each_leaf_is_written_where_it_was() -> None:
    model = mlp_adam(width=512)
    step = jaxft.fault_tolerant(model.step(jaxft.pmean), None)
    state, _ = step(model.state(), model.batch(0))
    jax.block_until_ready(state)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    state, _ = step(state, model.batch(1))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)] == before


def test_the_state_is_consumed_the_contribution_is_not() -> None:
    model = mlp_adam()
    programs, state = cut_programs(model.step(jaxft.pmean), model.state(), model.batch(0)), model.state()
    contribution, local = step_models.compute(programs, state, model.batch(0))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    step_models.apply(programs, state, contribution, local)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in contribution)


def test_unused_leaves_are_donated_too() -> None:
    """The old array plays no part in the new one, but its memory does."""

    def train_step(_state: Any, batch: Any) -> Any:
        return {"last": jaxft.pmean(batch), "key": jax.random.key(3)}, {}

    step = jaxft.fault_tolerant(train_step, None)
    state = {"last": jnp.zeros(1000), "key": jax.random.key(0)}
    programs = cut_programs(train_step, state, np.ones(1000, np.float32))
    assert programs.executables.apply.memory_analysis().alias_size_in_bytes == 4008
    new, _ = step(state, np.ones(1000, np.float32))
    assert state["last"].is_deleted()
    assert state["key"].is_deleted()
    np.testing.assert_array_equal(new["last"], np.ones(1000))


# Leaves that are passed on


def test_unchanged_leaves_are_the_same_arrays() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        w = state["w"] + jaxft.pmean(batch) * state["table"]
        return state | {"w": w}, {"table": state["table"], "old": state["w"]}

    step = jaxft.fault_tolerant(train_step, None)
    state = {"w": jnp.zeros(3), "table": jnp.arange(3.0), "key": jax.random.key(0)}
    new, metrics = step(state, np.ones(3, np.float32))
    assert new["table"] is state["table"]
    assert new["key"] is state["key"]
    assert state["w"].is_deleted()
    np.testing.assert_array_equal(new["w"], np.arange(3.0))
    np.testing.assert_array_equal(metrics["table"], np.arange(3.0))
    np.testing.assert_array_equal(metrics["old"], np.zeros(3))


# The same memory twice


@pytest.mark.parametrize("devices", [1, 4])
def test_shared_arrays_are_copied_first(devices: int) -> None:
    """Donating one buffer twice is an error, and on several CPU devices of jaxlib 0.10 a segmentation fault."""
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    w = jax.device_put(jnp.zeros(8), replicated) if devices > 1 else jnp.zeros(8)
    other = jax.device_put(w, replicated)  # another object with the same memory
    state = {"w": w, "ema": other, "third": w, "fixed": w, "key": jax.random.key(0)}

    def train_step(state: Any, batch: Any) -> Any:
        mean = jaxft.pmean(batch)
        new = {"w": state["w"] + mean, "ema": state["ema"] + 2.0 * mean, "third": state["third"] - mean}
        return state | new, {}

    step = jaxft.fault_tolerant(train_step, None)
    for number in range(1, 4):
        state, _ = step(state, np.ones(8, np.float32))
        jax.block_until_ready(state)
        values = [float(state[name][0]) for name in ("w", "ema", "third", "fixed")]
        assert values == [number, 2 * number, -number, 0]


# Consumed states


def test_a_consumed_state_is_refused() -> None:
    model = mlp_adam()
    step, state = jaxft.fault_tolerant(model.step(jaxft.pmean), None), model.state()
    step(state, model.batch(0))
    with pytest.raises(
        ConfigurationError,
        match=r"leaf \.mu\['b1'\] of the state, float32\[\d+\], was consumed by an earlier step.*Use only",
    ):
        step(state, model.batch(0))
    programs = cut_programs(model.step(jaxft.pmean), model.state(), model.batch(0))
    means = [np.zeros(spec.shape, spec.dtype) for spec in programs.contribution]
    for call in (
        lambda: step_models.compute(programs, state, model.batch(0)),
        lambda: step_models.apply(programs, state, means, None),
        lambda: cut_programs(model.step(jaxft.pmean), state, model.batch(0)),
    ):
        with pytest.raises(ConfigurationError, match="was consumed"):
            call()


# Borrowed numpy memory


def test_numpy_leaves_of_a_state_are_not_written_to() -> None:
    given = aligned((1024,))
    step = jaxft.fault_tolerant(add_mean, None)
    state, _ = step({"w": given}, {"w": np.ones(1024, np.float32)})
    state, _ = step(state, {"w": np.ones(1024, np.float32)})
    jax.block_until_ready(state)
    np.testing.assert_array_equal(given, np.zeros(1024))
    given[:] = 7
    np.testing.assert_array_equal(state["w"], np.full(1024, 2.0))


def test_arrays_that_borrow_numpy_memory_are_not_written_to() -> None:
    given = aligned((1024,))
    state = {"w": jnp.asarray(given)}
    step = jaxft.fault_tolerant(add_mean, None)
    state, _ = step(state, {"w": np.ones(1024, np.float32)})
    jax.block_until_ready(state)
    np.testing.assert_array_equal(given, np.zeros(1024))
    np.testing.assert_array_equal(state["w"], np.ones(1024))
