"""A flax NNX classifier with BatchNorm, whose modules are updated in place. Steps: `python flax_nnx.py 60`."""

import contextlib
import os
import sys
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxft

SHARDS = 4
BATCH = 32  # samples of a step, over all shards
CLASSES = 4

State = tuple["Classifier", nnx.Optimizer[Any]]


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.out = nnx.Linear(8 * 4 * 4, CLASSES, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(image)))
        return self.out(x.reshape(x.shape[0], -1))


def batch_for(step: int, shard: int) -> dict[str, np.ndarray]:
    """Return noisy 8 by 8 images with one bright row, and the row's number."""
    random = np.random.default_rng([step, shard])
    label = random.integers(CLASSES, size=BATCH // SHARDS)
    image = random.standard_normal((len(label), 8, 8, 1), dtype=np.float32)
    image[np.arange(len(label)), 2 * label] += 2
    return {"image": image, "label": label.astype(np.int32)}


def loss_fn(model: Classifier, batch: Any) -> jax.Array:
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def train_step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
    model, optimizer = state
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    loss, grads, stats = jaxft.pmean((loss, grads, nnx.state(model, nnx.BatchStat)))
    nnx.update(model, stats)
    optimizer.update(model, grads)
    return (model, optimizer), {"loss": loss}


def train(steps: int, manager: jaxft.Manager | None) -> None:
    model = Classifier(nnx.Rngs(0))
    state = model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
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
