"""The named axis of a step that was written for `jax.pmap` or `jax.shard_map`: its collectives, in jaxft's terms.

Such a step is traced with the axis bound, so JAX computes what it can from the axis' size alone (`lax.axis_size`,
`lax.psum(1, axis)`) and differentiates through the collectives by its own rules. The jaxpr then has these equations
over the axis:

- `psum` becomes jaxft's psum. A psum that is only divided by the number of shards, as `lax.pmean` writes it, becomes
  jaxft's pmean: the same value, rounded once.
- `axis_index` becomes jaxft's shard_index.
- `all_gather`, `psum_scatter`, `pmax` and `pmin` are written with sums. A sum can carry every value: each shard puts
  its own into a separate place, and leaves zeros in the others. So `all_gather` is the sum of these, and `pmax` the
  largest gathered value. They move as many times the bytes of a value as there are shards. `psum_scatter`, which
  differentiation makes of an `all_gather`, is a sum of which each shard takes its part.
- A `psum`, `pmax` or `pmin` over an axis of `jax.vmap` too, which is a dimension of its operands here, is taken over
  these dimensions first.
- No other collective has a counterpart across groups. It is refused, with its line.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxft._arrays._layout import DTYPES, sum_dtype
from jaxft._arrays._leaf_types import is_key
from jaxft._errors import StepError
from jaxft._programs import _compat
from jaxft._programs._compat import AnyJaxpr, Eqn, Var
from jaxft._programs._primitive import call_name, pmean_p, shard_index_p

_SUMS = frozenset({"psum", "psum_invariant"})


@dataclass(frozen=True)
class Axis:
    """The axis of the shards: the name that the step has for it, if it has one, and how many there are, if known."""

    name: str | None = None
    shards: int | None = None

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """The named axes to trace within."""
        return [] if self.name is None or self.shards is None else [(self.name, self.shards)]

    def within(self, eqn: Eqn) -> "Axis":
        """The axis as the body of an equation sees it: a shard_map over a mesh's axis of this name hides it."""
        return replace(self, name=None) if self.name in _compat.mapped_axes(eqn) else self

    def marks(self, eqn: Eqn) -> bool:
        """Whether an equation concerns all shards, so that it must be at the top level of the step."""
        if eqn.primitive in (pmean_p, shard_index_p):
            return True
        return self.name is not None and _compat.over_axis(eqn, self.name)

    def name_of(self, eqn: Eqn) -> str:
        """The user's call, for an equation that `marks` it."""
        if eqn.primitive in (pmean_p, shard_index_p):
            return call_name(eqn)
        return f"jax.lax.{_function(eqn)} over {self.name!r}"


NO_AXIS = Axis()


def translated(jaxpr: AnyJaxpr, axis: Axis) -> Sequence[Eqn]:
    """The equations of one body, without nested bodies, with jaxft's own in place of collectives over the axis.

    Raises:
        StepError: a collective has no counterpart.
    """
    if axis.name is None:
        return jaxpr.eqns
    divided = _divided(jaxpr, axis)
    dropped = {id(division) for division in divided.values()}
    result: list[Eqn] = []
    for eqn in jaxpr.eqns:
        if id(eqn) in dropped:
            continue
        if not _compat.over_axis(eqn, axis.name) or _is_written(eqn, axis):
            result.append(eqn)
        elif eqn.primitive.name == "axis_index":
            result.append(eqn.replace(primitive=shard_index_p, params={}, effects=set()))
        else:
            result.append(_exchange(eqn, axis, divided.get(eqn.outvars[0])))
    return result


def _exchange(eqn: Eqn, axis: Axis, division: Eqn | None) -> Eqn:
    _check(eqn, axis)
    count = len(eqn.invars)
    params: dict[str, Any] = {
        "operation": "sum" if division is None else "mean",
        "paths": ((),) * count,
        "labels": ("",) if count == 1 else tuple(f"[{number}]" for number in range(count)),
    }
    outvars = eqn.outvars if division is None else division.outvars
    return eqn.replace(primitive=pmean_p, params=params, outvars=outvars, effects=set())


def _check(eqn: Eqn, axis: Axis) -> None:
    line = _compat.source_line(eqn)
    if eqn.primitive.name not in _SUMS:
        raise StepError(
            f"The step calls jax.lax.{eqn.primitive.name} over {axis.name!r} ({line}). Groups exchange sums: over "
            "the axis of the shards a step may use lax.pmean, lax.psum, lax.all_gather, lax.psum_scatter, lax.pmax, "
            "lax.pmin, lax.axis_index and lax.axis_size, and nothing else. Write it in terms of these, or do it "
            "within a shard."
        )
    _check_whole(eqn, axis)


def _check_whole(eqn: Eqn, axis: Axis) -> None:
    """Refuse a collective over several axes at once, or over groups of shards."""
    if _names(eqn) != (axis.name,) or eqn.params.get("axis_index_groups") is not None:
        called = "psum or pmean" if eqn.primitive.name in _SUMS else _function(eqn)
        raise StepError(
            f"The step calls jax.lax.{called} over {axis.name!r} and another axis at once, or over parts of it "
            f"({_compat.source_line(eqn)}). Call it over the other axes first, and then over all of {axis.name!r} "
            "alone."
        )


def _names(eqn: Eqn) -> tuple[Any, ...]:
    """The axes that a collective is over: names, and numbers of dimensions."""
    over = eqn.params.get("axes", eqn.params.get("axis_name"))
    return tuple(over) if isinstance(over, tuple | list) else (over,)


def _over_dimensions(eqn: Eqn, axis: Axis) -> bool:
    """Whether an equation reduces over the axis of the shards and dimensions of its operands, and nothing else."""
    if eqn.primitive.name not in REDUCTIONS or eqn.params.get("axis_index_groups") is not None:
        return False
    others = [name for name in _names(eqn) if name != axis.name]
    return 0 < len(others) < len(_names(eqn)) and all(isinstance(other, int) for other in others)


def written_with_sums(eqn: Eqn, axis: Axis) -> AnyJaxpr | None:
    """Return a jaxpr with sums over the axis for an equation over it that is no sum but can be written with some.

    A collective that is over dimensions of its operands, too, becomes a collective over the axis alone.

    Raises:
        StepError: it is over several axes at once, or over groups of shards.
    """
    if axis.name is None or axis.shards is None or not _is_written(eqn, axis):
        return None
    if _over_dimensions(eqn, axis):
        return dimensions_first(eqn, axis.name, axis.shards)
    _check_whole(eqn, axis)
    return with_sums(eqn, axis.name, axis.shards)


def _is_written(eqn: Eqn, axis: Axis) -> bool:
    return axis.marks(eqn) and (eqn.primitive.name in WRITTEN or _over_dimensions(eqn, axis))


def _function(eqn: Eqn) -> str:
    """The function of jax.lax that makes such an equation."""
    return "psum_scatter" if eqn.primitive.name == "reduce_scatter" else eqn.primitive.name


def _divided(jaxpr: AnyJaxpr, axis: Axis) -> Mapping[Var, Eqn]:
    """Map each result of a psum that is only divided by the number of shards to the equation that divides it."""
    atoms = [atom for eqn in jaxpr.eqns for atom in eqn.invars] + list(jaxpr.outvars)
    uses = Counter(atom for atom in atoms if _compat.is_var(atom))
    sums = {
        eqn.outvars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name in _SUMS and _names(eqn) == (axis.name,) and len(eqn.outvars) == 1
    }
    found: dict[Var, Eqn] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "div":
            continue
        over, by = eqn.invars
        if not _compat.is_var(over) or over not in sums or uses[over] != 1 or _compat.is_var(by):
            continue
        dtype = _compat.dtype(over)
        if not jnp.issubdtype(dtype, jnp.inexact):
            continue  # whole numbers have no mean: the division rounds
        if by.val == axis.shards and dtype == _compat.dtype(eqn.outvars[0]):
            found[over] = eqn
    return found


def with_sums(eqn: Eqn, name: str, shards: int) -> AnyJaxpr:
    """Return a jaxpr with sums over the axis `name` for an equation of `WRITTEN`."""
    function = WRITTEN[eqn.primitive.name]

    def written(*operands: jax.Array) -> list[jax.Array]:
        return [function(each, name, shards, eqn.params) for each in operands]

    return _compat.trace(written, *map(_compat.spec, eqn.invars), axis_sizes=[(name, shards)])


def dimensions_first(eqn: Eqn, name: str, shards: int) -> AnyJaxpr:
    """Return a jaxpr over `name` alone for an equation of `REDUCTIONS` over `name` and dimensions."""
    within, across = REDUCTIONS[eqn.primitive.name]
    dimensions = tuple(axis for axis in eqn.params["axes"] if axis != name)

    def written(*operands: jax.Array) -> list[jax.Array]:
        return [reduced(each) for each in operands]

    def reduced(x: jax.Array) -> jax.Array:
        # A sum of half precisions is rounded once, at its end, like a sum over the axis alone.
        is_sum = eqn.primitive.name == "psum" and x.dtype.name in DTYPES["sum"]
        wide = sum_dtype(x.dtype.name) if is_sum else x.dtype
        return across(within(x.astype(wide), dimensions).astype(wide), name).astype(x.dtype)

    return _compat.trace(written, *map(_compat.spec, eqn.invars), axis_sizes=[(name, shards)])


def _all_gather(x: jax.Array, name: str, shards: int, params: Mapping[str, Any]) -> jax.Array:
    at = params["all_gather_dimension"]
    found = jnp.moveaxis(_gathered(x, name, shards), 0, at)
    if not params["tiled"]:
        return found
    return found.reshape(*x.shape[:at], shards * x.shape[at], *x.shape[at + 1 :])


def _psum_scatter(x: jax.Array, name: str, shards: int, params: Mapping[str, Any]) -> jax.Array:
    at = params["scatter_dimension"]
    size = x.shape[at] // shards
    part = lax.dynamic_slice_in_dim(_summed(x, name), size * lax.axis_index(name), size, at)
    return part if params["tiled"] else lax.squeeze(part, [at])


def _largest(x: jax.Array, name: str, shards: int, _: Mapping[str, Any]) -> jax.Array:
    return jnp.max(_gathered(x, name, shards), axis=0)


def _smallest(x: jax.Array, name: str, shards: int, _: Mapping[str, Any]) -> jax.Array:
    return jnp.min(_gathered(x, name, shards), axis=0)


WRITTEN: dict[str, Callable[[jax.Array, str, int, Mapping[str, Any]], jax.Array]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _psum_scatter,
    "pmax": _largest,
    "pmin": _smallest,
}

# The functions that reduce dimensions of a value and an axis: the same primitive does both.
REDUCTIONS: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "psum": (jnp.sum, lax.psum),
    "pmax": (jnp.max, lax.pmax),
    "pmin": (jnp.min, lax.pmin),
}


def _gathered(x: jax.Array, name: str, shards: int) -> jax.Array:
    """The values of all shards, along a new first dimension."""
    if is_key(x):
        data = _gathered(jax.random.key_data(x), name, shards)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.iscomplexobj(x):
        return lax.complex(*(_gathered(part(x), name, shards) for part in (jnp.real, jnp.imag)))
    value = x.astype(_carrier(x.dtype.name))  # some types have no zero
    mine = (jnp.arange(shards, dtype=jnp.int32) == lax.axis_index(name)).reshape(-1, *[1] * x.ndim)
    # By broadcasting, so that the places lie on a mesh with explicit axes as the value does. A negative zero, so that
    # a sum keeps the sign of another.
    placed = jnp.where(mine, value[None], -jnp.zeros((), value.dtype))
    return lax.psum(placed, name).astype(x.dtype)


def _summed(x: jax.Array, name: str) -> jax.Array:
    if jnp.iscomplexobj(x):
        return lax.complex(_summed(jnp.real(x), name), _summed(jnp.imag(x), name))
    return lax.psum(x.astype(_carrier(x.dtype.name)), name).astype(x.dtype)


@functools.cache
def _carrier(dtype: str) -> str:
    """A type that groups sum, and that holds every value of another one."""
    if dtype in DTYPES["sum"]:
        return dtype
    if dtype == "uint64":
        return "int64"  # the sum has the same bits
    if dtype == "bool" or (jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 32):
        return "int32"
    return "float32" if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16 else dtype
