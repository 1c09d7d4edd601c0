"""The norm of a tree of arrays, with bits that do not depend on how the arrays are sharded.

A sum over a sharded array is taken in another order on each mesh, so its last bits differ. Here the order is part of
the algorithm: each array is cut into blocks, which lie within one device, and added in halves, element by element.
XLA may not reorder additions of elements. It may fuse a product into an addition (FMA), which skips a rounding, so
products are taken of numbers that are short enough to need none.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes

# Each axis is cut into at most this many blocks: meshes of up to as many devices an axis add their own blocks first.
_MOST_BLOCKS = 64
# The bits of a number that are kept for an exact square, by its width in bytes; and the smallest number that counts.
_HIGH_BITS = {4: (np.uint32, 0xFFFF_F000), 8: (np.uint64, 0xFFFF_FFFF_F800_0000)}
_LEAST = {4: 2.0**-50, 8: 2.0**-480}


def global_norm(tree: object) -> jax.Array:
    """Return the Euclidean norm of all elements of a tree, the same bits on every mesh.

    For a step's `apply` in groups with different meshes (docs/meshes.md), where `optax.global_norm` lets their states
    drift apart. It may also be used elsewhere, under `jax.jit` or not.

    Example:
        >>> import jax.numpy as jnp, jaxft
        >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.zeros(2)}
        >>> float(jaxft.global_norm(grads))
        5.0

    Args:
        tree: arrays of any shape and placement, of floating-point or complex dtypes.

    Returns:
        A scalar, float64 if a leaf has 64-bit floating-point numbers, otherwise float32. 0 for a tree without
        elements; infinity or NaN if an element is not finite, or the square of the norm is beyond the dtype. Elements
        below 2**-50 (2**-480 in float64) count as 0. Otherwise the relative error is about 1e-7 (1e-16).

    Raises:
        TypeError: a leaf is not an array of floating-point or complex numbers.
    """
    parts = [part for leaf in jax.tree.leaves(tree) for part in _real_parts(leaf)]
    wide = np.float64 if any(part.dtype == np.float64 for part in parts) else np.float32
    sums = [_on_any_axes(part).astype(wide) for part in parts if part.size]
    if not sums:
        return jnp.zeros((), wide)
    return jnp.sqrt(_folded(jnp.concatenate(sums), axis=0)[0])


def _real_parts(leaf: object) -> Sequence[jax.Array]:
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.real(array), jnp.imag(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"jaxft.global_norm takes floating-point and complex arrays, not {array.dtype}{list(array.shape)}. Leave "
            "integer leaves out of the tree."
        )
    return (array if array.dtype == jnp.float64 else array.astype(np.float32),)


def _on_any_axes(array: jax.Array) -> jax.Array:
    """Return `_block_sums`. It cuts sharded axes, which explicit axes forbid, so they are automatic inside."""
    mesh = jax.typeof(array).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return _block_sums(array)
    whole = NamedSharding(mesh, PartitionSpec())
    cut_freely: Callable[[jax.Array], jax.Array] = auto_axes(_block_sums, out_sharding=whole)  # pyright: ignore[reportAssignmentType]
    return cut_freely(array)


def _block_sums(array: jax.Array) -> jax.Array:
    """Return the sums of the squares of each block, as a vector."""
    shape = [size for length in array.shape for size in _blocks(length)]
    sums = _squares(array).reshape(shape)
    for axis in range(1, len(shape), 2):
        sums = _folded(sums, axis)
    return sums.reshape(-1)


def _blocks(length: int) -> tuple[int, int]:
    """Return the number of blocks of an axis, and their length."""
    count = math.gcd(length, _MOST_BLOCKS)
    return count, length // count


@jax.custom_jvp
def _squares(array: jax.Array) -> jax.Array:
    """Return the squares of the elements, less what lies below their last bit.

    With x = high + low, both products of high**2 + 2 * high * low are exact.
    """
    width = array.dtype.itemsize
    bits, mask = _HIGH_BITS[width]
    large = jnp.where(jnp.abs(array) < _LEAST[width], array.dtype.type(0), array)
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(large, bits) & bits(mask), array.dtype)
    low = large - high
    return high * high + (high + high) * low


@_squares.defjvp
def _tangent_of_squares(arrays: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _squares(*arrays), arrays[0] * tangents[0] * 2


def _folded(array: jax.Array, axis: int) -> jax.Array:
    """Return the array with its halves along an axis added to each other until one is left."""
    while (length := array.shape[axis]) > 1:
        half = length // 2
        first, second, rest = (
            lax.slice_in_dim(array, start, stop, axis=axis)
            for start, stop in ((0, half), (half, 2 * half), (2 * half, length))
        )
        array = first + second
        if length % 2:
            array = lax.concatenate([array, rest], axis)
    return array
