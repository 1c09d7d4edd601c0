"""A program whose step takes a known time: each shard of the batch waits. Arguments: steps, folder, seconds."""

import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxft

SHARDS = 6


def train_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1.0) ** 2))(weights)
    grads, loss = jaxft.pmean((grads, loss))
    return weights - 0.05 * grads, {"loss": loss}


def main(steps: int, folder: Path, shard_s: float) -> None:
    def batch_for(step: int, shard: int) -> np.ndarray:
        if "undisturbed" not in folder.name:  # one group would take three times as long
            time.sleep(shard_s)
        return np.random.default_rng([step, shard]).standard_normal((8, 3), np.float32)

    weights = jnp.zeros(3)
    with jaxft.Manager(events=folder / f"{os.environ['JAXFT_GROUP']}.jsonl") as manager:
        step = jaxft.fault_tolerant(train_step, manager, shards=SHARDS)
        while manager.step < steps:
            weights, _ = step(weights, batch_for)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
