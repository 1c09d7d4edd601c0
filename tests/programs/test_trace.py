"""A step must return (state, metrics), and a state of the types it was given."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft._errors import StepError

pytestmark = pytest.mark.unoptimized

STATE = {"w": np.ones(3, np.float32), "n": np.int32(0)}
BATCH = np.ones(3, np.float32)


def refused(new_state: Any, match: str) -> None:
    step = jaxft.fault_tolerant(lambda state, batch: (new_state(state), jaxft.pmean(batch)), None)
    with pytest.raises(StepError, match=match):
        step(STATE, BATCH)


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (lambda state, _mean: state, "returned a dict, but it must return a pair"),
        (lambda state, mean: (state, mean, mean), "returned a tuple of 3, but it must return a pair"),
        (lambda state, mean: [state, mean], "returned a list"),
        (lambda *_: None, "returned a NoneType"),
        (lambda _state, mean: mean, r"returned one array, float32\[3\], but it must return a pair"),
    ],
)
def test_not_a_pair(result: Any, match: str) -> None:
    step = jaxft.fault_tolerant(lambda state, batch: result(state, jaxft.pmean(batch)), None)
    with pytest.raises(StepError, match=match):
        step(STATE, BATCH)


def test_another_structure() -> None:
    refused(lambda state: {"w": state["w"]}, r"a different structure .*missing: \['n'\]")
    refused(lambda state: state | {"m": state["w"]}, r"a different structure .*new: \['m'\]")
    refused(lambda state: list(state.values()), r"missing: \['n'\], \['w'\]; new: \[0\], \[1\]")
    refused(lambda _: None, r"missing: \['n'\], \['w'\]")


@pytest.mark.parametrize("leaf", ["train", jnp.sin, {1, 2}, np.array(["train"])])
def test_a_leaf_that_is_not_an_array(leaf: Any) -> None:
    expected = r"is .*, and not an array of numbers\. A step returns pytrees of arrays and numbers"
    refused(lambda state: state | {"w": leaf}, rf"The leaf \['w'\] of the new state {expected}")
    step = jaxft.fault_tolerant(
        lambda state, batch: (state, {"mean": jaxft.pmean(batch), "phase": leaf}), None
    )
    with pytest.raises(StepError, match=rf"The leaf \['phase'\] of the metrics {expected}"):
        step(STATE, BATCH)


def test_another_shape_or_dtype() -> None:
    refused(lambda state: state | {"w": state["w"][:2]}, r"leaf \['w'\] has type float32\[2\].*float32\[3\]")
    refused(
        lambda state: state | {"w": state["w"].astype(jnp.bfloat16)},
        r"leaf \['w'\] has type bfloat16\[3\].*has float32\[3\].*astype",
    )


@pytest.mark.parametrize(
    "made", [lambda step: step, jax.jit, lambda step: functools.partial(step, scale=2.0)]
)
def test_jaxs_errors_name_the_users_function(made: Any) -> None:
    def branches(state: Any, _batch: Any, scale: float = 1.0) -> Any:
        return state | {"w": -state["w"] if state["w"].sum() > scale else state["w"]}, {}

    step = jaxft.fault_tolerant(made(branches), None)
    with pytest.raises(
        jax.errors.TracerBoolConversionError, match=r"the function branches at .*test_trace\.py:\d"
    ):
        step(STATE, BATCH)
