"""Equations with several results, of which one derives from means and another from the batch.

A later program needs the first one, and has the second one from an earlier program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from step_models import mostly_long

import jaxft

pytestmark = pytest.mark.unoptimized

ROUNDS = 2

Both = Callable[[jax.Array, jax.Array], Any]


def both(weights: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    return weights * 0.9 + 0.5, rows * 1.1


def with_rules(wrap: Any) -> Any:
    wrapped = wrap(both)
    if wrap is jax.custom_vjp:
        wrapped.defvjp(lambda *args: (both(*args), None), lambda _, cotangents: cotangents)
    else:
        wrapped.defjvp(lambda primals, _: (both(*primals), both(*primals)))
    return wrapped


def repeated(weights: jax.Array, rows: jax.Array) -> Any:
    return lax.scan(lambda carry, _: (both(*carry), None), (weights, rows), None, length=2)[0]


def until_three(weights: jax.Array, rows: jax.Array) -> Any:
    return lax.while_loop(lambda c: c[2] < 3, lambda c: (*both(c[0], c[1]), c[2] + 1), (weights, rows, 0))[:2]


def chosen(weights: jax.Array, rows: jax.Array) -> Any:
    return lax.cond(weights.sum() > -1e9, both, lambda *args: args, weights, rows)


WAYS: dict[str, Both] = {
    "barrier": lambda *args: lax.optimization_barrier(args),
    "composite": lax.composite(both, "test.both"),
    "jit": jax.jit(both),
    "checkpoint": jax.checkpoint(both),
    "custom_vjp": with_rules(jax.custom_vjp),
    "custom_jvp": with_rules(jax.custom_jvp),
    "scan": repeated,
    "while": until_three,
    "cond": chosen,
}


def rows_of(step: int, shard: int) -> np.ndarray:
    return np.random.default_rng([step, shard]).standard_normal((8, 5), dtype=np.float32)


def loss_of(weights: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.mean((rows @ weights - 1.0) ** 2)


def training(mean: Callable[[Any], Any], way: Both, loss: Both = loss_of) -> Callable[..., Any]:
    def step(weights: jax.Array, rows: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        for _ in range(ROUNDS):
            weights, rows = way(weights, rows)
            weights = weights - 0.1 * mean(jax.grad(loss)(weights, rows))
        weights, rows = way(weights, rows)
        return weights, {"loss": loss(weights, rows)}

    return step


def assert_values_of_jit(way: Both, loss: Both = loss_of) -> None:
    ours = jaxft.fault_tolerant(training(jaxft.pmean, way, loss), None, shards=1)(jnp.ones(5), rows_of)
    plain = jax.jit(training(lambda tree: tree, way, loss))(jnp.ones(5), rows_of(0, 0))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)


@pytest.mark.parametrize("way", mostly_long(WAYS, "jit", "custom_vjp", "while"))
def test_the_values_of_jax(way: str) -> None:
    assert_values_of_jit(WAYS[way])
