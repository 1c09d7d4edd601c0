"""The shard's number within loops: against `jax.vmap` over the shards."""

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
TABLE = np.linspace(0, 1, 2 * SHARDS, dtype=np.float32)
Loss = Callable[[jax.Array, jax.Array], jax.Array]


def rows_of(step: int, shard: int) -> np.ndarray:
    return np.random.default_rng([step, shard]).standard_normal((5, 5), dtype=np.float32)


def dropped(h: jax.Array, key: jax.Array) -> jax.Array:
    mine = jax.random.fold_in(key, lax.axis_index(AXIS))
    return jnp.tanh(h * jax.random.bernoulli(mine, 0.5, h.shape).astype(h.dtype))


def layers(w: jax.Array, x: jax.Array, body: Any = dropped, **options: Any) -> Any:
    return lax.scan(
        lambda h, key: (h := body(h @ w, key), h.sum()), x, jax.random.split(jax.random.key(3), 4), **options
    )


def rollout(w: jax.Array, x: jax.Array) -> jax.Array:
    """Keys that are carried, rows, and results of each round."""

    def turn(carry: Any, number: jax.Array) -> Any:
        key, h = carry
        key, use = jax.random.split(key)
        h = dropped(h @ w, use) + number.astype(h.dtype) * jnp.asarray(TABLE)[lax.axis_index(AXIS)]
        return (key, h), h[0]

    (_, last), rewards = lax.scan(turn, (jax.random.key(1), x), jnp.arange(4), reverse=True)
    return jnp.mean(last**2) + jnp.mean(rewards * jnp.arange(4, dtype=x.dtype).reshape(4, 1))


def checkpointed(w: jax.Array, x: jax.Array) -> jax.Array:
    h, sums = layers(w, x, jax.checkpoint(dropped))
    return jnp.mean((h - x) ** 2) + sums.sum() * 0.01


def by_turns(w: jax.Array, x: jax.Array) -> jax.Array:
    """Each shard makes another number of rounds, and other rounds."""
    table = jnp.asarray(TABLE)

    def until(carry: Any) -> jax.Array:
        return carry[0] + table[SHARDS - lax.axis_index(AXIS)] < 3

    def turn(carry: Any) -> Any:
        return carry[0] + 1, dropped(carry[1] @ w + table[lax.axis_index(AXIS)], jax.random.key(7))

    return jnp.mean(lax.while_loop(until, turn, (jnp.float32(0), x))[1] ** 2)


def in_one_another(w: jax.Array, x: jax.Array) -> jax.Array:
    def outer(h: jax.Array, number: jax.Array) -> Any:
        h = lax.cond(number % 2 == 0, lambda h: layers(w, h)[0], lambda h: dropped(h, jax.random.key(2)), h)
        return lax.while_loop(lambda h: h.sum() > 1, lambda h: dropped(h * 0.5, jax.random.key(5)), h), None

    return jnp.mean(lax.scan(outer, x, jnp.arange(3))[0] ** 2)


def beside_an_exchange(w: jax.Array, x: jax.Array) -> jax.Array:
    """Within a branch, and within a scan, that exchange themselves."""

    def turn(h: jax.Array, number: jax.Array) -> Any:
        h = layers(w, h)[0]
        return h - lax.pmean(h.mean(), AXIS), None

    h = lax.scan(turn, x, jnp.arange(2))[0]
    return lax.cond(w.sum() < 9, lambda h: lax.pmean(layers(w, h)[0].sum(), AXIS), lambda h: h.sum(), h)


DIFFERENTIATED = (rollout, checkpointed, in_one_another)
LOSSES: dict[str, Loss] = {one.__name__: one for one in (*DIFFERENTIATED, by_turns, beside_an_exchange)}


def training(name: str) -> Callable[..., Any]:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss = LOSSES[name]
        reverse = loss in DIFFERENTIATED and loss is not in_one_another
        grads = (jax.grad if reverse else jax.jacfwd)(loss)(w, x)
        return w - 0.1 * lax.pmean(grads, AXIS), {"loss": lax.pmean(loss(w, x), AXIS), "forward": loss(w, x)}

    return step


def start() -> jax.Array:
    return jnp.linspace(-0.5, 0.5, 25).reshape(5, 5)


@pytest.mark.parametrize("name", mostly_long(LOSSES, "rollout", "by_turns"))
def test_the_values_of_vmap(name: str) -> None:
    step = training(name)
    batches = np.stack([rows_of(0, shard) for shard in range(SHARDS)])
    plain = jax.jit(jax.vmap(step, in_axes=(None, 0), axis_name=AXIS))(start(), batches)
    ours = jaxft.fault_tolerant(step, None, shards=SHARDS, axis_name=AXIS)(start(), rows_of)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("rollout", "scan"), ("by_turns", "while")])
def test_a_loop_stays_a_loop(name: str, kind: str) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return w - lax.pmean(LOSSES[name](w, x), AXIS), {}

    (stage,) = cut_programs(step, start(), rows_of(0, 0), Shared(axis=Axis(AXIS, SHARDS))).cut.stages
    assert [eqn.primitive.name for eqn in stage.compute.jaxpr.eqns].count(kind) == 1


def test_what_a_loop_makes_of_the_shards_number_may_not_reach_the_new_state() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        turns = lax.while_loop(lambda n: n < jaxft.shard_index(), lambda n: n + 1, 0)
        return w + turns.astype(w.dtype), {"loss": jaxft.pmean(x.mean())}

    with pytest.raises(jaxft.StepError, match=r"derives from the batch .*computed at .*test_loops\.py"):
        jaxft.fault_tolerant(step, None, shards=SHARDS)(start(), rows_of)


def test_a_callback_in_a_loop_gets_the_number_of_each_shard() -> None:
    seen: list[tuple[int, int]] = []

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        def turn(total: jax.Array, number: jax.Array) -> Any:
            jax.debug.callback(
                lambda *found: seen.append(tuple(map(int, found))), number, jaxft.shard_index()
            )
            return total + number * jaxft.shard_index(), None

        total, _ = lax.scan(turn, jnp.int32(0), jnp.arange(2))
        return w - jaxft.pmean(x.mean() + total.astype(w.dtype)), {}

    jaxft.fault_tolerant(step, None, shards=SHARDS)(start(), rows_of)
    jax.effects_barrier()
    assert sorted(seen) == [(number, shard) for number in range(2) for shard in range(SHARDS)]
