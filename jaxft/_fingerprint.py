"""What must agree between groups, as text: two processes that run the same step say the same.

A jaxpr is written out in a canonical form and hashed: variables by the order of their definition, constants by
their bytes, functions by their names. Nothing depends on memory addresses, on hash randomisation, or on where
the source lies. Left out on purpose: source lines and the bodies of Python callbacks.
"""

import dataclasses
import enum
import hashlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft import _compat
from jaxft._compat import AnyJaxpr, Atom, Var
from jaxft._part import Part

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|id=\d+")
# How many leaves the summary of a state spells out: enough to see at a glance what differs.
_SUMMARY_LEAVES = 3


def part_digest(part: Part) -> str:
    """A digest of one program: its equations, its constants, and which leaves it reads."""
    text = [str((part.state, part.batch, part.means, part.rest)), str([str(aval) for aval in part.zeros])]
    text += [_value(const, {}) for const in part.consts]
    text.append(jaxpr_text(part.jaxpr))
    return _hash("\n".join(text))


def jaxpr_text(jaxpr: AnyJaxpr) -> str:
    """The canonical text of a jaxpr. Nested jaxprs appear as digests."""
    return _jaxpr(jaxpr, {})


def environment(devices: Sequence[Any]) -> dict[str, str]:
    """What the bits of a result depend on besides the program."""
    platform = devices[0].platform
    # XLA's CPU backend divides its work by the number of cores that the process may use; so do its roundings.
    cores = str(len(os.sched_getaffinity(0))) if platform == "cpu" else "-"
    return {
        "jax": f"{jax.__version__}/{metadata.version('jaxlib')}",
        "backend": platform,
        "cores": cores,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
    }


def program_digest(parts: Sequence[Part]) -> str:
    settings = [
        f"{name}={getattr(jax.config, name)}"
        for name in ("jax_enable_x64", "jax_threefry_partitionable", "jax_default_matmul_precision")
    ]
    return _hash("\n".join([*settings, *map(part_digest, parts)]))


def leaves_digest(labels: Sequence[str], types: Sequence[Any]) -> str:
    """A digest and a short summary of leaves, given anything with a shape and a dtype for each."""
    lines = [f"{label}:{type_.dtype}{list(type_.shape)}" for label, type_ in zip(labels, types, strict=True)]
    shown = ", ".join(lines[:_SUMMARY_LEAVES]) + (", ..." if len(lines) > _SUMMARY_LEAVES else "")
    return f"{_hash(chr(10).join(lines))[:16]} ({len(lines)} leaves: {shown})"


def shardings_digest(specs: Sequence[jax.ShapeDtypeStruct]) -> str:
    lines = [sharding_text(spec.sharding) for spec in specs]
    return f"{_hash(chr(10).join(lines))[:16]} ({len(set(lines))} kinds over {len(lines)} leaves)"


def sharding_text(sharding: Any) -> str:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return (
            f"{dict(sharding.mesh.shape)} {sharding.mesh.axis_types} {sharding.spec} {sharding.memory_kind}"
        )
    return type(sharding).__name__


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _jaxpr(jaxpr: AnyJaxpr, done: dict[int, str]) -> str:
    names: dict[Var, str] = {}

    def name(atom: Atom) -> str:
        if not _compat.is_var(atom):
            return f"{_value(atom.val, done)}:{_aval(atom.aval)}"
        return names.setdefault(atom, f"v{len(names)}")

    inner = _compat.open_jaxpr(jaxpr)
    lines = [_value(const, done) for const in _compat.consts_of(jaxpr)]
    lines.append(" ".join(f"{name(var)}:{_aval(var.aval)}" for var in (*inner.constvars, *inner.invars)))
    for eqn in inner.eqns:
        ins = " ".join(map(name, eqn.invars))
        outs = " ".join(f"{name(var)}:{_aval(var.aval)}" for var in eqn.outvars)
        params = " ".join(f"{key}={_value(value, done)}" for key, value in sorted(eqn.params.items()))
        lines.append(f"{outs} = {eqn.primitive.name}[{params}] {ins}")
    lines.append(" ".join(map(name, inner.outvars)))
    return "\n".join(lines)


def _aval(aval: Any) -> str:
    return f"{aval.str_short()}{'~' if getattr(aval, 'weak_type', False) else ''}"


def _value(value: Any, done: dict[int, str]) -> str:
    """A parameter or a constant as text that another process would write the same."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if _compat.is_jaxpr(value):
        if id(value) not in done:
            done[id(value)] = _hash(_jaxpr(value, done))
        return done[id(value)]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _array(value)
    if isinstance(value, enum.Enum | np.dtype | jax.tree_util.PyTreeDef):
        return str(value)
    if isinstance(value, jax.sharding.Sharding):
        return sharding_text(value)
    return _container(value, done) or _printed(value)


def _container(value: Any, done: dict[int, str]) -> str | None:
    if isinstance(value, Mapping):
        return str(sorted((str(key), _value(entry, done)) for key, entry in value.items()))
    if isinstance(value, tuple | list):
        return f"({', '.join(_value(entry, done) for entry in value)})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_value(entry, done) for entry in value))}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__name__}{_value(fields, done)}"
    if isinstance(value, type) or callable(value):
        return _callable_name(value)
    return None


def _printed(value: Any) -> str:
    # numpy would leave out the middle of a large array, such as an attribute of a foreign function.
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        return _ADDRESS.sub("", f"{type(value).__name__} {value!r}")


def _callable_name(value: Callable[..., Any]) -> str:
    return getattr(value, "__qualname__", None) or type(value).__name__


def _array(value: Any) -> str:
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if not value.is_fully_addressable:
            # Every process of the group holds other pieces; the type is all that they can agree on.
            return f"array {value.dtype}{list(value.shape)}"
    data = np.ascontiguousarray(value)
    return f"array {data.dtype}{list(data.shape)} {hashlib.sha256(data.tobytes()).hexdigest()}"
