"""A scan with an exchange in each round: it is written out, with the results of the same loop in Python."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from step_models import bits

import jaxft
from jaxft._errors import StepError
from jaxft._programs import _compat
from jaxft._programs._axis import Axis
from jaxft._programs._build import Programs, cut_programs
from jaxft._programs._inline import MOST_ROUNDS, inline

SHARDS = 4
ROUNDS = 3


def batch_for(step: int, shard: int) -> np.ndarray:
    return np.random.default_rng([step, shard]).standard_normal((ROUNDS, 8, 5), dtype=np.float32)


def update(w: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((rows @ w - 1.0) ** 2))(w)
    loss, grads = jaxft.pmean((loss, grads))
    return w - 0.1 * grads, loss


def scanned(w: jax.Array, batch: jax.Array) -> Any:
    w, losses = lax.scan(update, w, batch)
    return w, {"losses": losses}


def written(w: jax.Array, batch: jax.Array) -> Any:
    losses = []
    for number in range(ROUNDS):
        w, loss = update(w, batch[number])
        losses.append(loss)
    return w, {"losses": jnp.stack(losses)}


def after(train_step: Any, state: Any, steps: int = 3, **options: Any) -> tuple[Any, Any]:
    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS, **options)
    metrics = None
    for _ in range(steps):
        state, metrics = step(state, batch_for)
    return state, metrics


def same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert list(map(bits, jax.tree.leaves(one))) == list(map(bits, jax.tree.leaves(other)))


def built(train_step: Any, state: Any) -> Programs:
    return cut_programs(train_step, state, batch_for(0, 0))


def test_it_has_the_bits_of_the_loop_in_python() -> None:
    same(after(scanned, jnp.zeros(5)), after(written, jnp.zeros(5)))
    programs = built(scanned, jnp.zeros(5))
    assert programs.stages == ROUNDS


def test_in_reverse() -> None:
    def in_reverse(w: jax.Array, batch: jax.Array) -> Any:
        w, losses = lax.scan(update, w, batch, reverse=True)
        return w, {"losses": losses}

    def flipped(w: jax.Array, batch: jax.Array) -> Any:
        w, metrics = written(w, batch[::-1])
        return w, {"losses": metrics["losses"][::-1]}

    same(after(in_reverse, jnp.zeros(5)), after(flipped, jnp.zeros(5)))


def test_a_loop_within_a_loop_with_keys_and_numbers() -> None:
    """As PPO's: epochs, each with its own permutation, of minibatches."""

    def ppo(state: Any, batch: jax.Array) -> Any:
        def epoch(carry: Any, _: None) -> Any:
            w, key, count = carry
            key, use = jax.random.split(key)
            shuffled = jax.random.permutation(use, batch.reshape(-1, 5)).reshape(2, 12, 5)
            w, losses = lax.scan(update, w, shuffled)
            return (w, key, count + 1), (losses, use)

        (w, key, count), (losses, keys) = lax.scan(epoch, (state["w"], state["key"], 0), None, length=2)
        return {"w": w, "key": key}, {"losses": losses, "count": count, "keys": jax.random.key_data(keys)}

    state, metrics = after(ppo, {"w": jnp.zeros(5), "key": jax.random.key(0)})
    assert metrics["losses"].shape == (2, 2)
    assert metrics["count"] == 2
    assert len({bytes(row) for row in np.asarray(metrics["keys"])}) == 2
    first, _ = after(ppo, {"w": jnp.zeros(5), "key": jax.random.key(0)}, steps=1)
    assert np.all(np.isfinite(state["w"]))
    assert bits(first["w"]) != bits(state["w"])
    assert built(ppo, {"w": jnp.zeros(5), "key": jax.random.key(0)}).stages == 4


def test_a_named_axis_and_the_number_of_the_shard() -> None:
    def over_axis(w: jax.Array, batch: jax.Array) -> Any:
        def one(w: jax.Array, rows: jax.Array) -> Any:
            rows = rows + lax.axis_index("batch").astype(rows.dtype)
            grads = jax.grad(lambda w: jnp.mean((rows @ w - 1.0) ** 2))(w)
            return w - 0.01 * lax.pmean(grads, "batch"), lax.pmax(jnp.max(rows), "batch")

        return lax.scan(one, w, batch)

    def of_jax(w: jax.Array, batch: jax.Array) -> Any:
        return jax.tree.map(
            lambda leaf: leaf[0], jax.vmap(over_axis, in_axes=(None, 0), axis_name="batch")(w, batch)
        )

    state, largest = after(over_axis, jnp.zeros(5), axis_name="batch")
    wanted, found = jnp.zeros(5), None
    for number in range(3):
        wanted, found = of_jax(wanted, np.stack([batch_for(number, shard) for shard in range(SHARDS)]))
    np.testing.assert_allclose(state, wanted, rtol=1e-5)
    np.testing.assert_allclose(largest, found, rtol=1e-6)


def test_under_grad() -> None:
    """The gradient of a scan whose rounds normalise by all shards: sync BatchNorm, layer by layer."""

    def deep(w: jax.Array, batch: jax.Array) -> Any:
        def loss_of(w: jax.Array) -> jax.Array:
            def layer(x: jax.Array, w: jax.Array) -> Any:
                x = jnp.tanh(x * w[None])
                return x - lax.pmean(jnp.mean(x, axis=0, keepdims=True), "batch"), None

            x, _ = lax.scan(layer, batch[0], w)
            return jnp.mean((x - batch[1]) ** 2)

        return w - 0.1 * lax.pmean(jax.grad(loss_of)(w), "batch"), {}

    start = np.linspace(0.5, 1.5, 10, dtype=np.float32).reshape(2, 5)
    state, _ = after(deep, jnp.asarray(start), axis_name="batch", steps=1)
    batches = np.stack([batch_for(0, shard) for shard in range(SHARDS)])
    wanted, _ = jax.vmap(deep, in_axes=(None, 0), axis_name="batch")(start, batches)
    np.testing.assert_allclose(state, wanted[0], rtol=1e-5)


def test_no_round() -> None:
    def none(w: jax.Array, batch: jax.Array) -> Any:
        w, losses = lax.scan(update, w, batch[:0])
        return w + jaxft.pmean(batch.mean()), {"losses": losses}

    state, metrics = after(none, jnp.zeros(5), steps=1)
    assert metrics["losses"].shape == (0,)
    assert len(set(np.asarray(state).tolist())) == 1


def test_what_a_round_closes_over() -> None:
    table = np.linspace(0.0, 1.0, 5, dtype=np.float32)

    def closing(w: jax.Array, batch: jax.Array) -> Any:
        def one(w: jax.Array, rows: jax.Array) -> Any:
            return jax.jit(update)(w + table, rows)

        return lax.scan(one, w, batch)

    def plain(w: jax.Array, batch: jax.Array) -> Any:
        losses = []
        for number in range(ROUNDS):
            w, loss = update(w + table, batch[number])
            losses.append(loss)
        return w, jnp.stack(losses)

    same(after(closing, jnp.zeros(5)), after(plain, jnp.zeros(5)))


def many(after: int, outer: int, inner: int) -> Any:
    def step(w: jax.Array, batch: jax.Array) -> Any:
        def one(w: jax.Array, _: None) -> Any:
            return update(w + 0 * jaxft.shard_index().astype(w.dtype), batch[0])

        def rounds(w: jax.Array, _: None) -> Any:
            return lax.scan(one, w, None, length=inner)

        w, _ = lax.scan(rounds, w, None, length=outer)
        return lax.scan(one, w, None, length=after)[0], {}

    return step


@pytest.mark.parametrize(
    ("after", "outer", "inner"), [(0, 1, MOST_ROUNDS + 1), (0, 3, MOST_ROUNDS // 2), (MOST_ROUNDS, 1, 1)]
)
def test_too_many_rounds(after: int, outer: int, inner: int) -> None:
    with pytest.raises(
        StepError,
        match=rf"jaxft\.pmean is inside a 'scan' .*test_rounds\.py:.* more than {MOST_ROUNDS} rounds",
    ):
        inline(traced(many(after, outer, inner)))


def test_not_too_many_rounds() -> None:
    inline(traced(many(0, 2, MOST_ROUNDS // 2)))
    inline(traced(many(MOST_ROUNDS // 2, 1, MOST_ROUNDS // 2)))


def traced(train_step: Any) -> Any:
    return _compat.trace(train_step, jnp.zeros(5), batch_for(0, 0))


def test_a_scan_over_what_another_has_made_reads_its_rows() -> None:
    """As the gradient of a scan does: nothing is stacked to be sliced again."""

    def twice(w: jax.Array, batch: jax.Array) -> Any:
        w, losses = lax.scan(update, w, batch)
        total, _ = lax.scan(
            lambda c, loss: (c + jaxft.pmean(loss * batch.mean()), None), jnp.zeros(()), losses
        )
        return w + total, {}

    def sliced(eqns: Any) -> int:
        return sum(eqn.primitive.name in ("slice", "dynamic_slice") for eqn in eqns)

    alone = inline(traced(lambda w, batch: (lax.scan(update, w, batch)[0], {})))
    assert sliced(inline(traced(twice)).eqns) == sliced(alone.eqns) > 0


def test_what_is_written_out_has_the_users_line() -> None:
    def drifts(w: jax.Array, batch: jax.Array) -> Any:
        rows, _ = lax.scan(lambda c, rows: (c + rows[0] + jaxft.pmean(rows[0]), rows[0]), w, batch)
        return rows, {}

    with pytest.raises(StepError, match=r"derives from the batch") as found:
        built(drifts, jnp.zeros(5))
    assert "_inline.py" not in str(found.value)
    assert "test_rounds.py" in str(found.value)


def test_no_round_keeps_its_type_on_a_mesh() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spread = jax.device_put(np.zeros((0, 8), np.float32), jax.sharding.PartitionSpec(None, "x"))

        def none(rows: jax.Array) -> jax.Array:
            return lax.scan(lambda c, row: (c + jaxft.pmean(c), row * 2), jnp.zeros(()), rows)[1]

        (wanted,) = jax.make_jaxpr(none)(spread).out_avals
        (found,) = inline(_compat.trace(none, spread)).outvars
    assert found.aval.sharding.spec == wanted.sharding.spec


def test_the_number_of_the_shard_alone_does_not_unroll_a_scan() -> None:
    def numbers(w: jax.Array, batch: jax.Array) -> Any:
        total, _ = lax.scan(lambda c, _: (c + jaxft.shard_index(), None), 0, None, length=2)
        return w + jaxft.pmean(batch.mean() + total.astype(w.dtype)), {}

    with pytest.raises(StepError, match="shard_index is inside 'scan'"):
        built(numbers, jnp.zeros(5))


def test_on_a_mesh() -> None:
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))

    def wide(step: int, shard: int) -> np.ndarray:
        return np.random.default_rng([step, shard]).standard_normal((ROUNDS, 8, 8), dtype=np.float32)

    found = []
    for train_step in (scanned, written):
        step = jaxft.fault_tolerant(train_step, None, shards=2)
        state, metrics = jax.device_put(jnp.zeros(8), spread), None
        for _ in range(2):
            state, metrics = step(state, wide)
        assert state.sharding == spread
        found.append((state, metrics))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), *found)


def test_the_axis_is_that_of_the_shards_alone() -> None:
    """A scan in a `jax.vmap` of another axis is left as it is."""

    def mapped(w: jax.Array, batch: jax.Array) -> Any:
        def total(row: jax.Array) -> jax.Array:
            return lax.scan(
                lambda c, _: (c + lax.psum(row, "rows"), None), jnp.zeros_like(row), None, length=2
            )[0]

        return w + lax.pmean(jax.vmap(total, axis_name="rows")(batch[0]).mean(), "batch"), {}

    programs = cut_programs(mapped, jnp.zeros(5), batch_for(0, 0), axis=Axis("batch", SHARDS))
    assert programs.stages == 1
