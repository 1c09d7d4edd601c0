"""A transformer trained as T5X does it: rematerialised layers in a scan, Adafactor, and a loss over unpadded tokens.

Steps: `python t5x_like.py 60`.
"""

import contextlib
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import jaxft

SHARDS = 4
BATCH = 16  # sequences of a step, over all shards
LENGTH = 16
VOCABULARY = 32
WIDTH = 32
LAYERS = 3
PAD = 0


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        h = nn.RMSNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h, mask=mask)
        h = nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.RMSNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=False)(h), None


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH)
        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
            length=LAYERS,
        )
        x, _ = layers()(embed(tokens), nn.make_causal_mask(tokens))
        return embed.attend(nn.RMSNorm()(x))


class State(TrainState):
    key: jax.Array


def batch_for(step: int, shard: int) -> np.ndarray:
    """Return counting sequences of different lengths, padded: int32, (sequences, LENGTH + 1)."""
    random = np.random.default_rng([step, shard])
    begin, length = random.integers(1, VOCABULARY, (2, BATCH // SHARDS, 1))
    place = np.arange(LENGTH + 1)
    tokens = 1 + (begin + place) % (VOCABULARY - 1)
    return np.where(place < 4 + length % LENGTH, tokens, PAD).astype(np.int32)


def train_step(state: State, tokens: Any) -> tuple[State, dict[str, jax.Array]]:
    key, dropout = jax.random.split(state.key)
    dropout = jax.random.fold_in(dropout, jaxft.shard_index())
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    counts = (targets != PAD).astype(jnp.float32)

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, inputs, rngs={"dropout": dropout})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(losses * counts)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    loss, grads, count = jaxft.psum((loss, grads, jnp.sum(counts)))
    grads = jax.tree.map(lambda grad: grad / count, grads)
    return state.apply_gradients(grads=grads, key=key), {"loss": loss / count}


def train(steps: int, manager: jaxft.Manager | None) -> None:
    model = Decoder()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = model.init(keys, jnp.zeros((1, LENGTH), jnp.int32))["params"]
    state = State.create(apply_fn=model.apply, params=params, tx=optax.adafactor(3e-2), key=jax.random.key(2))
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
