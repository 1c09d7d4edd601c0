"""The models of the suite, small on CPU: the Llama of examples/llama3 with the shapes of 8B, and a transformer."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from examples.llama3._config import MODEL_SIZES, ModelConfig
from examples.llama3._optimizer import OptimizerConfig
from examples.llama3._sharding import make_mesh
from examples.llama3._state import init_state
from examples.llama3.train import make_train_step
from tests import step_models

TINY = ModelConfig(
    dim=64, layers=1, heads=4, kv_heads=2, ffn_dim=128, vocab_size=256, attention="plain", remat="none"
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=2, total_steps=100)
SEQUENCES = 2
# Parameters, gradients, means and two moments, in float32: the plain step and the cut one do not live together.
_BYTES_PER_PARAMETER = 4 * 5
# Of the memory that is free: the rest is for activations and XLA's temporaries.
_PART_OF_MEMORY = 0.5
# The contribution as it was copied and as it is summed, and the means.
_HOST_BYTES_PER_PARAMETER = 4 * 3


def on_accelerator() -> bool:
    return jax.default_backend() != "cpu"


def machine() -> str:
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), JAX {jax.__version__}"


def sized(small: int, large: int) -> int:
    """A size: small on CPU, where every run of the tests pays for it."""
    return large if on_accelerator() else small


def trained_in_groups() -> step_models.Model:
    """With a scan over layers, remat, noise, bf16, a scatter and momentum: quickly compiled."""
    return step_models.transformer(
        layers=sized(2, 8), width=sized(16, 512), vocabulary=sized(32, 16_384), length=sized(8, 256)
    )


def as_much_of_8b_as_fits() -> ModelConfig | None:
    """8B with as many layers as the memory holds, None if it holds not even one; tiny on CPU."""
    if not on_accelerator():
        return TINY
    whole = MODEL_SIZES["8B"]
    ends, layer = _parameters(whole, 0), _parameters(whole, 1) - _parameters(whole, 0)
    device_bytes = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 8 << 30)
    host_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = _PART_OF_MEMORY * min(device_bytes / _BYTES_PER_PARAMETER, host_bytes / _HOST_BYTES_PER_PARAMETER)
    layers = min(whole.layers, int((room - ends) / layer))
    return dataclasses.replace(whole, layers=layers) if layers > 0 else None


def _parameters(model: ModelConfig, layers: int) -> int:
    per_head = model.dim // model.heads
    attention = 2 * model.dim * model.dim + 2 * model.dim * model.kv_heads * per_head
    return layers * (attention + 3 * model.dim * model.ffn_dim) + 2 * model.dim * model.vocab_size


def llama_state(model: ModelConfig) -> Any:
    return init_state(model, OPTIMIZER, make_mesh(1, 1), seed=3)


def llama_step(model: ModelConfig, mean: Callable[[Any], Any]) -> Callable[[Any, Any], tuple[Any, Any]]:
    return make_train_step(model, OPTIMIZER, make_mesh(1, 1), mean=mean)


def llama_batch(model: ModelConfig, length: int, step: int, shard: int) -> dict[str, np.ndarray]:
    """Sequences of two documents each."""
    random = np.random.default_rng([step, shard])
    positions = np.concatenate([np.arange(length // 2), np.arange(length - length // 2)])
    segments = np.repeat([0, 1], [length // 2, length - length // 2])
    return {
        "tokens": random.integers(0, model.vocab_size, (SEQUENCES, length + 1), dtype=np.int32),
        "segment_ids": np.tile(segments, (SEQUENCES, 1)).astype(np.int32),
        "positions": np.tile(positions, (SEQUENCES, 1)).astype(np.int32),
    }
