"""A multilayer perceptron, its training state, and the shardings."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.mlp._data import FEATURES

WIDTH = 128  # of the hidden layers

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))


def make_mesh() -> Mesh:
    """Return a mesh over all devices, with the one axis `model`."""
    return jax.make_mesh((jax.device_count(),), ("model",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def init_state(mesh: Mesh, *, samples: int, seed: int) -> dict[str, Any]:
    """Return the state before the first step: the same bits in every group, however many devices it has.

    `seen` is a ledger: how often each sample has been in a committed step.
    """

    def create(key: jax.Array) -> dict[str, Any]:
        draw = jax.nn.initializers.glorot_normal()
        into, hidden, out = jax.random.split(key, 3)
        params = {
            "into": draw(into, (FEATURES, WIDTH)),
            "hidden": draw(hidden, (WIDTH, WIDTH)),
            "out": draw(out, (1, WIDTH))[0],
        }
        return {"params": params, "opt": OPTIMIZER.init(params), "seen": jnp.zeros(samples, jnp.int32)}

    key = jax.random.key(seed)
    shapes = jax.eval_shape(create, key)
    shardings = jax.tree.map(functools.partial(_sharding, mesh), shapes) | {"seen": replicated(mesh)}
    return jax.jit(create, out_shardings=shardings)(key)


def predict(params: dict[str, jax.Array], x: jax.Array, *, work: int) -> jax.Array:
    """Return predictions, (samples,), for features `x`, (samples, FEATURES). The hidden layer runs `work` times."""

    def layer(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ params["hidden"]) / work, None

    h, _ = jax.lax.scan(layer, jnp.tanh(x @ params["into"]), length=work)
    return h @ params["out"]


def _sharding(mesh: Mesh, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    """Spread the first dimension, the inputs of a layer, over the devices."""
    return NamedSharding(mesh, PartitionSpec("model") if leaf.ndim else PartitionSpec())
