"""The training state, and its initialisation, sharded over the mesh from the start."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from examples.llama3._config import ModelConfig, SettingsError
from examples.llama3._model import Llama
from examples.llama3._optimizer import OptimizerConfig, make_optimizer
from examples.llama3._sharding import state_shardings
from examples.llama3._weights import load_weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes: one immutable pytree. `step` counts committed steps."""

    step: jax.Array
    params: Any
    opt_state: Any


def init_state(
    model: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh, *, seed: int, weights: Path | None = None
) -> TrainState:
    """Return the state before the first step: every device makes its own part, and every group the same bits.

    Args:
        seed: of random weights.
        weights: a folder with weights to start from instead, for which see `load_weights`.

    Raises:
        SettingsError: the weights cannot be read, or are of another model; or the state does not fit into the memory
            of the mesh.
    """

    def create(key: jax.Array) -> TrainState:
        return start(nnx.to_pure_dict(nnx.state(Llama(model, rngs=nnx.Rngs(key)))))

    def start(params: Any) -> TrainState:
        return TrainState(
            step=jnp.zeros((), jnp.int32), params=params, opt_state=make_optimizer(optimizer).init(params)
        )

    key = jax.random.key(seed)
    abstract = jax.eval_shape(create, key)
    check_memory(mesh, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)))
    shardings = state_shardings(abstract, mesh)
    if weights is None:
        return jax.jit(create, out_shardings=shardings)(key)
    params = load_weights(weights, model, abstract.params, shardings.params)
    return jax.jit(start, out_shardings=shardings, donate_argnums=0)(params)


def parameter_count(params: Any) -> int:
    """Return the number of elements in a tree of arrays or of their shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def check_memory(mesh: Mesh, state_bytes: int) -> None:
    """Check that each device holds its part of the state, where the device reports its memory."""
    memory = mesh.local_devices[0].memory_stats() or {}
    limit, part = memory.get("bytes_limit"), state_bytes / mesh.size
    if limit is not None and part > limit:
        raise SettingsError(
            f"The state takes {state_bytes / 1e9:,.0f} GB, {part / 1e9:,.0f} GB on each of {mesh.size} devices, but "
            f"one has {limit / 1e9:,.0f} GB. It needs {math.ceil(state_bytes / limit)} such devices, and more for "
            "activations: choose a smaller --size or a larger mesh."
        )
