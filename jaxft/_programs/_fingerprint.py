"""Fingerprints of what must agree between groups: two processes that run the same step produce the same text.

A jaxpr is written in a canonical form and hashed: variables by the order of their definition, constants by
their bytes, functions by their names. Nothing depends on memory addresses, on hash randomisation, or on the
location of the source. Left out on purpose: source lines and the bodies of Python callbacks.
"""

import dataclasses
import enum
import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxft_protocol.names import ANY_MESHES, MESHES

from jaxft._programs import _compat
from jaxft._programs._closed_over import is_large
from jaxft._programs._compat import AnyJaxpr, Atom, Var
from jaxft._programs._leaves import Part

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|id=\d+")
# How many leaves the summary of a state lists: enough to see at a glance what differs.
_SUMMARY_LEAVES = 3


@dataclasses.dataclass
class _Text:
    """How to write a text: whether to include the sizes of meshes, and the digests of jaxprs seen so far."""

    meshes: bool = True
    done: dict[int, str] = dataclasses.field(default_factory=dict)


def part_digest(part: Part, *, meshes: bool = True) -> str:
    """A digest of one program: its equations, its constants, and which leaves it reads.

    Of large arrays that the step closes over, the types alone: `ClosedOver` has a digest of their values.
    Without `meshes` the sizes of meshes are left out, so that groups with different numbers of devices can agree.
    The axes' names, the partitioning, and the shapes of one device within a `shard_map` remain.
    """
    text = [str((part.state, part.batch, part.means, part.rest)), str([str(aval) for aval in part.zeros])]
    text += [_type(const) if is_large(const) else _value(const, _Text(meshes)) for const in part.consts]
    text.append(_jaxpr(part.jaxpr, _Text(meshes)))
    return _hash("\n".join(text))


def compared(fingerprint: Mapping[str, str], *, other_meshes: bool) -> dict[str, str]:
    """The part of a fingerprint that must be equal in all groups, which may have different meshes or not."""
    chosen = dict(fingerprint)
    any_mesh = chosen.pop("program on any mesh")
    if not chosen["closed-over arrays"]:  # a job of steps without has no such setting
        del chosen["closed-over arrays"]
    if other_meshes:
        del chosen["sharding"]
        chosen["program"] = any_mesh
        chosen["devices"] = chosen["devices"].split(" x ", 1)[1]
    return {**chosen, MESHES: ANY_MESHES if other_meshes else "equal"}


def jaxpr_digest(jaxpr: AnyJaxpr) -> str:
    """A digest of a traced function on any mesh."""
    return _hash(_jaxpr(jaxpr, _Text(meshes=False)))


def program_digest(parts: Sequence[Part], *, meshes: bool = True) -> str:
    """A digest of several programs; for `meshes` see `part_digest`."""
    return _hash("\n".join(part_digest(part, meshes=meshes) for part in parts))


def static_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The static arguments of a step, the same in every process; "" if there are none."""
    named = [f"{name}={_value(value, _Text())}" for name, value in sorted(kwargs.items())]
    return ", ".join([*(_value(value, _Text()) for value in args), *named])


def leaves_digest(labels: Sequence[str], types: Sequence[Any]) -> str:
    """A digest and a short summary of leaves, given anything with a shape and a dtype for each."""
    lines = [f"{label}:{type_.dtype}{list(type_.shape)}" for label, type_ in zip(labels, types, strict=True)]
    shown = ", ".join(lines[:_SUMMARY_LEAVES]) + (", ..." if len(lines) > _SUMMARY_LEAVES else "")
    return f"{_hash(chr(10).join(lines))[:16]} ({len(lines)} leaves: {shown})"


def shardings_digest(specs: Sequence[jax.ShapeDtypeStruct]) -> str:
    lines = [_placed_text(spec.sharding) for spec in specs]
    return f"{_hash(chr(10).join(lines))[:16]} ({len(set(lines))} kinds over {len(lines)} leaves)"


def _placed_text(sharding: Any) -> str:
    """On one device it makes no difference whether a leaf was placed there, as by a restore, or not placed at all."""
    if sharding is None:
        return "one device"
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        kind = sharding.memory_kind
        return "one device" if kind in (None, device.default_memory().kind) else f"one device {kind}"
    return sharding_text(sharding)


def sharding_text(sharding: Any, *, meshes: bool = True) -> str:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{_mesh_text(sharding.mesh, meshes=meshes)} {sharding.spec} {sharding.memory_kind}"
    return type(sharding).__name__


def _mesh_text(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, *, meshes: bool) -> str:
    axes = dict(mesh.shape) if meshes else list(mesh.axis_names)
    return f"{axes} {mesh.axis_types}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _jaxpr(jaxpr: AnyJaxpr, text: _Text) -> str:
    """The canonical text of a jaxpr. Nested jaxprs appear as digests."""
    names: dict[Var, str] = {}

    def name(atom: Atom) -> str:
        if not _compat.is_var(atom):
            return f"{_value(atom.val, text)}:{_aval(atom.aval)}"
        return names.setdefault(atom, f"v{len(names)}")

    inner = _compat.open_jaxpr(jaxpr)
    lines = [_value(const, text) for const in _compat.consts_of(jaxpr)]
    lines.append(" ".join(f"{name(var)}:{_aval(var.aval)}" for var in (*inner.constvars, *inner.invars)))
    for eqn in inner.eqns:
        ins = " ".join(map(name, eqn.invars))
        outs = " ".join(f"{name(var)}:{_aval(var.aval)}" for var in eqn.outvars)
        params = " ".join(
            f"{key}={_value(value, text)}" for key, value in sorted(_compat.parameters(eqn).items())
        )
        lines.append(f"{outs} = {eqn.primitive.name}[{params}] {ins}")
    lines.append(" ".join(map(name, inner.outvars)))
    return "\n".join(lines)


def _aval(aval: Any) -> str:
    return f"{aval.str_short()}{'~' if getattr(aval, 'weak_type', False) else ''}"


def _value(value: Any, text: _Text) -> str:
    """A parameter or a constant as text that is the same in every process."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if _compat.is_jaxpr(value):
        if id(value) not in text.done:
            text.done[id(value)] = _hash(_jaxpr(value, text))
        return text.done[id(value)]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _array(value)
    if isinstance(value, enum.Enum | np.dtype | jax.tree_util.PyTreeDef):
        return str(value)
    if isinstance(value, jax.sharding.Sharding):
        return sharding_text(value, meshes=text.meshes)
    if isinstance(value, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        return _mesh_text(value, meshes=text.meshes)
    return _container(value, text) or _printed(value)


def _container(value: Any, text: _Text) -> str | None:
    if isinstance(value, Mapping):
        return str(sorted((str(key), _value(entry, text)) for key, entry in value.items()))
    if isinstance(value, tuple | list):
        return f"({', '.join(_value(entry, text) for entry in value)})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_value(entry, text) for entry in value))}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__name__}{_value(fields, text)}"
    if isinstance(value, type) or callable(value):
        return _callable_name(value)
    return None


def _printed(value: Any) -> str:
    # By default numpy omits the middle of a large array, such as an attribute of a foreign function.
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        return _ADDRESS.sub("", f"{type(value).__name__} {value!r}")


def _callable_name(value: Callable[..., Any]) -> str:
    return getattr(value, "__qualname__", None) or type(value).__name__


def _array(value: Any) -> str:
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if not value.is_fully_addressable:
            # Every process of the group holds different pieces, so they can agree only on the type.
            return _type(value)
    data = np.ascontiguousarray(value)
    return f"array {data.dtype}{list(data.shape)} {hashlib.sha256(data.tobytes()).hexdigest()}"


def _type(array: Any) -> str:
    return f"array {array.dtype}{list(array.shape)}"
