from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft._errors import StepError
from jaxft._programs._build import cut_programs
from jaxft._step import Step

pytestmark = pytest.mark.unoptimized


def average(x: jax.Array) -> jax.Array:
    return jaxft.pmean(x)


def test_nothing_to_average() -> None:
    with pytest.raises(StepError, match="empty pytree: there is nothing to average"):
        jaxft.pmean({"a": [], "b": None})


def step_of(function: Any) -> Step:
    return jaxft.fault_tolerant(lambda state, batch: (state, function(state, batch)), None)


@pytest.mark.parametrize(
    ("convert", "name"),
    [
        (lambda x: x.astype(jnp.int32), "int32"),
        (lambda x: x > 0, "bool"),
        (lambda x: jax.random.key(x[0].astype(jnp.int32)), "key<fry>"),
    ],
)
def test_only_floats_of_the_batch_have_a_mean(convert: Any, name: str) -> None:
    step = step_of(lambda _state, batch: jaxft.pmean({"stats": [batch, convert(batch)]}))
    expected = rf"leaf of type {name} at \['stats'\]\[1\] \(.*test_primitive\.py:\d+ .*convert the leaf"
    with pytest.raises(StepError, match=expected):
        step(jnp.ones(3), np.ones(3, np.float32))


@pytest.mark.parametrize("exchange", [jaxft.pmean, jaxft.psum])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn])
def test_small_floats_are_to_be_converted_to_larger_ones(exchange: Any, dtype: Any) -> None:
    """They are floating point arrays too, and as int32 nothing of them would be left."""
    step = step_of(lambda _state, batch: exchange(batch.astype(dtype)))
    with pytest.raises(
        StepError, match=r"It takes .*float16, .*convert the leaf \(`x\.astype\(jnp\.float32\)`"
    ):
        step(jnp.ones(3), np.ones(3, np.float32))


def test_complex_numbers_are_averaged_and_summed_in_two_parts() -> None:
    """The parameters of spectral and state space models: their imaginary parts must not get lost."""

    def train_step(state: Any, batch: Any) -> Any:
        waves = {"w": jax.lax.complex(2 * batch, -batch), "same": state["w"], "rate": 1j}
        mean, total = jaxft.pmean(waves), jaxft.psum(waves["w"])
        return {"w": state["w"] + mean["w"]}, {"total": total, "same": mean["same"], "rate": mean["rate"]}

    begin = jnp.full(3, 1 + 1j, jnp.complex64)
    programs = cut_programs(train_step, {"w": begin}, np.ones(3, np.float32))
    paths = [spec.path for spec in programs.contribution]
    assert paths == ["pmean#0['w'].real", "pmean#0['w'].imag", "psum#1.real", "psum#1.imag"]
    step = jaxft.fault_tolerant(train_step, None, shards=2)
    state, metrics = step({"w": begin}, lambda _step, shard: np.full(3, shard, np.float32))
    np.testing.assert_array_equal(state["w"], np.full(3, 2 + 0.5j))
    np.testing.assert_array_equal(metrics["total"], np.full(3, 2 - 1j))
    np.testing.assert_array_equal(metrics["same"], np.full(3, 1 + 1j))
    assert metrics["rate"] == 1j


def test_the_mean_of_what_does_not_depend_on_the_batch_is_that() -> None:
    """The counters of haiku's and equinox' BatchNorm are integers; a key or a bool is no worse."""
    kept = {"n": jnp.int32(3), "on": jnp.bool_(True), "key": jax.random.key(1), "number": 7}

    def train_step(state: Any, batch: Any) -> Any:
        loss = jaxft.pmean(batch.sum())
        return jaxft.pmean(state | {"n": state["n"] + 1}), loss

    step = jaxft.fault_tolerant(train_step, None, shards=2)
    state, loss = step(kept, lambda _step, shard: np.full(3, float(shard), np.float32))
    assert (int(state["n"]), bool(state["on"]), int(state["number"]), float(loss)) == (4, True, 7, 1.5)


def test_called_eagerly() -> None:
    with pytest.raises(StepError, match=r"called outside a traced step.*jaxft\.fault_tolerant"):
        average(jnp.ones(3))
    with pytest.raises(StepError, match=r"jaxft\.shard_index was called outside a traced step"):
        jaxft.shard_index()


def test_plain_jit() -> None:
    with pytest.raises(StepError, match=r"reached by plain `jax\.jit`.*manager=None"):
        jax.jit(average)(jnp.ones(3))
    with pytest.raises(StepError, match=r"jaxft\.shard_index was reached by plain `jax\.jit`"):
        jax.jit(jaxft.shard_index)()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(f),
        lambda f: jax.jit(jax.grad(f)),
        lambda f: lambda x: jax.linearize(f, x),
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        lambda f: jax.grad(jax.checkpoint(f)),
    ],
)
def test_under_differentiation(transform: object) -> None:
    with pytest.raises(StepError, match="take the gradient first"):
        transform(lambda x: average(x).sum())(jnp.ones(3))  # type: ignore[operator]


def total(x: jax.Array) -> jax.Array:
    return jaxft.psum(x)


def test_psum_names_itself() -> None:
    with pytest.raises(StepError, match=r"jaxft\.psum was given an empty pytree: there is nothing to sum"):
        jaxft.psum(())
    with pytest.raises(StepError, match=r"jaxft\.psum was called outside a traced step"):
        total(jnp.ones(3))
    with pytest.raises(StepError, match=r"jaxft\.psum was reached by plain `jax\.jit`"):
        jax.jit(total)(jnp.ones(3))
    with pytest.raises(StepError, match=r"jaxft\.psum is inside.*`grads = jaxft\.psum\(grads\)`"):
        jax.grad(lambda x: total(x).sum())(jnp.ones(3))


@pytest.mark.parametrize(("dtype", "name"), [(bool, "bool"), (np.int8, "int8")])
def test_what_has_no_sum(dtype: type, name: str) -> None:
    with pytest.raises(
        StepError, match=rf"psum .* type {name} at \['n'\]. It takes .*int32, .*convert the leaf"
    ):
        jaxft.psum({"n": np.ones(3, dtype)})


def test_vmap_averages_each_element() -> None:
    def train_step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        return state - jax.vmap(jaxft.pmean)(batch), jax.vmap(jaxft.pmean, in_axes=1, out_axes=0)(batch)

    step = jaxft.fault_tolerant(train_step, None, shards=2)
    state, metrics = step(jnp.zeros((2, 3)), lambda _, shard: jnp.full((2, 3), float(shard)))
    np.testing.assert_array_equal(state, np.full((2, 3), -0.5))
    np.testing.assert_array_equal(metrics, np.full((3, 2), 0.5))
