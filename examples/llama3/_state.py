"""The training state, and its initialisation, sharded over the mesh from the start."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from examples.llama3._config import ModelConfig
from examples.llama3._model import Llama
from examples.llama3._optimizer import OptimizerConfig, make_optimizer
from examples.llama3._sharding import state_shardings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes: one immutable pytree. `step` counts committed steps."""

    step: jax.Array
    params: Any
    opt_state: Any


def init_state(model: ModelConfig, optimizer: OptimizerConfig, mesh: Mesh, *, seed: int) -> TrainState:
    """Return the state before the first step: every device makes its own part, and every group the same bits."""

    def create(key: jax.Array) -> TrainState:
        params = nnx.to_pure_dict(nnx.state(Llama(model, rngs=nnx.Rngs(key))))
        return TrainState(
            step=jnp.zeros((), jnp.int32), params=params, opt_state=make_optimizer(optimizer).init(params)
        )

    key = jax.random.key(seed)
    shardings = state_shardings(jax.eval_shape(create, key), mesh)
    return jax.jit(create, out_shardings=shardings)(key)


def parameter_count(params: Any) -> int:
    """Return the number of elements in a tree of arrays or of their shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
