"""The shardings of all arrays, in one place: for parameters, optimizer state, batch and activations.

Two tables. `LOGICAL_AXES` maps each kind of dimension to the mesh axis that it is sharded over; `PARAMETER_AXES`
gives the kinds of dimensions of each parameter. The optimizer's moments have their parameter's name in their path, so
they need no entries.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

# From the slowest links to the fastest: neighbouring devices differ in `tp`.
MESH_AXES = ("pipeline", "fsdp", "context", "tp")

LOGICAL_AXES: Mapping[str, str | tuple[str, ...] | None] = {
    "batch": "fsdp",
    "layer": "pipeline",  # scanned over: each device holds its part of every layer of its stage
    "sequence": ("context", "tp"),  # between sublayers, where nothing else is sharded over `tp`
    "position": "context",  # within them
    "spread": ("context", "pipeline", "tp"),  # outside the layers, where stages divide the sequence
    "spread_position": ("context", "pipeline"),  # there, beside an axis over `tp`
    "dim": ("context", "fsdp"),
    "heads": "tp",
    "kv_heads": "tp",
    "head_dim": None,
    "ffn": "tp",
    "vocab": "tp",
}

PARAMETER_AXES: Mapping[str, tuple[str, ...]] = {
    "embedding": ("vocab", "dim"),
    "attention_norm": ("layer", "dim"),
    "query": ("layer", "dim", "heads", "head_dim"),
    "key": ("layer", "dim", "kv_heads", "head_dim"),
    "value": ("layer", "dim", "kv_heads", "head_dim"),
    "output": ("layer", "heads", "head_dim", "dim"),
    "ffn_norm": ("layer", "dim"),
    "gate": ("layer", "dim", "ffn"),
    "up": ("layer", "dim", "ffn"),
    "down": ("layer", "ffn", "dim"),
    "final_norm": ("dim",),
    "head": ("dim", "vocab"),
}


def make_mesh(fsdp: int, tp: int, *, pipeline: int = 1, context: int = 1) -> Mesh:
    """Return a mesh over this process's first pipeline * fsdp * context * tp devices."""
    shape = (pipeline, fsdp, context, tp)
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 4, devices=devices)


def partition_spec(*logical_axes: str | None, without: Collection[str] = ()) -> PartitionSpec:
    """Return the mesh axes of an array whose dimensions are of these kinds; None is not sharded.

    Args:
        without: mesh axes to leave out, since the array is already one device's part of them.
    """

    def mesh_axes(logical_axis: str | None) -> str | tuple[str, ...] | None:
        axes = None if logical_axis is None else LOGICAL_AXES[logical_axis]
        if axes is None or isinstance(axes, str):
            return None if axes in without else axes
        return tuple(axis for axis in axes if axis not in without) or None

    return PartitionSpec(*map(mesh_axes, logical_axes))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch of token ids, (sequence, position)."""
    return NamedSharding(mesh, partition_spec("batch", None))


def placed(host: Any, sharding: NamedSharding) -> Any:
    """Return arrays of host memory as arrays with this sharding, of which each process places its own part."""
    return jax.tree.map(
        lambda leaf: jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index]), host
    )


def state_shardings(abstract_state: Any, mesh: Mesh) -> Any:
    """Return the sharding of every leaf of a train state: parameters, their moments, and scalars.

    Raises:
        KeyError: an array belongs to no parameter in `PARAMETER_AXES`, and would silently be replicated.
    """

    # jaxft divides a scan over layers (`--overlap`) unless these are sharded, be it over a single stage.
    without = ("pipeline",) if mesh.shape["pipeline"] == 1 else ()

    def sharding_of(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        if not leaf.shape:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, partition_spec(*PARAMETER_AXES[parameter_name(path)], without=without))

    return jax.tree_util.tree_map_with_path(sharding_of, abstract_state)


def parameter_name(path: tuple[Any, ...]) -> str:
    """Return the last name in a tree path, which is the parameter's own."""
    return str(path[-1].key) if isinstance(path[-1], jax.tree_util.DictKey) else str(path[-1])


@dataclass(frozen=True, slots=True)
class ActivationSharding:
    """Constrains the sharding of an activation, inside jit. Does nothing without a mesh.

    The mesh is abstract: the program names axes and not devices, so it can be compiled for other devices.
    """

    mesh: AbstractMesh | None = None

    def __call__(self, x: jax.Array, *logical_axes: str | None) -> jax.Array:
        if self.mesh is None:
            return x
        here = jax.sharding.get_abstract_mesh()  # within a shard_map, its axes are manual
        mesh = self.mesh if here.empty else here
        spec = partition_spec(*logical_axes, without=mesh.manual_axes)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def parameters(self, tree: Any) -> Any:
        """Constrain parameters, stacked over layers or not, and with them their gradients."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self(leaf, *PARAMETER_AXES[parameter_name(path)]), tree
        )

    def size(self, axis: str) -> int:
        """Return the number of devices along an axis of the mesh; 1 without a mesh."""
        return 1 if self.mesh is None else self.mesh.shape[axis]


NO_MESH = ActivationSharding()
