"""Means in eight bits: `jaxft.pmean(x, quantize="int8")`, written as two exchanges of integers.

Theory of operation. A leaf is divided into *blocks* of up to 256 elements, and a block has one exponent e for all
shards: the smallest with which no shard has a value above 127 * 2^e.

    exchange k        each shard's exponents, as int8;       the groups take the largest
    exchange k + 1    round(x / 2^e), from -127 to 127;      the groups add, in int16
    after it          sum / shards * 2^e

A largest value and a sum of integers do not depend on an order. So the bits do not depend on who computed which
shard, in which order or tree it was added, on threads, rows and columns, or on the lane. A group that dies between
the two exchanges changes nothing either: the shards that others compute again have the same exponents.

The step's programs compute all of this, on the device that holds the gradient: one byte for each element leaves a
shard, two come back, and donors log these two. The bits are the same on every backend. Exponents come from the bits
of a float, and powers of two scale exactly. The quotient is a product with the rounded reciprocal of the number of
shards, rounded to 2^-12 of the block's step, since XLA does not divide alike everywhere. Denormals play no part: a
step is at least 2^-110, so all below 2^-111 rounds to zero.

A value that is not finite, or above 127 * 2^121, marks its block. The mark is the largest exponent, so every group
has NaN for the block.

Blocks lie along the last dimension if 64 divides it, so that a mesh that divides a leaf need not gather it. Those of
other leaves follow the order of all elements; the last may be shorter.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxft._arrays._layout import MOST_WIDENED_SHARDS, too_many_shards
from jaxft._errors import StepError
from jaxft._programs import _compat
from jaxft._programs._compat import Eqn, Var
from jaxft._programs._inline import Flat
from jaxft._programs._primitive import pmean_p

BLOCK_ELEMENTS = 256
# Exponents: of the smallest step, of the largest, and of a block that is not finite.
LEAST, MOST, MARK = -110, 121, 127
# The mean is rounded to this power of two of a step.
_GRID_BITS = 12

_INFINITY_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000


def is_quantised(eqn: Eqn) -> bool:
    return eqn.primitive is pmean_p and "quantize" in eqn.params


def expand(flat: Flat, exchanged: Collection[Var], shards: int | None) -> None:
    """Replace each quantised pmean in a flat step by exchanges of integers.

    Args:
        flat: the step; changed.
        exchanged: the results of a pmean or psum of what depends on the batch. All others stay as they are.
        shards: their number, if it is known.

    Raises:
        StepError: there are too many shards for the sums.
    """
    eqns: list[Eqn] = []
    for eqn in flat.eqns:
        eqns += _expanded(eqn, flat.invars[-1], exchanged, shards) if is_quantised(eqn) else [eqn]
    flat.eqns = eqns


def _expanded(eqn: Eqn, shard: Var, exchanged: Collection[Var], shards: int | None) -> list[Eqn]:
    if shards is not None and shards > MOST_WIDENED_SHARDS:
        raise StepError(f"{too_many_shards(shards)} That pmean is called at {_compat.source_line(eqn)}.")
    eqns: list[Eqn] = []
    for quantises in (False, True):
        at = [n for n, var in enumerate(eqn.outvars) if (var in exchanged) == quantises]
        params = {
            "operation": "mean",
            "paths": tuple(eqn.params["paths"][n] for n in at),
            "labels": tuple(eqn.params["labels"][n] for n in at),
        }
        invars, outvars = [eqn.invars[n] for n in at], [eqn.outvars[n] for n in at]
        if not at:
            continue
        if not quantises:
            eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
            continue
        function = _means(params["paths"], params["labels"], shards)
        made = _compat.trace(function, shard.aval, *(atom.aval for atom in invars))
        found = _compat.named_eqns(made, [shard, *invars], outvars)
        eqns += [one.replace(source_info=eqn.source_info) for one in found]
    return eqns


def _means(paths: Sequence[Any], labels: Sequence[str], shards: int | None) -> Callable[..., list[jax.Array]]:
    """The quantised means of leaves with these paths, as a function of the number of the shard and the leaves."""

    def exchange(operation: str, leaves: Sequence[jax.Array], more: str) -> list[jax.Array]:
        given = tuple(f"{label}{more}" for label in labels)
        return pmean_p.bind(*leaves, operation=operation, paths=tuple(paths), labels=given)

    def means(shard: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        exponents = exchange("max", list(map(exponents_of, leaves)), " exponents")
        pairs = list(zip(leaves, exponents, strict=True))
        totals = exchange("widened", [integers_of(*pair) for pair in pairs], "")
        count: Any = shards
        if shards is None:
            (count,) = pmean_p.bind(0 * shard + 1, operation="sum", paths=((),), labels=(" shards",))
        return [
            mean_of(total, exponent, count, leaf.dtype)
            for total, (leaf, exponent) in zip(totals, pairs, strict=True)
        ]

    return means


def exponents_of(x: jax.Array) -> jax.Array:
    """The exponent of each block of one shard's leaf."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & jnp.int32(0x7FFFFFFF)
    blocks = _blocks(bits)
    # By columns of 16 first, and behind a barrier: 64 MB take 4 ms of a core in place of 80.
    columns = jnp.max(blocks.reshape(*blocks.shape[:-1], -1, 16), axis=-2)
    largest = jnp.minimum(jnp.max(lax.optimization_barrier(columns), axis=-1), _INFINITY_BITS)
    # 127 * 2^e has the mantissa 0x7e0000: one bit more carries into the exponent.
    found = ((largest + 0x1FFFF) >> 23) - 133
    return jnp.where(found > MOST, MARK, jnp.maximum(found, LEAST)).astype(jnp.int8)


def integers_of(x: jax.Array, exponents: jax.Array) -> jax.Array:
    """What one shard contributes, in the leaf's shape."""
    wide = exponents.astype(jnp.int32)
    # 2^-e; 0 for a marked block. In half precision that has the exponents of float32, the product is exact, too, so
    # no float32 copy of such a leaf waits for the exponents.
    scale = lax.bitcast_convert_type((127 - wide) << 23, jnp.float32)
    kept = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    scaled = (x.astype(kept) * _by_element(scale, x.shape).astype(kept)).astype(jnp.float32)
    finite = jnp.where(jnp.abs(scaled) <= 127, scaled, 0)
    return lax.round(finite, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int8)


def mean_of(total: jax.Array, exponents: jax.Array, shards: Any, dtype: Any) -> jax.Array:
    """The mean of a leaf, from the sums of integers over all shards."""
    wide = exponents.astype(jnp.int32)
    bits = jnp.where(wide == MARK, _NAN_BITS, (wide + (127 - _GRID_BITS)) << 23)
    step = _by_element(lax.bitcast_convert_type(bits, jnp.float32), total.shape)
    reciprocal = jnp.asarray(((1 << 30) + shards // 2) // shards, jnp.int32).astype(jnp.float32)
    quotient = total.astype(jnp.float32) * (reciprocal * 2.0 ** (_GRID_BITS - 30))
    return (lax.round(quotient, lax.RoundingMethod.TO_NEAREST_EVEN) * step).astype(dtype)


def _width(shape: Sequence[int]) -> int | None:
    """The length of blocks along the last dimension; None if they follow the order of all elements."""
    last = shape[-1] if shape else 0
    width = math.gcd(last, BLOCK_ELEMENTS)
    return width if last and width >= BLOCK_ELEMENTS // 4 else None


def _blocks(x: jax.Array) -> jax.Array:
    """A leaf with its blocks along a new last dimension, the last one filled up with zeros."""
    width = _width(x.shape)
    if width is not None:
        return x.reshape(*x.shape[:-1], x.shape[-1] // width, width)
    return jnp.pad(x.reshape(-1), (0, -x.size % BLOCK_ELEMENTS)).reshape(-1, BLOCK_ELEMENTS)


def _by_element(of_blocks: jax.Array, shape: Sequence[int]) -> jax.Array:
    """What each block has, for each element of a leaf of this shape."""
    width = _width(shape) or BLOCK_ELEMENTS
    every = jnp.broadcast_to(of_blocks[..., None], (*of_blocks.shape, width))
    if _width(shape) is not None:
        return every.reshape(tuple(shape))
    return every.reshape(-1)[: math.prod(shape)].reshape(tuple(shape))
