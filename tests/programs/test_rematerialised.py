"""Collectives over the shards, and the shard's number, within `jax.checkpoint` and within custom derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from step_models import mostly_long

import jaxft
from jaxft._programs._axis import Axis
from jaxft._programs._build import Shared, cut_programs

SHARDS = 3
AXIS = "batch"

Loss = Callable[[jax.Array, jax.Array], jax.Array]


def rows_of(step: int, shard: int) -> np.ndarray:
    return np.random.default_rng([step, shard]).standard_normal((8, 5), dtype=np.float32)


def normalised(x: jax.Array) -> jax.Array:
    mean = lax.pmean(x.mean(0, keepdims=True), AXIS)
    square = lax.pmean((x * x).mean(0, keepdims=True), AXIS)
    return (x - mean) * lax.rsqrt(square - mean * mean + 1e-3)


def synced(w: jax.Array, x: jax.Array) -> jax.Array:
    """Sync BatchNorm within a rematerialised block."""
    return jnp.mean((jnp.tanh(normalised(x @ w)) @ w.T - x) ** 2)


def noisy(w: jax.Array, x: jax.Array) -> jax.Array:
    """Dropout with a key of the shard."""
    key = jax.random.fold_in(jax.random.key(3), lax.axis_index(AXIS))
    kept = jax.random.bernoulli(key, 0.5, (8, 5)).astype(x.dtype)
    return jnp.mean((jnp.sin(x @ w) * kept @ w.T - x) ** 2)


def noisy_in_jit(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.jit(noisy)(w, x) + jax.jit(lambda: lax.axis_index(AXIS).astype(w.dtype) * 0.5)()


def twice(loss: Loss) -> Loss:
    return lambda w, x: jax.checkpoint(loss)(w, x) + jax.checkpoint(lambda w: loss(w, 2 * x))(w * 0.5)


@jax.custom_vjp
def gathered(x: jax.Array) -> jax.Array:
    return lax.all_gather(x, AXIS)


gathered.defvjp(lambda x: (gathered(x), None), lambda _, g: (lax.psum_scatter(g, AXIS),))


@jax.custom_jvp
def averaged(x: jax.Array) -> jax.Array:
    return lax.pmean(x, AXIS)


averaged.defjvp(lambda primals, tangents: (averaged(*primals), averaged(*tangents)))


def contrasted(w: jax.Array, x: jax.Array) -> jax.Array:
    z = jnp.tanh(x @ w)
    return -jnp.mean(jax.nn.log_softmax(z @ gathered(z).reshape(-1, 5).T, axis=1)[:, :3])


LOSSES: dict[str, Loss] = {
    "synced": jax.checkpoint(synced),
    "noisy": jax.checkpoint(noisy),
    "noisy in jit": jax.checkpoint(noisy_in_jit),
    "one in the other": jax.checkpoint(
        lambda w, x: jax.checkpoint(synced)(w, x) * jax.checkpoint(noisy)(w, x)
    ),
    "twice": twice(lambda w, x: synced(w, x) + noisy(w, x)),
    "a policy": jax.checkpoint(noisy, policy=jax.checkpoint_policies.dots_saveable),
    "one operand may be shared": jax.checkpoint(noisy, prevent_cse=(True, False)),
    "custom vjp": contrasted,
    "custom vjp in a checkpoint": jax.checkpoint(contrasted),
    "custom jvp": lambda w, x: jnp.mean((x @ w - averaged(x @ w)) ** 2),
}


def training(loss: Loss) -> Callable[..., Any]:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        value, grads = jax.value_and_grad(loss)(w, x)
        value, grads = lax.pmean((value, grads), AXIS)
        return w - 0.1 * grads, {"loss": value, "forward": loss(w, x)}

    return step


@pytest.mark.parametrize("name", mostly_long(LOSSES, "synced", "noisy in jit", "custom vjp"))
def test_the_values_of_vmap(name: str) -> None:
    step = training(LOSSES[name])
    start = jnp.linspace(-0.5, 0.5, 25).reshape(5, 5)
    batches = np.stack([rows_of(0, shard) for shard in range(SHARDS)])
    plain = jax.jit(jax.vmap(step, in_axes=(None, 0), axis_name=AXIS))(start, batches)
    ours = jaxft.fault_tolerant(step, None, shards=SHARDS, axis_name=AXIS)(start, rows_of)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "stays"), [("noisy", True), ("noisy in jit", True), ("synced", False)])
def test_one_that_takes_the_shards_number_alone_is_computed_again_as_before(name: str, stays: bool) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return w - jaxft.pmean(jax.grad(LOSSES[name])(w, x)), {}

    cut = cut_programs(step, jnp.ones((5, 5)), rows_of(0, 0), Shared(axis=Axis(AXIS, SHARDS))).cut
    names = {eqn.primitive.name for stage in cut.stages for eqn in stage.compute.jaxpr.eqns}
    assert bool(names & {"checkpoint", "remat2"}) == stays
