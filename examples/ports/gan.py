"""A GAN whose generator learns from the discriminator of the same step. Steps: `python gan.py 60`."""

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
LATENT = 4

optimizer = optax.adam(2e-3, b1=0.5)


class Player(NamedTuple):
    params: Any
    opt_state: Any


class State(NamedTuple):
    generator: Player
    discriminator: Player
    key: jax.Array


def batch_for(step: int, shard: int) -> np.ndarray:
    """Return points on a circle: float32, (samples, 2)."""
    angle = np.random.default_rng([step, shard]).uniform(0, 2 * np.pi, BATCH // SHARDS)
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


def make(key: jax.Array, *widths: int) -> Player:
    keys = jax.random.split(key, len(widths) - 1)
    shapes = zip(keys, widths[:-1], widths[1:], strict=True)
    params = [jax.random.normal(k, (n, m)) * (2 / n) ** 0.5 for k, n, m in shapes]
    return Player(params, optimizer.init(params))


def apply(params: Any, x: jax.Array) -> jax.Array:
    *hidden, last = params
    for weights in hidden:
        x = jax.nn.leaky_relu(x @ weights)
    return x @ last


def updated(player: Player, grads: Any) -> Player:
    updates, opt_state = optimizer.update(grads, player.opt_state)
    return Player(optax.apply_updates(player.params, updates), opt_state)


def train_step(state: State, real: Any) -> tuple[State, dict[str, jax.Array]]:
    key, use = jax.random.split(state.key)
    use = jax.random.fold_in(use, jaxft.shard_index())
    noise = jax.random.normal(use, (2, len(real), LATENT))

    def discriminator_loss(params: Any) -> jax.Array:
        fake = apply(params, apply(state.generator.params, noise[0]))
        return jnp.mean(jax.nn.softplus(-apply(params, real)) + jax.nn.softplus(fake))

    loss, grads = jax.value_and_grad(discriminator_loss)(state.discriminator.params)
    loss, grads = jaxft.pmean((loss, grads))
    discriminator = updated(state.discriminator, grads)

    def generator_loss(params: Any) -> jax.Array:
        return jnp.mean(jax.nn.softplus(-apply(discriminator.params, apply(params, noise[1]))))

    generator_grads = jax.grad(generator_loss)(state.generator.params)
    generator_grads = jaxft.pmean(generator_grads)
    generator = updated(state.generator, generator_grads)
    return State(generator, discriminator, key), {"loss": loss}


def train(steps: int, manager: jaxft.Manager | None) -> None:
    first, second, key = jax.random.split(jax.random.key(0), 3)
    state = State(make(first, LATENT, 32, 2), make(second, 2, 32, 1), key)
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
