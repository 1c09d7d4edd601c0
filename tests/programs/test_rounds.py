"""A scan with an exchange in each round: it is written out, with the results of the same loop in Python."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from step_models import assert_values_of_vmap, bits

import jaxft
from jaxft._errors import StepError
from jaxft._programs import _compat, _inline
from jaxft._programs._axis import Axis
from jaxft._programs._build import Shared, cut_only, cut_programs
from jaxft._programs._inline import inline
from jaxft._programs._programs import Programs
from jaxft._programs._warnings import shared_draws

pytestmark = pytest.mark.unoptimized

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


@pytest.mark.unoptimized(False)
def test_it_has_the_bits_of_the_loop_in_python() -> None:
    same(after(scanned, jnp.zeros(5)), after(written, jnp.zeros(5)))
    assert len(cut_only(scanned, jnp.zeros(5), batch_for(0, 0), Shared()).stages) == ROUNDS


def test_a_named_axis_and_the_number_of_the_shard() -> None:
    def over_axis(w: jax.Array, batch: jax.Array) -> Any:
        def one(w: jax.Array, rows: jax.Array) -> Any:
            rows = rows + lax.axis_index("batch").astype(rows.dtype)
            grads = jax.grad(lambda w: jnp.mean((rows @ w - 1.0) ** 2))(w)
            return w - 0.01 * lax.pmean(grads, "batch"), lax.pmax(jnp.max(rows), "batch")

        return lax.scan(one, w, batch)

    assert_values_of_vmap(over_axis, lambda: jnp.zeros(5), batch_for, axis="batch", shards=SHARDS)


def test_no_round() -> None:
    def none(w: jax.Array, batch: jax.Array) -> Any:
        w, losses = lax.scan(update, w, batch[:0])
        return w + jaxft.pmean(batch.mean()), {"losses": losses}

    state, metrics = after(none, jnp.zeros(5), steps=1)
    assert metrics["losses"].shape == (0,)
    assert len(set(np.asarray(state).tolist())) == 1


def many(after: int, outer: int, inner: int) -> Any:
    def step(w: jax.Array, batch: jax.Array) -> Any:
        def one(w: jax.Array, _: None) -> Any:
            return update(w + 0 * jaxft.shard_index().astype(w.dtype), batch[0])

        def rounds(w: jax.Array, _: None) -> Any:
            return lax.scan(one, w, None, length=inner)

        w, _ = lax.scan(rounds, w, None, length=outer)
        return lax.scan(one, w, None, length=after)[0], {}

    return step


@pytest.mark.parametrize(("after", "outer", "inner"), [(0, 1, 7), (0, 3, 3), (6, 1, 1)])
def test_too_many_rounds(after: int, outer: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inline, "MOST_ROUNDS", 6)
    with pytest.raises(
        StepError, match=r"jaxft\.pmean is inside a 'scan' .*test_rounds\.py:.* more than 6 rounds"
    ):
        inline(traced(many(after, outer, inner)))


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
        cut_only(drifts, jnp.zeros(5), batch_for(0, 0), Shared())
    assert "_inline.py" not in str(found.value)
    assert "test_rounds.py" in str(found.value)


def adam(rounds: int) -> Any:
    """Updates of Adam with a count and a key, as in the loops of PPO; and its state."""

    def train_step(state: Any, batch: jax.Array) -> Any:
        def one(state: Any, _: None) -> Any:
            w, mean, spread, count, key = state
            key, use = jax.random.split(key)
            rows = batch[0] + jax.random.normal(use, (8, 5))
            grads = jaxft.pmean(jax.grad(lambda w: jnp.mean((rows @ w - 1.0) ** 2))(w))
            count = count + 1
            mean, spread = 0.9 * mean + 0.1 * grads, 0.99 * spread + 0.01 * grads**2
            power = count.astype(jnp.float32)
            w = w - 0.01 * (mean / (1 - 0.9**power)) / (jnp.sqrt(spread / (1 - 0.99**power)) + 1e-8)
            return (w, mean, spread, count, key), None

        return lax.scan(one, state, None, length=rounds)[0], {}

    return train_step, (jnp.zeros(5), jnp.zeros(5), jnp.zeros(5), jnp.zeros((), jnp.int32), jax.random.key(3))


@functools.cache
def built(rounds: int) -> Programs:
    return cut_programs(*adam(rounds), batch_for(0, 0))


def test_programs_do_not_grow_from_round_to_round() -> None:
    rounds = 5
    programs = built(rounds)
    computes = [stage.compute for stage in programs.cut.stages]
    sizes = [len(part.jaxpr.eqns) for part in computes]
    assert sizes[2:-1] == [sizes[2]] * (rounds - 3)
    assert all(len(part.means) == 1 for part in computes[1:])
    assert computes[2].state == (), "the state as the last round has left it, not that before the step"
    executables = programs.executables.computes
    assert len(executables) == rounds
    assert len(set(map(id, executables))) == 4, "the first, the second, the rounds in between, and the last"
    assert len(programs.cut.apply.means) == rounds, "replayed on the means alone"


def assert_rounds(one: Any, rounds: int) -> None:
    """One shard: the mean is the identity, so the step has the values of the same loop under `jax.jit`."""

    def looped(mean: Any) -> Any:
        def train_step(w: jax.Array, batch: jax.Array) -> Any:
            for number in range(rounds):
                w = w - 0.1 * mean(one(number, w, batch[0]))
            return w, {}

        return train_step

    step = jaxft.fault_tolerant(looped(jaxft.pmean), None, shards=1)
    found, _ = step(jnp.ones(5), batch_for)
    wanted, _ = jax.jit(looped(lambda tree: tree))(jnp.ones(5), batch_for(0, 0))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_rounds_with_other_numbers_are_other_programs() -> None:
    def one(number: int, w: jax.Array, rows: jax.Array) -> jax.Array:
        value = -0.0 if number == 3 else 0.0
        inverse = 1 / jnp.where(rows.mean(0) + w > 1e9, w, value)
        return jnp.where(jnp.isinf(inverse), jnp.sign(inverse), inverse)

    assert_rounds(one, 5)


def test_rounds_that_call_other_host_functions_are_other_programs() -> None:
    """A fingerprint describes them by their names, which are the same."""

    def one(number: int, w: jax.Array, rows: jax.Array) -> jax.Array:
        given = rows.mean() + w[0]  # of the round, so that its own program makes the call
        factor = jax.pure_callback(lambda x: np.asarray((number + 1) * x), jax.typeof(given), given)
        return w * factor

    assert_rounds(one, 5)


def test_a_token_is_passed_by_no_program() -> None:
    def ordered(w: jax.Array, batch: jax.Array) -> Any:
        token = lax.create_token()
        for rows in batch:
            grads = jaxft.pmean(jnp.mean(rows * w[None], axis=0))
            token = lax.after_all(token)
            w = w - 0.1 * grads
        return w, {}

    state, _ = after(ordered, jnp.ones(5), steps=1)
    assert np.all(np.isfinite(state))


def test_rounds_have_the_values_of_as_many_steps() -> None:
    rounds = 3

    def trained(each: int) -> Any:
        train_step, state = adam(each)
        step = jaxft.fault_tolerant(train_step, None, shards=2)
        for _ in range(2 * rounds // each):
            state, _ = step(state, lambda number, shard: batch_for(number * each // rounds, shard))
        return (*state[:-1], jax.random.key_data(state[-1]))

    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), trained(rounds), trained(1)
    )


def test_shards_keep_one_copy_of_what_they_have_in_common() -> None:
    programs = built(5)
    state = programs.state_leaves(adam(5)[1])
    locals_ = {}
    contributions = {}
    for shard in range(2):
        contributions[shard], locals_[shard] = programs.compute(state, batch_for(0, shard), shard)
    means: list[Any] = []
    for _ in range(2):
        means += contributions[0]
        for shard in range(2):
            contributions[shard], local = programs.compute_next(state, means, locals_[shard])
            locals_[shard] = local.sharing([locals_[0]])
    pairs = [
        (one, other) for one, other in zip(locals_[0].rest, locals_[1].rest, strict=True) if one is not None
    ]
    shared = [one is other for one, other in pairs]
    assert any(shared)
    assert not all(shared), "the batch of each is its own"
    assert None in list(locals_[0].rest), "values of earlier rounds are dropped"
    behind = programs.compute(state, batch_for(0, 2), 2)[1]
    assert behind.sharing(locals_.values()) is behind


def test_a_value_that_would_take_more_memory_than_its_mean_is_made_again() -> None:
    """A mean that is broadcast, a mask: only the small values that they are made of are passed."""

    def wide(state: Any, batch: jax.Array) -> Any:
        w, key = state
        for rows in batch:
            key, use = jax.random.split(key)
            w = w + jaxft.pmean(jnp.mean(rows * w[None], axis=0))
            mask = jax.random.bernoulli(use, 0.5, (1000, 5)).astype(jnp.float32)
            w = w * jnp.mean(jnp.broadcast_to(w, (1000, 5)) * mask, axis=0)
        return (w, key), {}

    stages = cut_only(wide, (jnp.ones(5), jax.random.key(0)), batch_for(0, 0), Shared()).stages
    passed = [
        stage.compute.output_avals[len(stage.contributions) + at] for stage in stages for at in stage.common
    ]
    assert {aval.shape for aval in passed} >= {(5,)}
    assert max(aval.size for aval in passed) <= 5


def test_a_key_of_an_earlier_round_is_the_same_in_all_shards() -> None:
    cut = cut_only(*adam(3), batch_for(0, 0), Shared())
    (line,) = {line for stage in cut.stages for line in shared_draws(stage.compute, cut.common)}
    assert "test_rounds.py" in line


def test_no_round_keeps_its_type_on_a_mesh() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spread = jax.device_put(np.zeros((0, 8), np.float32), jax.sharding.PartitionSpec(None, "x"))

        def none(rows: jax.Array) -> jax.Array:
            return lax.scan(lambda c, row: (c + jaxft.pmean(c), row * 2), jnp.zeros(()), rows)[1]

        (wanted,) = jax.make_jaxpr(none)(spread).out_avals
        (found,) = inline(_compat.trace(none, spread)).outvars
    assert found.aval.sharding.spec == wanted.sharding.spec


def test_the_axis_is_that_of_the_shards_alone() -> None:
    """A scan in a `jax.vmap` of another axis is left as it is."""

    def mapped(w: jax.Array, batch: jax.Array) -> Any:
        def total(row: jax.Array) -> jax.Array:
            return lax.scan(
                lambda c, _: (c + lax.psum(row, "rows"), None), jnp.zeros_like(row), None, length=2
            )[0]

        return w + lax.pmean(jax.vmap(total, axis_name="rows")(batch[0]).mean(), "batch"), {}

    cut = cut_only(mapped, jnp.zeros(5), batch_for(0, 0), Shared(axis=Axis("batch", SHARDS)))
    assert len(cut.stages) == 1
