"""`shard_index`: each shard's own random numbers, and a warning where all shards draw the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft._errors import StepError
from jaxft._programs._build import Shared, cut_only
from jaxft._programs._warnings import shared_draws

pytestmark = pytest.mark.unoptimized


def state() -> Any:
    return {"key": jax.random.key(3), "mean": jnp.zeros(4)}


def zeros(_step: int, _shard: int) -> np.ndarray:
    return np.zeros(4, np.float32)


def test_it_is_the_number_of_the_shard() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        index = jaxft.shard_index()
        return state | {"mean": state["mean"] + jaxft.pmean((index == batch).astype(jnp.float32))}, index

    step = jaxft.fault_tolerant(train_step, None, shards=5)
    after, index = step(state(), lambda _step, shard: np.int32(shard))
    np.testing.assert_array_equal(after["mean"], np.ones(4))
    assert (int(index), index.dtype) == (0, jnp.int32)


def test_it_cannot_be_inside_a_solver() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        solved = jax.lax.custom_linear_solve(
            lambda x: x * (2 + jaxft.shard_index()).astype(x.dtype),
            batch,
            lambda _matvec, b: b,
            symmetric=True,
        )
        return state, jaxft.pmean(solved)

    with pytest.raises(
        StepError,
        match=r"shard_index is inside 'custom_linear_solve' \(.*test_shard_index\.py:\d+.*call it first, at the top",
    ):
        jaxft.fault_tolerant(train_step, None)(state(), zeros(0, 0))


def test_it_may_not_reach_the_new_state() -> None:
    def train_step(state: Any, batch: Any) -> Any:
        return state | {"mean": state["mean"] + jaxft.shard_index().astype(jnp.float32)}, jaxft.pmean(batch)

    with pytest.raises(
        StepError, match=r"\['mean'\] derives from the batch .*computed at .*test_shard_index"
    ):
        jaxft.fault_tolerant(train_step, None)(state(), zeros(0, 0))

    def itself(_count: Any, batch: Any) -> Any:
        return jaxft.shard_index(), jaxft.pmean(batch)

    with pytest.raises(StepError, match=r"derives from the batch .*: it is the number of the shard"):
        jaxft.fault_tolerant(itself, None)(jnp.int32(0), zeros(0, 0))


# The warning


def lines_of(train_step: Any) -> list[str]:
    """Where all shards draw the same numbers."""
    cut = cut_only(train_step, state(), zeros(0, 0), Shared())
    return [line for stage in cut.stages for line in shared_draws(stage.compute, cut.common)]


def test_a_warning_where_all_shards_draw_the_same(caplog: pytest.LogCaptureFixture) -> None:
    step = jaxft.fault_tolerant(noisy_of(lambda key, _batch: key), None, shards=2)
    now, _ = step(state(), zeros)
    step(now, lambda *_: np.zeros((1, 4), np.float32))  # another shape: it is traced again
    (text,) = caplog.messages
    with open(__file__) as lines:
        line = next(n for n, line in enumerate(lines, start=1) if "# " + "drawn here" in line)
    assert f"test_shard_index.py:{line} " in text
    assert "jax.random.fold_in(key, jaxft.shard_index())" in text


def noisy_of(key_of: Any) -> Any:
    def train_step(state: Any, batch: Any) -> Any:
        key, use = jax.random.split(state["key"])
        use = key_of(use, batch)

        def loss(w: Any) -> Any:
            kept = jax.random.bernoulli(use, 0.5, w.shape)  # drawn here
            return jnp.sum(jnp.where(kept, w * batch.mean(), 0.0))

        return {"key": key, "mean": state["mean"] - jaxft.pmean(jax.grad(loss)(state["mean"]))}, {}

    return train_step


def scanned(state: Any, batch: Any) -> Any:
    key, use = jax.random.split(state["key"])

    def layer(x: Any, key: Any) -> Any:
        return x + jax.random.normal(key, x.shape), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch.mean(), jax.random.split(use, 3))
    return state | {"key": key}, jaxft.pmean(x)


def legacy(state: Any, batch: Any) -> Any:
    key = jax.random.key_data(state["key"])
    return state, jaxft.pmean(batch.mean() + jax.random.normal(key))


@pytest.mark.parametrize("train_step", [scanned, legacy])
def test_the_draw_may_be_in_a_loop_or_from_a_key_of_uint32(train_step: Any) -> None:
    assert len(lines_of(train_step)) == 1


def after_the_means(state: Any, batch: Any) -> Any:
    """The noise of DP-SGD: one draw for all, added to the mean."""
    key, use = jax.random.split(state["key"])
    return {"key": key, "mean": jaxft.pmean(batch.mean()) + jax.random.normal(use, (4,))}, {}


@pytest.mark.parametrize(
    "train_step",
    [
        noisy_of(lambda key, _batch: jax.random.fold_in(key, jaxft.shard_index())),
        noisy_of(lambda key, batch: jax.random.fold_in(key, batch.mean().astype(jnp.int32))),
        noisy_of(lambda *_: jax.random.key(0)),  # not of the state: the same in every step, too
        after_the_means,
    ],
)
def test_no_warning(train_step: Any) -> None:
    assert lines_of(train_step) == []
