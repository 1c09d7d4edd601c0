"""A training program as a user of jaxft writes it: it takes its job from the environment.

The first argument is the number of steps; the second a variant: "random" draws its first state without a seed,
"checkpoints FOLDER" saves there, "members" does not fix the shards, "crash" fails at once. In a group of several
processes, its arrays are replicated.
"""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxft


def train_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1.0) ** 2))(weights)
    grads, loss = jaxft.pmean((grads, loss))
    return weights - 0.05 * grads, {"loss": loss}


def batch_for(step: int, shard: int) -> np.ndarray:
    return np.random.default_rng([step, shard]).standard_normal((8, 3), np.float32)


def spread(array: jax.Array | np.ndarray) -> jax.Array:
    """The array in every process of the group."""
    mesh = jax.make_mesh((jax.device_count(),), ("all",), devices=jax.devices())
    host = np.asarray(array)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.make_array_from_callback(host.shape, everywhere, lambda index: host[index])


def main(steps: int, oddity: str = "", *words: str) -> None:
    if oddity == "crash":
        sys.exit("this program fails on purpose")
    nproc, batches = int(os.environ.get("JAXFT_NPROC", "1")), batch_for
    if nproc > 1:
        jax.config.update("jax_num_cpu_devices", 1)
        jax.distributed.initialize(num_processes=nproc, process_id=int(os.environ["JAXFT_RANK"]))
        batches = lambda step, shard: spread(batch_for(step, shard))  # noqa: E731
    weights = jnp.zeros(3)
    if oddity == "random":
        weights = jnp.asarray(np.random.default_rng().standard_normal(3, np.float32))
    if nproc > 1:
        weights = spread(weights)
    checkpoints = jaxft.Checkpoints(words[0], every_steps=5) if oddity == "checkpoints" else None
    with jaxft.Manager(checkpoints=checkpoints) as manager:
        if checkpoints is not None:
            weights = manager.restore(weights)
        step = jaxft.fault_tolerant(train_step, manager, shards=None if oddity == "members" else 4)
        while manager.step < steps:
            weights, _ = step(weights, batches)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
