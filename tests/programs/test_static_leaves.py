"""States that hold functions and settings, too: `arrays=` makes these part of the program."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxft
from jaxft._errors import ConfigurationError, StepError

pytestmark = pytest.mark.unoptimized

SHARDS = 2


class Model(eqx.Module):
    """Numbers, a text, a function and a numpy array as leaves, as modules of users have them."""

    layer: eqx.nn.Linear
    activation: Any
    repeats: int
    mode: str
    offsets: np.ndarray

    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.repeats):  # a Python loop: `repeats` must not be traced
            x = self.activation(self.layer(x)) + self.offsets
        return x if self.mode == "plain" else -x


def model(activation: Any = jax.nn.tanh, repeats: int = 2) -> Model:
    return Model(eqx.nn.Linear(3, 3, key=jax.random.key(0)), activation, repeats, "plain", np.ones(3, "f4"))


def batch_for(step: int, shard: int) -> np.ndarray:
    return np.random.default_rng([step, shard]).standard_normal((4, 3), np.float32)


OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


def loss_of(net: Model, batch: Any) -> jax.Array:
    return jnp.mean(jax.vmap(net)(batch) ** 2)


def train_step(state: Any, batch: Any) -> Any:
    net, opt_state = state
    loss, grads = jaxft.pmean(eqx.filter_value_and_grad(loss_of)(net, batch))
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return (eqx.apply_updates(net, updates), opt_state), loss


def first() -> Any:
    net = model()
    return net, OPTIMIZER.init(eqx.filter(net, eqx.is_array))


def test_a_whole_module_is_trained_as_its_arrays_are() -> None:
    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS, arrays=eqx.is_array)
    state = step.join(first(), batch_for)
    for _ in step.steps(5):
        state, loss = step(state, batch_for)
    net, _ = state
    assert (net.activation, net.repeats, net.mode) == (jax.nn.tanh, 2, "plain")
    assert net(jnp.ones(3)).shape == (3,)

    arrays, static = eqx.partition(first(), eqx.is_array)

    def of_arrays(state: Any, batch: Any) -> Any:
        new, loss = train_step(eqx.combine(state, static), batch)
        return eqx.filter(new, eqx.is_array), loss

    parted = jaxft.fault_tolerant(of_arrays, None, shards=SHARDS)
    for _ in range(5):
        arrays, expected = parted(arrays, batch_for)
    assert jaxft.digest(eqx.filter(state, eqx.is_array)) == jaxft.digest(arrays)
    assert loss == expected


def test_an_edit_is_given_the_whole_state() -> None:
    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS, arrays=eqx.is_array)
    state = step.join(first(), batch_for)

    def zeroed(state: Any) -> Any:
        net, opt_state = state
        assert net.activation is jax.nn.tanh
        return eqx.tree_at(lambda net: net.layer.bias, net, jnp.zeros(3)), opt_state

    for number in step.steps(2):
        if number == 1:
            state = step.edit(state, zeroed)
            assert not np.any(state[0].layer.bias)
            assert state[0].mode == "plain"
            with pytest.raises(
                ConfigurationError, match=r"leaf \[0\]\.repeats of the state is 3, but it was 2"
            ):
                step.edit(state, lambda state: (eqx.tree_at(lambda net: net.repeats, state[0], 3), state[1]))
        state, _ = step(state, batch_for)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (lambda: model(activation=jnp.sin), r"\.activation of the state is <.*sin.*, but it was <.*tanh"),
        (lambda: model(repeats=3), r"\.repeats of the state is 3, but it was 2"),
        (
            lambda: eqx.tree_at(lambda net: net.repeats, model(), jnp.array(2)),
            r"\.repeats .*is an array, but it was 2",
        ),
        (
            lambda: eqx.tree_at(lambda net: net.mode, model(), "minus"),
            r"\.mode .*is 'minus', but it was 'plain'",
        ),
    ],
)
def test_a_setting_that_changes_between_calls(changed: Callable[[], Model], text: str) -> None:
    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS, arrays=eqx.is_array)
    (_, opt_state), _ = step(first(), batch_for)
    with pytest.raises(ConfigurationError, match=rf"{text}.*Make another step with jaxft\.fault_tolerant"):
        step((changed(), opt_state), batch_for)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda net: eqx.tree_at(lambda net: net.repeats, net, net.repeats + 1), r"2, into 3\."),
        (
            lambda net: eqx.tree_at(lambda net: net.repeats, net, net.repeats + jnp.array(1)),
            "2, into an array",
        ),
    ],
)
def test_a_step_that_changes_a_setting(function: Any, text: str) -> None:
    def counting(state: Any, batch: Any) -> Any:
        (net, opt_state), loss = train_step(state, batch)
        return (function(net), opt_state), loss

    step = jaxft.fault_tolerant(counting, None, shards=SHARDS, arrays=eqx.is_array)
    with pytest.raises(StepError, match=rf"made the state's leaf \[0\]\.repeats, {text}.*jnp\.asarray"):
        step(first(), batch_for)


def test_a_step_of_another_structure_and_one_that_returns_no_pair() -> None:
    step = jaxft.fault_tolerant(lambda state, _batch: (state[0], {}), None, shards=1, arrays=eqx.is_array)
    with pytest.raises(StepError, match=r"state with a different structure.*missing: \[0\]"):
        step(first(), batch_for)
    step = jaxft.fault_tolerant(lambda state, _batch: state[0], None, shards=1, arrays=eqx.is_array)
    with pytest.raises(StepError, match=r"must return a pair"):
        step(first(), batch_for)


@pytest.mark.parametrize("arrays", [True, "arrays"])
def test_arrays_that_is_no_function(arrays: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"arrays is (True|'arrays')\. It is a function.*equinox\.is_array"
    ):
        jaxft.fault_tolerant(train_step, None, arrays=arrays)
