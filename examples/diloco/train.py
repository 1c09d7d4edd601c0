"""DiLoCo: each shard takes many steps of AdamW alone, then the groups average how far these went.

Rounds: `python train.py 60`. `jaxft launch` runs it in groups.
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


class State(NamedTuple):
    params: Any
    moments: Any


def batch_for(inner_step: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points, and the largest coordinate of each: float32, (BATCH, 4) and (BATCH, 1)."""
    random = np.random.default_rng([inner_step, shard])
    points = random.standard_normal((BATCH, WIDTHS[0]), np.float32)
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


def inner_step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
    points, wanted = batch
    loss, grads = jax.value_and_grad(lambda params: jnp.mean((apply(params, points) - wanted) ** 2))(
        state.params
    )
    updates, moments = inner.update(grads, state.moments, state.params)
    return State(optax.apply_updates(state.params, updates), moments), {"loss": loss}


def train(rounds: int, manager: jaxft.Manager | None) -> None:
    train_step = jaxft.diloco(
        inner_step,
        params=lambda state: state.params,
        outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
        every=INNER_STEPS,
        carry="average",
    )
    params = make(jax.random.key(0))
    state = train_step.init(State(params, inner.init(params)))
    step = jaxft.fault_tolerant(train_step, manager, shards=SHARDS)
    state = step.join(state, batch_for)
    for number in step.steps(rounds):
        state, metrics = step(state, batch_for)
        if number % 10 == 0 and (manager is None or manager.is_writer):
            print(f"round {number}  loss {metrics['loss']:.4f}")
    print(f"finished: digest {jaxft.digest(state)}")


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    with jaxft.Manager() if "JAXFT_COORDINATOR" in os.environ else contextlib.nullcontext() as manager:
        train(rounds, manager)
