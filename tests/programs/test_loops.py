"""The shard's number and collectives within loops, `jax.checkpoint` and custom derivatives: as under `jax.vmap`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from step_models import assert_values_of_vmap, mostly_long

import jaxft
from jaxft._programs._axis import Axis
from jaxft._programs._build import Shared, cut_only

pytestmark = pytest.mark.unoptimized

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


def with_an_exchange(w: jax.Array, x: jax.Array) -> jax.Array:
    """Within a branch and within a scan that exchange."""

    def turn(h: jax.Array, _number: jax.Array) -> Any:
        h = layers(w, h)[0]
        return h - lax.pmean(h.mean(), AXIS), None

    h = lax.scan(turn, x, jnp.arange(2))[0]
    return lax.cond(w.sum() < 9, lambda h: lax.pmean(layers(w, h)[0].sum(), AXIS), lambda h: h.sum(), h)


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
    kept = jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)
    return jnp.mean((jnp.sin(x @ w) * kept @ w.T - x) ** 2)


def noisy_in_jit(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.jit(noisy)(w, x) + jax.jit(lambda: lax.axis_index(AXIS).astype(w.dtype) * 0.5)()


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


# JAX differentiates these only forwards.
FORWARDS: dict[str, Loss] = {loss.__name__: loss for loss in (in_one_another, by_turns, with_an_exchange)}
LOSSES: dict[str, Loss] = FORWARDS | {
    "rollout": rollout,
    "checkpointed": checkpointed,
    "synced": jax.checkpoint(synced),
    "noisy": jax.checkpoint(noisy),
    "noisy in jit": jax.checkpoint(noisy_in_jit),
    "nested": jax.checkpoint(lambda w, x: jax.checkpoint(synced)(w, x) * jax.checkpoint(noisy)(w, x)),
    "a policy": jax.checkpoint(noisy, policy=jax.checkpoint_policies.dots_saveable),
    "one operand may be shared": jax.checkpoint(noisy, prevent_cse=(True, False)),
    "custom vjp": contrasted,
    "custom vjp in a checkpoint": jax.checkpoint(contrasted),
    "custom jvp": lambda w, x: jnp.mean((x @ w - averaged(x @ w)) ** 2),
}


def training(name: str) -> Callable[..., Any]:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss = LOSSES[name]
        if name in FORWARDS:
            value, slope = jax.jvp(lambda w: loss(w, x), (w,), (jnp.ones_like(w),))
        else:
            value, slope = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * lax.pmean(slope, AXIS), {"loss": lax.pmean(value, AXIS), "own": value}

    return step


def start() -> jax.Array:
    return jnp.linspace(-0.5, 0.5, 25).reshape(5, 5)


@pytest.mark.parametrize("name", mostly_long(LOSSES, "by_turns", "noisy in jit", "custom vjp"))
def test_the_values_of_vmap(name: str) -> None:
    assert_values_of_vmap(training(name), start, rows_of, axis=AXIS, shards=SHARDS)


def kinds(loss: Loss) -> list[str]:
    """The equations of a step with this loss."""
    cut = cut_only(
        lambda w, x: (w - lax.pmean(loss(w, x), AXIS), {}),
        start(),
        rows_of(0, 0),
        Shared(axis=Axis(AXIS, SHARDS)),
    )
    return [eqn.primitive.name for stage in cut.stages for eqn in stage.compute.jaxpr.eqns]


@pytest.mark.parametrize(("name", "kind"), [("rollout", "scan"), ("by_turns", "while")])
def test_a_loop_stays_a_loop(name: str, kind: str) -> None:
    assert kinds(LOSSES[name]).count(kind) == 1


@pytest.mark.parametrize(("name", "stays"), [("noisy", True), ("noisy in jit", True), ("synced", False)])
def test_a_checkpoint_without_an_exchange_stays_a_checkpoint(name: str, *, stays: bool) -> None:
    assert bool({"checkpoint", "remat2"} & {*kinds(lambda w, x: jax.grad(LOSSES[name])(w, x).sum())}) == stays


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
