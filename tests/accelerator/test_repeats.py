"""The same program on the same values gives the same bits, under the flags of this run."""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxft._programs._environment import environment, nondeterminism, xla_flags
from tests.accelerator import models


def test_the_flags_of_this_run_leave_no_warning() -> None:
    assert nondeterminism(jax.devices()[0].platform, xla_flags(os.environ.get("XLA_FLAGS", ""))) is None


def test_the_environment_of_this_machine_can_be_compared() -> None:
    found = environment(jax.devices())
    assert found["devices"] == f"{len(jax.devices())} x {jax.devices()[0].device_kind}"
    assert models.on_accelerator() == ("platform version" in found)


def test_kernels_that_add_in_any_order_by_default() -> None:
    """Scatter onto few rows, reductions, products in bf16 and a softmax, ten times; once compiled again."""
    rows, width = models.sized(2_000, 200_000), models.sized(32, 512)
    random = np.random.default_rng(0)
    values = random.standard_normal((rows, width), np.float32)
    where = random.integers(0, 7, rows, np.int32)

    def loss(table: jax.Array, values: jax.Array) -> jax.Array:
        taken = table[where].astype(jnp.bfloat16) @ values[:width].astype(jnp.bfloat16)
        return jnp.sum(jax.nn.softmax(taken.astype(jnp.float32)) * values)

    def run(gradient: Callable[..., jax.Array]) -> set[bytes]:
        table = jnp.linspace(-1.0, 1.0, 7 * width, dtype=jnp.float32).reshape(7, width)
        return {np.asarray(gradient(table, jnp.asarray(values))).tobytes() for _ in range(10)}

    first = run(jax.jit(jax.grad(loss)))
    jax.clear_caches()
    assert len(first) == 1
    assert run(jax.jit(jax.grad(loss))) == first
