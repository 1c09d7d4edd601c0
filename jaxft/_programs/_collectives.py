"""Collectives over the axis of the shards that are no sums, written with sums.

Groups exchange sums, and a sum can carry every value: each shard puts its own into a separate place, and leaves zeros
in the others. So `lax.all_gather` is the sum of these, and `lax.pmax` the largest of what it has gathered. They move
as many times the bytes of a value as there are shards. `lax.psum_scatter`, which differentiation makes of an
`all_gather`, is a sum of which each shard takes its part.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxft._arrays._layout import DTYPES, sum_dtype
from jaxft._arrays._leaf_types import is_key
from jaxft._programs import _compat
from jaxft._programs._compat import AnyJaxpr, Eqn


def with_sums(eqn: Eqn, name: str, shards: int) -> AnyJaxpr:
    """Return what an equation of `WRITTEN` over the axis `name` computes, as a jaxpr with sums over it."""
    function = WRITTEN[eqn.primitive.name]

    def written(*operands: jax.Array) -> list[jax.Array]:
        return [function(each, name, shards, eqn.params) for each in operands]

    return _compat.trace(written, *map(_compat.spec, eqn.invars), axis_sizes=[(name, shards)])


def dimensions_first(eqn: Eqn, name: str, shards: int) -> AnyJaxpr:
    """Return what an equation of `REDUCTIONS` over `name` and dimensions computes, as a jaxpr over `name` alone."""
    within, across = REDUCTIONS[eqn.primitive.name]
    dimensions = tuple(one for one in eqn.params["axes"] if one != name)

    def written(*operands: jax.Array) -> list[jax.Array]:
        return [reduced(each) for each in operands]

    def reduced(x: jax.Array) -> jax.Array:
        # A sum of half precisions is rounded once, at its end, as that over the axis alone.
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


def _largest(x: jax.Array, name: str, shards: int, params: Mapping[str, Any]) -> jax.Array:
    return jnp.max(_gathered(x, name, shards), axis=0)


def _smallest(x: jax.Array, name: str, shards: int, params: Mapping[str, Any]) -> jax.Array:
    return jnp.min(_gathered(x, name, shards), axis=0)


WRITTEN: dict[str, Callable[[jax.Array, str, int, Mapping[str, Any]], jax.Array]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _psum_scatter,
    "pmax": _largest,
    "pmin": _smallest,
}

# What reduces dimensions of a value, and what an axis, as the same primitive does both.
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
