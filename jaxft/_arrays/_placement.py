"""Places a fetched state on devices like the joiner's own state."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft._arrays._host_copies import no_mesh
from jaxft._arrays._leaf_types import is_key


def place(
    arrays: Sequence[np.ndarray], like: Sequence[Any], consumed: Collection[int] = ()
) -> list[jax.Array]:
    """Place host arrays like the leaves of `like`, one after another. On the CPU backend this does not copy.

    An array whose leaf in `like` is not committed is not committed either: programs that span a mesh accept it, but
    would refuse one that is committed to a single device. A weak type, which is part of a program's signature, stays.

    Args:
        arrays: what to place.
        like: where.
        consumed: the numbers of the leaves of `like` that nothing needs: each gives up its memory before the array in
            its place takes some, so that no device holds two states.
    """
    with no_mesh():
        return [
            _placed(array, leaf, consumed=number in consumed)
            for number, (array, leaf) in enumerate(zip(arrays, like, strict=True))
        ]


def sharding_of(leaf: Any) -> jax.sharding.Sharding | None:
    """Where a leaf was put on purpose; None if that is left to JAX."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def _placed(array: np.ndarray, like: Any, *, consumed: bool) -> jax.Array:
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return jax.device_put(array)
    sharding, key = sharding_of(like), None
    if is_key(like):
        key = jax.random.key_impl(like if isinstance(like, jax.Array) else jnp.empty((), like.dtype))
    elif isinstance(like, jax.Array) and like.weak_type:
        # An indexed update is the public way to keep a weak type.
        return jax.device_put(like.at[...].set(jax.device_put(array, sharding)), sharding)
    if consumed and isinstance(like, jax.Array) and not like.is_deleted():
        like.delete()
    if key is None:
        return jax.device_put(array, sharding)
    return jax.device_put(jax.random.wrap_key_data(jnp.array(array), impl=key), sharding)
