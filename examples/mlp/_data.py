"""A synthetic data set, and the ledger: which samples a training run has used, and how often."""

import numpy as np

from jaxft.data import Batches

FEATURES = 16


def make_samples(count: int, *, seed: int) -> list[dict[str, np.ndarray]]:
    """Return samples of a function that no linear model can learn: `x`, (FEATURES,), and `y`, (), in float32."""
    x = np.random.default_rng(seed).standard_normal((count, FEATURES), dtype=np.float32)
    y = x[:, 0] * np.abs(x[:, 1]) - x[:, 2]  # odd, f(-x) = -f(x), as is a network of tanh without biases
    return [{"x": x[i], "y": y[i]} for i in range(count)]


def expected_ledger(batches: Batches, steps: int) -> np.ndarray:
    """Return how often each sample must have been used after `steps` committed steps: int32, (samples,)."""
    seen = np.full(batches.size, batches.epoch_of(steps), np.int32)
    for step in range(steps - steps % batches.steps_per_epoch, steps):
        for shard in range(batches.shards):
            index = batches(step, shard).index
            seen[index[index >= 0]] += 1
    return seen


def ledger_text(seen: np.ndarray, expected: np.ndarray) -> str:
    """Describe how a run's ledger compares with the expected one."""
    wrong = np.flatnonzero(seen != expected)
    if wrong.size:
        first = wrong[0]
        return f"{wrong.size} samples wrong; sample {first} used {seen[first]} times instead of {expected[first]}"
    least, most = int(seen.min()), int(seen.max())
    return f"every sample {least} times" if least == most else f"every sample {least} or {most} times"
