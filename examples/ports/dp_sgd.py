"""DP-SGD: clip each sample's gradient, sum them, and add noise once. Steps: `python dp_sgd.py 60`."""

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
BATCH = 64  # samples of a step, over all shards
FEATURES = 16
CLIP = 1.0  # norm of one sample's gradient
NOISE = 1.1  # standard deviation of the sum's noise, in multiples of CLIP

optimizer = optax.sgd(0.5)


class State(NamedTuple):
    params: dict[str, jax.Array]
    opt_state: Any
    key: jax.Array


def batch_for(step: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points `x`, float32, (samples, FEATURES), and on which side of a plane they are."""
    random = np.random.default_rng([step, shard])
    x = random.standard_normal((BATCH // SHARDS, FEATURES), dtype=np.float32)
    return x, (x[:, 0] > 2 * x[:, 1]).astype(np.float32)


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of one sample."""
    logit = jnp.tanh(x @ params["hidden"]) @ params["out"]
    return optax.sigmoid_binary_cross_entropy(logit, y)


def train_step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
    x, y = batch
    losses, grads = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0, 0))(state.params, x, y)
    leaves, tree = jax.tree.flatten(grads)
    sums = jax.tree.leaves(optax.per_example_global_norm_clip(leaves, CLIP)[0])
    sums, loss = jaxft.psum((sums, jnp.sum(losses)))
    # After the sum all groups draw the same noise, so it is added once.
    key, *keys = jax.random.split(state.key, len(sums) + 1)
    noisy = [s + NOISE * CLIP * jax.random.normal(k, s.shape) for s, k in zip(sums, keys, strict=True)]
    means = jax.tree.unflatten(tree, [leaf / BATCH for leaf in noisy])
    updates, opt_state = optimizer.update(means, state.opt_state)
    return State(optax.apply_updates(state.params, updates), opt_state, key), {"loss": loss / BATCH}  # pyright: ignore


def train(steps: int, manager: jaxft.Manager | None) -> None:
    into, out = jax.random.split(jax.random.key(0))
    params = {
        "hidden": 0.3 * jax.random.normal(into, (FEATURES, 32)),
        "out": 0.3 * jax.random.normal(out, (32,)),
    }
    state = State(params, optimizer.init(params), jax.random.key(1))
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
