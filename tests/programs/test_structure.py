"""The first difference between the structures of two states, in a line that a person can read."""

import collections
import re
from typing import Any

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxft
from jaxft._errors import ConfigurationError, StepError
from jaxft._programs._leaves import first_difference

pytestmark = pytest.mark.unoptimized

Pair = collections.namedtuple("Pair", "a b")
Other = collections.namedtuple("Other", "a b")


@flax.struct.dataclass
class Struct:
    w: Any
    name: Any = flax.struct.field(pytree_node=False, default="net")


class Module(eqx.Module):
    w: Any
    size: Any = eqx.field(static=True, default=3)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ((1, [2, 3]), (1, (2, 3)), r"at \[1\], a list became a tuple"),
        ((1, [2, 3]), (1, [2]), r"at \[1\], a list of 2 became a list of 1"),
        ({"a": 1}, {"a": None}, r"at \['a'\], a leaf became None"),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, r"at \['a'\], the keys \['b'\] became \['c'\]"),
        (1, [1], "a leaf became a list"),
        (Pair(1, 2), Other(1, 2), "a Pair became a Other"),
        (Struct(1), Struct(1, name="other"), "a setting of a Struct was 'net' and is 'other'"),
        ([Module(1)], [Module(1, size=4)], r"at \[0\], a setting of a Module was 3 and is 4"),
        ({"a": 1}, {"a": 2}, ""),
    ],
)
def test_the_first_difference(before: Any, after: Any, text: str) -> None:
    found = first_difference(jax.tree.structure(before), after)
    assert re.fullmatch(text, found), found


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.inner(x))


def train_step(state: Any, batch: Any) -> Any:
    model, optimizer = state
    grads = nnx.grad(lambda model: jnp.mean((model(batch) - 1.0) ** 2))(model)
    grads, statistics = jaxft.pmean((grads, nnx.state(model, nnx.BatchStat)))
    nnx.update(model, statistics)
    optimizer.update(model, grads)
    return (model, optimizer), {}


def evaluating(state: Any) -> Any:
    state[0].eval()
    return state


@pytest.mark.parametrize("where", ["between", "edit", "step"])
def test_a_module_that_is_left_in_evaluation_is_named_in_a_short_message(where: str) -> None:
    def step_of(state: Any, batch: Any) -> Any:
        state, metrics = train_step(state, batch)
        return (evaluating(state) if where == "step" else state), metrics

    expected = r"at \[0\]\.norm, a setting of a BatchNorm was False and is True"
    model = Net()
    state: Any = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step, batch = jaxft.fault_tolerant(step_of, None), np.ones((4, 3), np.float32)
    with pytest.raises((ConfigurationError, StepError), match=expected) as caught:  # noqa: PT012 - a whole loop
        state = step.join(state, batch)
        for number in step.steps(3):
            if where == "edit" and number == 1:
                state = step.edit(state, evaluating)
            state, _ = step(state, batch)
            if where == "between":
                evaluating(state)
    assert len(str(caught.value)) < 600
    assert where != "between" or "(`model.train()`)" in str(caught.value)
