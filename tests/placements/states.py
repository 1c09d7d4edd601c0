"""States that lie wherever `jax.jit` takes arrays, and a step that changes every leaf and leaves it where it is."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxft

P = PartitionSpec
DEVICES = 4

# What arithmetic on a dtype goes through: the small ones are for storage only.
_WIDE = {"int4": "int32", "uint4": "int32", "int2": "int32", "bool": "int32"}


def memory_kinds() -> list[str]:
    """The memories that jit takes; of `unpinned_host` donating an array ends the process, also under plain jit."""
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    return [kind for kind in kinds if kind != "unpinned_host"]


def values(seed: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = np.random.default_rng(seed).integers(-2, 2, shape)
    return np.asarray(noise, np.dtype(dtype))


def keys(*shape: int) -> jax.Array:
    """Keys of JAX, made of plain numbers: each operation on keys takes long to lower, in each process."""
    data = np.arange(2 * math.prod(shape), dtype=np.uint32).reshape(*shape, 2)
    return jax.random.wrap_key_data(jax.device_put(data))


def on_one_device() -> dict[str, Any]:
    """Leaves of one device: committed or not, in each memory, of dtypes that are packed, empty or without shape."""
    device = jax.devices()[0]
    state: dict[str, Any] = {
        f"in {kind}": jax.device_put(
            values(1, "float32", (8, 3)), SingleDeviceSharding(device, memory_kind=kind)
        )
        for kind in memory_kinds()
    }
    for dtype in ("int4", "uint4", "float8_e4m3fn", "float8_e5m2", "bfloat16", "bool"):
        state[dtype] = jnp.asarray(values(2, dtype, (5,)))
    return state | {
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.float32(1),
        "weak": jnp.asarray(0.5),
        "key": keys(),
        "keys in host memory": jax.device_put(
            keys(4), SingleDeviceSharding(device, memory_kind="pinned_host")
        ),
        "numpy": values(3, "float32", (4,)),
        "number": 2.0,
    }


def on_meshes() -> dict[str, Any]:
    """Leaves spread over meshes of the same devices, in each memory, and leaves that were not placed at all."""
    devices = np.array(jax.devices()[:DEVICES])
    line = Mesh(devices, ("x",))
    square = Mesh(devices.reshape(2, 2), ("a", "b"))

    def put(mesh: Mesh, spec: PartitionSpec, dtype: str = "float32", kind: str | None = None) -> jax.Array:
        return jax.device_put(values(4, dtype, (8, 4)), NamedSharding(mesh, spec, memory_kind=kind))

    state: dict[str, Any] = {}
    for kind in memory_kinds():
        state[f"spread in {kind}"] = put(line, P("x"), kind=kind)
        state[f"replicated in {kind}"] = put(line, P(), kind=kind)
        state[f"in part in {kind}"] = put(square, P(None, "b"), kind=kind)
    for dtype in ("int4", "float8_e4m3fn", "bfloat16", "bool"):
        state[f"spread {dtype}"] = put(line, P("x"), dtype)
    return state | {
        "two axes": put(square, P(("b", "a"))),
        "empty": jax.device_put(jnp.zeros((0, 4)), NamedSharding(line, P(None, "x"))),
        "scalar": jax.device_put(jnp.float32(1), NamedSharding(line, P())),
        "keys": jax.device_put(keys(4), NamedSharding(line, P("x"))),
        "not placed": jnp.ones(3),
        "key, not placed": keys(),
        "number": 1.5,
    }


def on_explicit_axes() -> dict[str, Any]:
    """Leaves whose sharding is part of their type."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    return {
        f"{spec} in {kind}": jax.device_put(
            values(4, "float32", (8, 4)), NamedSharding(mesh, spec, memory_kind=kind)
        )
        for kind in memory_kinds()
        for spec in (P("a", "b"), P("b", None), P(None, None))
    } | {"not placed": jnp.ones(3)}


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "one device": on_one_device,
    "meshes": on_meshes,
    "explicit axes": on_explicit_axes,
}


def train_step_for(state: dict[str, Any]) -> Callable[[Any, jax.Array], tuple[Any, Any]]:
    """A step that moves each leaf of such a state by the mean of the batch, where it lies."""
    offloaded = {name for name, leaf in state.items() if _is_offloaded(leaf)}

    def train_step(state: Any, batch: jax.Array) -> tuple[Any, Any]:
        mean = jaxft.pmean(jnp.sum(batch))
        return {name: _moved(leaf, mean, host=name in offloaded) for name, leaf in state.items()}, {
            "mean": mean
        }

    return train_step


def batch_for(step: int, shard: int) -> np.ndarray:
    return np.random.default_rng([step, shard]).standard_normal(4, dtype=np.float32)


def _moved(leaf: Any, mean: jax.Array, *, host: bool) -> Any:
    near = jax.device_put(leaf, jax.memory.Space.Device) if host else leaf
    if jnp.issubdtype(near.dtype, jax.dtypes.prng_key):
        moved = jax.random.wrap_key_data(jax.random.key_data(near) + 1)
    elif near.dtype in (jnp.float32,):
        moved = near + mean.astype(near.dtype)
    else:
        wide = near.astype(_WIDE.get(near.dtype.name, "float32"))
        moved = (1 - wide).astype(near.dtype)
    return jax.device_put(moved, jax.memory.Space.Host) if host else moved


def _is_offloaded(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.sharding.memory_kind == "pinned_host"
