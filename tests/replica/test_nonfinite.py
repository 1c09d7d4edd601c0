"""Means that are not finite: how they are found, and each policy in a run alone."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxft
from jaxft._arrays._layout import LeafSpec
from jaxft._replica._call import Policy, compared_policy, find

pytestmark = pytest.mark.unoptimized

FLOATS = ("float32", "float64", "bfloat16", "float16")


def spec(name: str, array: np.ndarray) -> LeafSpec:
    return LeafSpec(name, array.shape, array.dtype.name)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), dtype=st.sampled_from(FLOATS), size=st.sampled_from((0, 1, 7, 1 << 17, (1 << 18) + 3)))
def test_a_leaf_is_found_if_and_only_if_something_in_it_is_not_finite(
    data: st.DataObject, dtype: str, size: int
) -> None:
    # The largest numbers, so that a sum of finite numbers would overflow; zeros and denormals.
    most = float(ml_dtypes.finfo(dtype).max)
    leaf = np.resize(
        np.array([most, -most, 0.0, -0.0, float(ml_dtypes.finfo(dtype).smallest_subnormal)], dtype), size
    )
    assert find([spec("w", leaf)], [leaf], "raise") == ""
    if not size:
        return
    place = data.draw(st.integers(0, size - 1))
    leaf[place] = data.draw(st.sampled_from((np.nan, np.inf, -np.inf)))
    found = find([spec("w", leaf)], [leaf], "skip")
    assert found == f"w is {float(leaf[place])} at [{place}]"


def test_the_first_leaf_is_named_with_its_place() -> None:
    leaves = [np.ones((3, 4), np.float32), np.zeros(2, np.int32), np.zeros((), ml_dtypes.bfloat16)]
    leaves[0][2, 1] = -np.inf
    leaves[2] = np.array(np.nan, ml_dtypes.bfloat16)
    specs = [spec(name, leaf) for name, leaf in zip(("['a']", "['n']", "['b']"), leaves, strict=True)]
    assert find(specs, leaves, "raise") == "['a'] is -inf at [2, 1]"
    leaves[0][2, 1] = 0
    assert find(specs, leaves, "raise") == "['b'] is nan"
    assert find(specs, [jnp.asarray(leaf) for leaf in leaves], "raise") == "['b'] is nan"
    assert find(specs, leaves, "allow") == ""


def test_a_warning_needs_a_glance_only() -> None:
    leaf = np.zeros(1 << 12, np.float32)
    leaf[-1] = np.nan
    assert find([spec("w", leaf)], [leaf], "warn") == ""
    leaf[1000] = np.nan
    assert find([spec("w", leaf)], [leaf], "warn") == "w is nan at [1000]"


def train_step(state: Any, batch: jax.Array) -> tuple[Any, Any]:
    grads = jaxft.pmean({"w": jnp.sum(batch) * state["w"]})
    return {"w": state["w"] - grads["w"]}, {"norm": jnp.sum(grads["w"])}


def batch_for(step: int, shard: int) -> np.ndarray:
    poisoned = step == 2 and shard == 1
    return np.full(3, np.inf if poisoned else 0.1 * (step + shard), np.float32)


def batch_one(step: int, _shard: int) -> np.ndarray:
    return batch_for(step, 1)


@pytest.mark.parametrize("shards", [None, 2])
def test_raise_leaves_the_state_as_it_was(shards: int | None) -> None:
    step = jaxft.fault_tolerant(train_step, None, shards=shards, nonfinite="raise")
    batches = batch_for if shards else batch_one
    state: Any = {"w": jnp.ones(4)}
    for _ in range(2):
        state, _ = step(state, batches)
    before = jaxft.digest(state)
    for _ in range(2):
        with pytest.raises(
            jaxft.NonFinite, match=r"means of step 2 are not finite: pmean\['w'\] is inf at \[0\]"
        ):
            step(state, batches)
    assert step.step == 2
    assert jaxft.digest(state) == before


@pytest.mark.parametrize("shards", [None, 2])
def test_skip_counts_the_step_and_changes_nothing(
    shards: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    step = jaxft.fault_tolerant(train_step, None, shards=shards, nonfinite="skip")
    batches = batch_for if shards else batch_one
    state: Any = {"w": jnp.ones(4)}
    digests: list[str] = []
    for _ in range(4):
        state, metrics = step(state, batches)
        digests.append(jaxft.digest(state))
        assert np.isnan(metrics["norm"]) == (step.step == 3)
    assert digests[1] == digests[2] != digests[3]
    assert step.step == 4
    assert "step 2 changes nothing: pmean['w'] is inf at [0]" in caplog.text


@pytest.mark.parametrize("policy", ["allow", "warn"])
def test_otherwise_it_is_applied(policy: Any) -> None:
    step = jaxft.fault_tolerant(train_step, None, shards=2, nonfinite=policy)
    state: Any = {"w": jnp.ones(4)}
    for _ in range(3):
        state, _ = step(state, batch_for)
    assert not np.isfinite(state["w"]).any()


def test_from_functions_has_it_too() -> None:
    def grad_fn(state: Any, batch: Any) -> tuple[Any, Any]:
        return jnp.sum(batch) * state, ()

    def update_fn(state: Any, mean: Any, _local: Any) -> tuple[Any, Any]:
        return state - mean, {}

    step = jaxft.from_functions(grad_fn, update_fn, None, nonfinite="raise")
    with pytest.raises(jaxft.NonFinite):
        step(jnp.ones(2), np.full(3, np.nan, np.float32))


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [("warn", "allow", True), ("warn", "skip", False), ("allow", "raise", False), ("skip", "raise", False)],
)
def test_groups_must_agree_on_whether_a_step_counts_and_not_on_warnings(
    one: Policy, other: Policy, *, agree: bool
) -> None:
    assert (compared_policy(one) == compared_policy(other)) is agree


def test_there_is_no_other_policy() -> None:
    with pytest.raises(
        jaxft.ConfigurationError, match=r"nonfinite must be one of 'warn', 'allow'.*, not 'stop'"
    ):
        jaxft.fault_tolerant(train_step, None, nonfinite="stop")  # pyright: ignore[reportArgumentType]
