"""Exchanges within the branches of a `lax.cond` and a `lax.switch`: against `jax.vmap` over the shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from step_models import assert_values_of_vmap, mostly_long, values

import jaxft
from jaxft._programs._axis import Axis
from jaxft._programs._build import Shared, cut_only

pytestmark = pytest.mark.unoptimized
SHARDS = 3
STEPS = 5
AXIS = "batch"

State = dict[str, jax.Array]
Step = Callable[[State, jax.Array], Any]


def rows_of(step: int, shard: int) -> np.ndarray:
    return np.random.default_rng([step, shard]).standard_normal((8, 5), dtype=np.float32)


def start() -> State:
    w = jnp.linspace(-0.5, 0.5, 25, dtype=jnp.float32).reshape(5, 5)
    return {"w": w, "v": w.T + 0.1, "count": jnp.int32(0), "key": jax.random.key(1), "norm": jnp.float32(0)}


def loss_of(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ w) - x) ** 2)


def trained(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - 0.1 * lax.pmean(jax.grad(loss_of)(w, x), AXIS)


def after(state: State, **changes: Any) -> State:
    return {**state, "count": state["count"] + 1, **changes}


def in_turns(state: State, x: jax.Array) -> Any:
    """As a generator and a discriminator that are trained in turns, with what each reports of its batch."""

    def first(w: jax.Array, v: jax.Array) -> Any:
        return trained(w, x), v, loss_of(v, x)

    def second(w: jax.Array, v: jax.Array) -> Any:
        grads, total = lax.psum((jax.grad(loss_of)(v, x @ w), jnp.sum(x > 0)), AXIS)
        return w, v - 0.1 * grads / total.astype(v.dtype), jnp.float32(0)

    w, v, loss = lax.cond(state["count"] % 3 > 0, first, second, state["w"], state["v"])
    return after(state, w=w, v=v), {"loss": loss}


def one_after_another(state: State, x: jax.Array) -> Any:
    """The second exchange of a branch depends on its first."""

    def sharp(w: jax.Array) -> jax.Array:
        up = w + 0.05 * lax.pmean(jax.grad(loss_of)(w, x), AXIS)
        noise = jnp.sin(x)  # made before the first exchange is known, and read after it
        return w - 0.1 * lax.pmean(jax.grad(loss_of)(up, x + noise), AXIS)

    w = lax.cond(state["count"] == 1, lambda w: trained(w, x), sharp, state["w"])
    return after(state, w=w), {}


def nested(state: State, x: jax.Array) -> Any:
    def inner(w: jax.Array) -> jax.Array:
        w = trained(w, x)
        return lax.cond(w.sum() > -1.0, lambda w: trained(w, 2 * x), lambda w: w + 1, w)

    w = lax.cond(state["count"] != 2, inner, lambda w: -w, state["w"])
    return after(state, w=w), {"norm": jnp.sum(w)}


def in_a_scan(state: State, x: jax.Array) -> Any:
    def turn(w: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        w = lax.cond(number % 2 == 0, lambda w: trained(w, x * (1 + number).astype(x.dtype)), lambda w: w, w)
        return w, w.sum()

    w, sums = lax.scan(turn, state["w"], jnp.arange(3))
    return after(state, w=w), {"sums": sums}


def by_a_mean(state: State, x: jax.Array) -> Any:
    """Whether there is a second exchange is known after the first."""
    grads = lax.pmean(jax.grad(loss_of)(state["w"], x), AXIS)
    norm = jnp.sum(grads**2)
    w = state["w"] - 0.1 * grads
    w = lax.cond(norm > state["norm"], lambda w: trained(w, x), lambda w: w, w)
    return after(state, w=w, norm=norm), {"norm": norm}


def guarded(state: State, x: jax.Array) -> Any:
    """Zeros are exchanged where it is not taken, also in place of a value from outside, such as this infinity."""
    grads = jax.grad(loss_of)(state["w"], x) * jnp.where(state["count"] == 2, jnp.inf, 1.0)
    finite = lax.pmin(jnp.isfinite(grads).all(), AXIS)
    w = lax.cond(finite, lambda w: w - 0.1 * lax.pmean(grads, AXIS), lambda w: w, state["w"])
    return after(state, w=w), {"finite": finite}


def noisy(state: State, x: jax.Array) -> Any:
    """A branch with the number of the shard and its own keys, and no exchange."""

    def drop(x: jax.Array) -> jax.Array:
        key = jax.random.fold_in(state["key"], lax.axis_index(AXIS))
        return x * jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)

    kept = lax.cond(state["count"] % 2 == 0, drop, lambda x: x, x)
    return after(state, w=trained(state["w"], kept), key=jax.random.split(state["key"])[0]), {}


def with_keys(state: State, x: jax.Array) -> Any:
    """A key is made before the exchange and used after it."""

    def train(w: jax.Array, key: jax.Array) -> Any:
        key, use = jax.random.split(key)
        w = trained(w, x + jax.random.normal(use, x.shape))
        return w + 0.01 * jax.random.normal(jax.random.fold_in(use, 1), w.shape), key

    w, key = lax.cond(state["count"] % 2 == 1, train, lambda w, key: (w, key), state["w"], state["key"])
    return after(state, w=w, key=key), {}


def odd(state: State, x: jax.Array) -> Any:
    """Operands that are exchanged as they are, literals, unused results, and sums of what all shards have."""

    def one(w: jax.Array, x: jax.Array) -> Any:
        unused = lax.pmean(x[0, 0], AXIS)
        del unused
        return w - lax.pmean(x[:5], AXIS) * lax.psum(w.sum() * 0.001, AXIS), 1.0, lax.pmean(w, AXIS)

    def other(w: jax.Array, x: jax.Array) -> Any:
        return w, 0.0, x[:5] * 0

    w, scale, v = lax.cond(state["count"] % 2 == 1, one, other, state["w"], x)
    return after(state, w=w * (1 + scale)), {"v": v}


def differentiated(state: State, x: jax.Array) -> Any:
    """Sync BatchNorm in a branch of the forward pass, rematerialised."""

    @jax.checkpoint
    def synced(h: jax.Array) -> jax.Array:
        mean = lax.pmean(h.mean(0, keepdims=True), AXIS)
        return (h - mean) * lax.rsqrt(lax.pmean(((h - mean) ** 2).mean(0, keepdims=True), AXIS) + 1e-3)

    def loss(w: jax.Array) -> jax.Array:
        h = lax.cond(state["count"] % 2 == 0, synced, lambda h: h * 0.5, x @ w)
        return jnp.mean((jnp.tanh(h) - x) ** 2)

    value, grads = lax.pmean(jax.value_and_grad(loss)(state["w"]), AXIS)
    return after(state, w=state["w"] - 0.1 * grads), {"loss": value}


TABLE = np.linspace(0, 1, 2 << 18, dtype=np.float32)  # large: an input of the programs


def closes_over(state: State, x: jax.Array) -> Any:
    @jax.jit
    def train(w: jax.Array) -> jax.Array:
        return trained(w, x * jnp.asarray(TABLE)[-1]) + jnp.asarray(TABLE)[:25].reshape(5, 5)

    return after(state, w=lax.cond(state["count"] % 2 == 1, train, lambda w: w, state["w"])), {}


STEP_OF: dict[str, Step] = {
    step.__name__: step for step in (in_turns, one_after_another, nested, in_a_scan, by_a_mean)
}
STEP_OF |= {step.__name__: step for step in (guarded, noisy, with_keys, odd, differentiated, closes_over)}


def of_jaxft(step: Step, **options: Any) -> tuple[State, list[Any]]:
    ours = jaxft.fault_tolerant(step, None, shards=SHARDS, axis_name=AXIS, **options)
    state, found = start(), []
    for _ in range(STEPS):
        state, metrics = ours(state, rows_of)
        found.append(metrics)
    return state, found


@pytest.mark.parametrize("name", mostly_long(STEP_OF, "in_turns", "one_after_another", "odd"))
def test_the_values_of_vmap(name: str) -> None:
    assert_values_of_vmap(STEP_OF[name], start, rows_of, axis=AXIS, shards=SHARDS, steps=STEPS)


def test_an_overlapped_step_has_the_same_bits() -> None:
    ours, overlapped = of_jaxft(in_turns), of_jaxft(in_turns, overlap=2)
    for one, other in zip(values(ours), values(overlapped), strict=True):
        np.testing.assert_array_equal(one, other)


def test_branches_exchange_together() -> None:
    """What does not depend on another exchange is one with it, whichever branch it is in."""
    cut = cut_only(in_turns, start(), rows_of(0, 0), Shared(axis=Axis(AXIS, SHARDS)))
    assert len(cut.stages) == 1
    types = [made.aval.str_short() for made in cut.contributions]
    assert sorted(types) == ["float32[5,5]", "float32[5,5]", "int32[]"]


def test_a_callback_runs_where_its_branch_is_taken() -> None:
    seen: list[int] = []

    def step(state: State, x: jax.Array) -> Any:
        def train(w: jax.Array) -> jax.Array:
            jax.debug.callback(lambda count: seen.append(int(count)), state["count"])
            return trained(w, x)

        return after(state, w=lax.cond(state["count"] % 2 == 1, train, lambda w: w, state["w"])), {}

    of_jaxft(step)
    jax.effects_barrier()
    assert sorted({*seen}) == [1, 3]


def test_the_rounds_of_scans_in_all_branches_count() -> None:
    def rounds(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda w, _: (w + lax.psum(x[:5], AXIS), None), w, length=40)[0]

    def step(state: State, x: jax.Array) -> Any:
        w = lax.cond(state["count"] > 0, lambda w: rounds(w, x), lambda w: rounds(w, -x), state["w"])
        return after(state, w=w), {}

    with pytest.raises(jaxft.StepError, match="more than 64 rounds"):
        of_jaxft(step)


@pytest.mark.parametrize("inner", [False, True])
def test_shards_may_not_take_different_branches(*, inner: bool) -> None:
    def step(state: State, x: jax.Array) -> Any:
        def by_batch(w: jax.Array) -> jax.Array:
            return lax.cond(x.sum() > 0, lambda w: trained(w, x), lambda w: w, w)

        w = lax.cond(state["count"] > 0, by_batch, lambda w: w, state["w"]) if inner else by_batch(state["w"])
        return after(state, w=w), {}

    with pytest.raises(
        jaxft.StepError, match=r"psum over 'batch' is inside a 'cond' .*derives from the batch"
    ):
        of_jaxft(step)


def test_the_branches_for_each_platform_are_not_divided() -> None:
    """Only one of them can be compiled."""

    def step(state: State, x: jax.Array) -> Any:
        x = lax.platform_dependent(x, cpu=lambda x: lax.pmean(x, AXIS), tpu=lambda x: x)
        return after(state, w=trained(state["w"], x)), {}

    with pytest.raises(
        jaxft.StepError, match=r" is inside 'cond' \(.*test_branches\.py:\d+.*Move the call out of it"
    ):
        of_jaxft(step)
