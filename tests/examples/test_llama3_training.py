"""The optimizer, the schedule by committed steps, and a model that learns."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from llama3_cases import OPTIMIZER, TINY, abstract_params, batch_of, params_of

import jaxft
from examples.llama3._config import MODEL_SIZES, SettingsError
from examples.llama3._optimizer import OptimizerConfig, learning_rate, make_optimizer
from examples.llama3._state import TrainState
from examples.llama3.train import accumulated, make_loss, make_train_step
from jaxft._programs._build import Shared, cut_programs

pytestmark = pytest.mark.unoptimized


def optimizer_config(**changes: Any) -> OptimizerConfig:
    settings = {
        "learning_rate": 1.0,
        "warmup_steps": 4,
        "total_steps": 20,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
    }
    return OptimizerConfig(**{**settings, **changes})


# The schedule.


def rates(config: OptimizerConfig, steps: int) -> np.ndarray:
    return np.asarray(jax.jit(jax.vmap(lambda step: learning_rate(config, step)))(np.arange(steps)))


def test_the_learning_rate_rises_then_follows_a_cosine_to_a_tenth_and_stays() -> None:
    rate = rates(optimizer_config(), 30)
    np.testing.assert_allclose(rate[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    cosine = [0.1 + 0.9 * (1 + np.cos(np.pi * k / 16)) / 2 for k in range(1, 17)]
    np.testing.assert_allclose(rate[4:20], cosine, rtol=1e-5)
    np.testing.assert_allclose(rate[20:], 0.1, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.0}, "--learning-rate must be above 0 and finite, not 0.0"),
        ({"total_steps": 0}, "--steps must be above 0 and finite, not 0"),
        ({"warmup_steps": -1}, "--warmup-steps must be 0 or above and finite, not -1"),
        ({"weight_decay": float("nan")}, "--weight-decay must be 0 or above and finite, not nan"),
        ({"beta2": 1.0}, "--beta2 must be from 0 to less than 1, not 1.0"),
    ],
)
def test_bad_settings_are_refused_by_flag(changes: dict[str, float], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        optimizer_config(**changes)


# The update.


def updated(transform: optax.GradientTransformation, grads: Any, params: Any) -> Any:
    return jax.jit(lambda grads, params: transform.update(grads, transform.init(params), params))(
        grads, params
    )


def test_the_update_is_adamw_on_gradients_clipped_together() -> None:
    params = {"query": np.full((2, 2), 0.5, np.float32), "final_norm": np.full(2, 0.5, np.float32)}
    grads = {"query": np.full((2, 2), 3.0, np.float32), "final_norm": np.array([4.0, -4.0], np.float32)}
    transform = make_optimizer(optimizer_config(clip_norm=0.5))
    updates, opt_state = updated(transform, grads, params)
    # Adam's first step is the gradient's sign; matrices then have a tenth of themselves added, norms do not.
    np.testing.assert_allclose(updates["query"], np.full((2, 2), 1.0 + 0.1 * 0.5), rtol=1e-4)
    np.testing.assert_allclose(updates["final_norm"], [1.0, -1.0], rtol=1e-4)
    norm = np.sqrt(4 * 3.0**2 + 2 * 4.0**2)
    first_moment = optax.tree.get(opt_state, "mu")
    np.testing.assert_allclose(first_moment["query"], 0.1 * 3.0 * 0.5 / norm, rtol=1e-5)


NORMS = {"attention_norm", "ffn_norm", "final_norm"}


@pytest.mark.parametrize(
    ("decayed", "spared"), [("all", set()), ("matrices", NORMS), ("blocks", NORMS | {"embedding", "head"})]
)
def test_only_chosen_weights_decay(decayed: Any, spared: set[str]) -> None:
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), abstract_params(TINY))
    transform = make_optimizer(optimizer_config(decayed=decayed))
    updates, _ = updated(transform, jax.tree.map(np.zeros_like, params), params)
    moved = {path[-1].key: float(leaf.max()) for path, leaf in jax.tree_util.tree_leaves_with_path(updates)}
    assert {name for name, decay in moved.items() if decay == 0.0} == spared
    assert all(decay == pytest.approx(0.1) for name, decay in moved.items() if name not in spared)


# The step.


@pytest.mark.long
def test_accumulated_gradients_are_the_gradients_of_the_whole_batch() -> None:
    tokens = np.random.default_rng(0).integers(0, 320, (8, 17)).astype(np.int32)
    whole = jax.value_and_grad(make_loss(TINY))
    loss, grads = jax.jit(whole)(params_of(TINY), batch_of(tokens))
    part_loss, part_grads = jax.jit(accumulated(whole, parts=4))(params_of(TINY), batch_of(tokens))
    assert float(part_loss) == pytest.approx(float(loss), rel=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(part_grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(one).max())


def test_groups_may_exchange_bfloat16_while_moments_stay_float32() -> None:
    seen: list[Any] = []

    def mean(tree: Any) -> Any:
        seen.extend(leaf.dtype for leaf in jax.tree.leaves(tree))
        return tree

    train_step = make_train_step(TINY, OPTIMIZER, mean=mean, grad_dtype="bfloat16")
    before = jax.eval_shape(_state_of, abstract_params(TINY))
    after, metrics = jax.eval_shape(train_step, before, abstract_batch(1, 16))
    assert Counter(map(str, seen)) == {"bfloat16": len(jax.tree.leaves(before.params)), "float32": 1}
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {np.dtype("float32")}
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, before)
    assert metrics["loss"].dtype == np.float32


@pytest.mark.long
@pytest.mark.unoptimized(False)
def test_the_last_layers_gradients_can_be_exchanged_first() -> None:
    """Building the programs compares their bits with the undivided step's."""
    train_step = make_train_step(TINY, OPTIMIZER, mean=jaxft.pmean)
    tokens = jnp.arange(2 * 17, dtype=jnp.int32).reshape(2, 17)
    programs = cut_programs(train_step, _state_of(params_of(TINY)), batch_of(tokens), Shared(overlap=2))
    first, second = ([made.path[1:] for made in stage.contributions] for stage in programs.cut.stages)
    assert ("head",) in first
    assert ("embedding",) in second
    rows = [
        one.rows
        for stage in programs.cut.stages
        for one in stage.contributions
        if one.path[1:2] == ("blocks",)
    ]
    assert {(each.start, each.stop) for each in rows if each is not None} == {(0, 1), (1, 2)}


def test_the_mean_is_taken_of_gradients_and_loss_before_anything_uses_them() -> None:
    """Gradients are made zero by the mean: then only the decay moves the parameters."""
    model, seen = MODEL_SIZES["debug"], []

    def no_gradient(tree: Any) -> Any:
        seen.append(jax.tree.structure(tree))
        return jax.tree.map(jnp.zeros_like, tree)

    train_step = make_train_step(model, OPTIMIZER, mean=no_gradient)
    params = abstract_params(model)
    assert jax.eval_shape(
        lambda params, batch: train_step(_state_of(params), batch)[1],
        params,
        abstract_batch(1, 16),
    ).keys() == {"loss", "grad_norm", "learning_rate"}
    assert seen == [jax.tree.structure((params, 0.0))]


def test_the_state_keeps_its_shapes_and_types_over_a_step() -> None:
    """What comes out must go in again without a new compilation, and be replaceable leaf by leaf."""
    train_step = make_train_step(MODEL_SIZES["8B"], OPTIMIZER, mean=lambda gradients: gradients)
    before = jax.eval_shape(_state_of, abstract_params(MODEL_SIZES["8B"]))
    after, _ = jax.eval_shape(train_step, before, abstract_batch(1, 8192))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (old.shape, old.dtype, old.weak_type) == (new.shape, new.dtype, new.weak_type)


def abstract_batch(rows: int, seq_len: int) -> Any:
    return jax.eval_shape(lambda: batch_of(jnp.zeros((rows, seq_len + 1), jnp.int32)))


def _state_of(params: Any) -> TrainState:
    return TrainState(
        step=jnp.zeros((), jnp.int32), params=params, opt_state=make_optimizer(OPTIMIZER).init(params)
    )
