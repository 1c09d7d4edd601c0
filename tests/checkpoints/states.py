"""States as users have them, and when two are the same."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxft
from jaxft._checkpoints import Checkpoints, Restored
from tests import patience

PATIENCE_S = patience.FAR_S


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    params: Any
    optimizer: Any
    step: Any


class Pair(NamedTuple):
    mean: Any
    rest: Any


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def of_optax(seed: int = 0) -> TrainState:
    params = {
        "w": jax.random.normal(jax.random.key(seed), (64, 32), jnp.bfloat16),
        "b": {"c": jnp.full((3,), seed, jnp.float32)},
    }
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params)
    return TrainState(params, optimizer, jnp.int32(seed))


def of_nnx(seed: int = 0) -> Any:
    model = Net(nnx.Rngs(seed))
    return nnx.split((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))[1]


def of_equinox(seed: int = 0) -> Any:
    return eqx.filter(eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(seed)), eqx.is_array)


def of_everything(seed: int = 0) -> dict[Any, Any]:
    return {
        "keys": Pair(jax.random.split(jax.random.key(seed), 3), [jax.random.key(seed, impl="rbg")]),
        "scalar": jnp.float32(seed),
        "weak": jnp.asarray(0.5),
        "weak vector": jnp.full(3, 1.0),
        "none": None,
        "empty": (jnp.zeros((0, 2)), {}, []),
        "a/b": {1: jnp.ones(2, jnp.int4), 2: jnp.ones(2, jnp.float8_e4m3fn), 3: jnp.ones(2, jnp.uint4)},
        "bits": jnp.array([True, False]),
        "nan": jnp.array([jnp.nan, -0.0]),
    }


def saved(folder: Path, *steps: int, **options: Any) -> Checkpoints:
    """Checkpoints of `of_optax(step)` at some steps."""
    checkpoints = Checkpoints(folder, **options)
    for step in steps:
        save(checkpoints, step)
    return checkpoints


def restored(checkpoints: Checkpoints, like: Any = None, **options: Any) -> Restored:
    """Restore a state like `of_optax()`, of the job "docs"."""
    found = checkpoints.restore(of_optax() if like is None else like, **{"job": "docs", **options})
    assert found is not None
    return found


def save(checkpoints: Checkpoints, step: int, state: Any = None, *, history: int = 7, **options: Any) -> None:
    """Save `of_optax(step)`, or another state, of the job "docs"; return once it is complete."""
    state = of_optax(step) if state is None else state
    checkpoints.save(step, state, **{"job": "docs", "history": history, **options})
    checkpoints.finish(PATIENCE_S)


def names(folder: Path) -> set[str]:
    """The entries of a folder, without the file that names its job."""
    return {entry.name for entry in folder.iterdir()} - {".job"}


def same(one: Any, other: Any) -> bool:
    """Equal in structure, types (also weak ones) and bits."""
    return (
        jax.tree.structure(one) == jax.tree.structure(other)
        and jax.tree.map(jax.typeof, one) == jax.tree.map(jax.typeof, other)
        and jaxft.digest(one) == jaxft.digest(other)
    )
