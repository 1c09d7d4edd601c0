"""DiLoCo: each shard takes many steps of AdamW alone, then the groups average how far these went.

Rounds: `python diloco.py 60`.
"""

import contextlib
import os
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxft

SHARDS = 4
INNER_STEPS = 20
BATCH = 16  # samples of an inner step, of each shard
WIDTHS = (4, 64, 64, 1)

inner = optax.adamw(3e-3)
outer = optax.sgd(0.7, momentum=0.9, nesterov=True)


class State(NamedTuple):
    params: Any
    inner: Any
    outer: Any


def batch_for(step: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points, and the largest coordinate of each: float32, (INNER_STEPS, BATCH, 4) and (..., 1)."""
    random = np.random.default_rng([step, shard])
    points = random.standard_normal((INNER_STEPS, BATCH, WIDTHS[0]), np.float32)
    return points, points.max(axis=-1, keepdims=True)


def make(key: jax.Array) -> Any:
    keys = jax.random.split(key, len(WIDTHS) - 1)
    shapes = zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    return [jax.random.normal(k, (n, m)) * (2 / n) ** 0.5 for k, n, m in shapes]


def apply(params: Any, x: jax.Array) -> jax.Array:
    *hidden, last = params
    for weights in hidden:
        x = jax.nn.relu(x @ weights)
    return x @ last


def inner_step(now: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], jax.Array]:
    params, state = now
    points, wanted = batch
    loss, grads = jax.value_and_grad(lambda params: jnp.mean((apply(params, points) - wanted) ** 2))(params)
    updates, state = inner.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), loss


def train_step(state: State, batches: Any) -> tuple[State, dict[str, jax.Array]]:
    (params, moments), losses = jax.lax.scan(inner_step, (state.params, state.inner), batches)
    went = jax.tree.map(jnp.subtract, state.params, params)
    loss, went, moments = jaxft.pmean((jnp.mean(losses), went, moments))
    updates, outer_state = outer.update(went, state.outer)
    return State(optax.apply_updates(state.params, updates), moments, outer_state), {"loss": loss}


def train(steps: int, manager: jaxft.Manager | None) -> None:
    params = make(jax.random.key(0))
    state = State(params, inner.init(params), outer.init(params))
    step = jaxft.fault_tolerant(train_step, manager, shards=SHARDS)
    state = step.join(state, batch_for)
    for number in step.steps(steps):
        state, metrics = step(state, batch_for)
        if number % 10 == 0 and (manager is None or manager.is_writer):
            print(f"step {number}  loss {metrics['loss']:.4f}")
    print(f"finished: digest {jaxft.digest(state)}")


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    with jaxft.Manager() if "JAXFT_COORDINATOR" in os.environ else contextlib.nullcontext() as manager:
        train(steps, manager)
