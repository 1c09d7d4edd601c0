"""jax_debug_nans and jax_debug_infs end a step with JAX's own kind of error, and nothing is lost."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft

GOOD, ZERO = np.array([4, 6, 8], np.float32), np.zeros(3, np.float32)


@pytest.fixture
def by_option() -> Iterator[None]:
    """For the whole process, as JAX_DEBUG_NANS does it."""
    jax.config.update("jax_debug_nans", True)
    yield
    jax.config.update("jax_debug_nans", False)


def train_step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, grads = jax.value_and_grad(lambda w: jnp.sum(jnp.sqrt(batch) / batch * w))(state)
    return state - 0.1 * jaxft.pmean(grads), jaxft.pmean(value)


@pytest.mark.usefixtures("by_option")
def test_the_option_of_a_process_finds_one_in_every_call() -> None:
    """What JAX itself does within a call ends its look at later results."""
    step = jaxft.fault_tolerant(train_step, None)
    state: Any = jnp.ones(3)
    for at in range(2):
        state, _ = step(state, GOOD)
        before = jaxft.digest(state)
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="`compute` makes a NaN, and jax_debug_nans"):
                step(state, -GOOD)
        assert (step.step, jaxft.digest(state)) == (at + 1, before)
    with pytest.raises(FloatingPointError):
        jax.jit(jnp.log)(-GOOD)


def test_each_setting_finds_its_kind_and_the_update_has_a_name() -> None:
    def plain_step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        return 1.0 / (state - jaxft.pmean(batch)), jaxft.pmean(jnp.sum(1.0 / batch))

    step = jaxft.fault_tolerant(plain_step, None)
    with jax.debug_nans(False), jax.debug_infs(True):
        state, _ = step(jnp.full(3, 2.0), GOOD)
        with pytest.raises(FloatingPointError, match="`compute` makes an infinity"):
            step(state, ZERO)
        with pytest.raises(FloatingPointError, match="`apply` makes an infinity"):
            step(state, np.asarray(state))
