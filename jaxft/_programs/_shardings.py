"""The shardings that a step's programs are compiled for, so that no sharding drifts from step to step."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxft._arrays._lanes import device_order
from jaxft._programs._partition import Contribution
from jaxft._programs._primitive import Path
from jaxft._programs._scans import divides_rows


def specs(
    state: Sequence[Any], batch: Sequence[Any], others: Sequence[Any] = ()
) -> tuple[list[jax.ShapeDtypeStruct], ...]:
    """The types to compile for, with shardings, of the leaves of the state and of the batch.

    A leaf that was placed explicitly (a committed array) keeps its sharding. If any of them spans a mesh, the
    other leaves of the state are replicated over that mesh: plain jit leaves them there after one step, and they
    must be there before it, so that the second step runs the same programs.

    Args:
        state: the leaves of the state.
        batch: the leaves of the batch.
        others: the closed-over arrays.
    """
    mesh = _mesh([*state, *batch, *others])
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return [_spec(leaf, replicated) for leaf in state], [_spec(leaf, None) for leaf in batch]


def apart(labels: Sequence[str], leaves: Sequence[Any]) -> str:
    """Say which two leaves were placed on other devices than each other; "" if all lie on the same, in one order."""
    found = [
        (label, device_order(sharding))
        for label, leaf in zip(labels, leaves, strict=True)
        if (sharding := placed(leaf)) is not None
    ]
    first, most = max(found, key=lambda pair: len(pair[1]), default=("", ()))
    other = next((pair for pair in found if set(pair[1]) != set(most)), None)
    if other is not None:
        return (
            f"A step takes a state and a batch on the same devices, but {_differs(other, (first, most))}. Place both "
            "on the same, such as by `jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))` for a leaf that is "
            "not divided; or leave a leaf unplaced, as numpy arrays and results of jax.numpy are: it is brought to "
            "where the others lie."
        )
    other = next((pair for pair in found if pair[1] != most), None)
    if other is None:
        return ""
    return (
        f"A step takes a state and a batch on the same devices in one order, but {_differs(other, (first, most))}. "
        "Place both on one mesh, or on meshes of the same devices in the same order: `jax.make_mesh` chooses its "
        "own order, and `Mesh(mesh.devices.reshape(shape), names)` keeps the order of another mesh."
    )


def _differs(one: tuple[str, Sequence[int]], other: tuple[str, Sequence[int]]) -> str:
    return f"{one[0]} lies on {_numbers(one[1])}, and {other[0]} on {_numbers(other[1])}"


def _numbers(devices: Sequence[int]) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"


def _spec(leaf: Any, otherwise: Sharding | None) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    sharding = placed(leaf) or otherwise
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def placed(leaf: Any) -> Sharding | None:
    """The sharding of a committed array; None for any other and for numpy arrays."""
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None


def _mesh(leaves: Sequence[Any]) -> Mesh | None:
    for leaf in leaves:
        sharding = placed(leaf)
        if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
            mesh = sharding.mesh
            assert isinstance(mesh, Mesh)
            return mesh
    return None


def pins(
    contributions: Sequence[Contribution],
    state: Sequence[jax.ShapeDtypeStruct],
    state_paths: Sequence[Path],
) -> list[Sharding | None]:
    """The sharding for each contribution: its parameter's, if it is a gradient.

    On a mesh with automatic axes nothing else ties the gradients that leave a program to the shardings of their
    parameters, and XLA often gathers them (measured: four times the memory and traffic). The parameter is the
    leaf of the state of equal shape whose path has the longest suffix in common with the contribution's. If no
    name matches, a sharding is chosen only if all leaves of that shape share it. Some rows of a gradient have the
    sharding of the whole. A gradient on the devices stays there, also if a leaf in host memory has its name: the
    moments of an offloaded optimizer do.
    """
    pin_of = Pins(state, state_paths)
    found = [pin_of(made.path, made.rows.shape if made.rows else made.aval.shape) for made in contributions]
    return [
        pin if made.aval.memory_space is jax.memory.Space.Host else _on_devices(pin)
        for pin, made in zip(found, contributions, strict=True)
    ]


def _on_devices(sharding: Sharding | None) -> Sharding | None:
    if sharding is None or "host" not in (sharding.memory_kind or ""):
        return sharding
    return sharding.with_memory_kind("device")


class Pins:
    """The sharding of the parameter that a contribution with some path and shape is the gradient of."""

    def __init__(self, state: Sequence[jax.ShapeDtypeStruct], state_paths: Sequence[Path]) -> None:
        # The sharding of all leaves of a shape, and of the first leaf of a shape whose path ends so. A state may have
        # thousands of leaves, so they are looked up.
        self._of_all: dict[tuple[int, ...], Sharding | None] = {}
        self._by_end: dict[tuple[tuple[int, ...], Path], Sharding | None] = {}
        for spec, path in zip(state, state_paths, strict=True):
            shape = tuple(spec.shape)
            if self._of_all.setdefault(shape, spec.sharding) != spec.sharding:
                self._of_all[shape] = None
            for start in range(len(path)):
                self._by_end.setdefault((shape, path[start:]), spec.sharding)

    def __call__(self, path: Path, shape: Sequence[int]) -> Sharding | None:
        shape = tuple(shape)
        for start in range(len(path)):
            if (shape, path[start:]) in self._by_end:
                return self._by_end[shape, path[start:]]
        return self._of_all.get(shape)

    def is_whole(self, path: Path, shape: Sequence[int]) -> bool:
        """Whether no device holds only some rows of such a contribution, on a mesh of any size."""
        return not divides_rows(self(path, shape), shape)
