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
    """Place host arrays like the leaves of `like`. On the CPU backend this does not copy.

    An array whose leaf in `like` is not committed is not committed either: programs that span a mesh accept it, but
    would refuse one that is committed to a single device. A weak type, which is part of a program's signature, stays.

    Args:
        arrays: what to place.
        like: where.
        consumed: the numbers of the leaves of `like` that nothing needs: they give up their memory before the arrays
            take some, so that no device holds two states.
    """
    with no_mesh():
        shardings = [sharding_of(leaf) for leaf in like]
        keys = [_key_impl(leaf) for leaf in like]
        raw = [array if key is None else jnp.array(array) for array, key in zip(arrays, keys, strict=True)]
        for number in consumed:
            _give_up(like[number])
        wanted = [sharding if key is None else None for sharding, key in zip(shardings, keys, strict=True)]
        placed = jax.device_put(raw, wanted)  # all at once: each call takes 0.1 ms
        return [
            _like(data, leaf, sharding)
            if key is None
            else jax.device_put(jax.random.wrap_key_data(data, impl=key), sharding)
            for data, leaf, sharding, key in zip(placed, like, shardings, keys, strict=True)
        ]


def sharding_of(leaf: Any) -> jax.sharding.Sharding | None:
    """Where a leaf was put on purpose; None if that is left to JAX."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None


def _key_impl(like: Any) -> Any:
    """The generator of a leaf of random keys; None for other leaves."""
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct) or not is_key(like):
        return None
    return jax.random.key_impl(like if isinstance(like, jax.Array) else jnp.empty((), like.dtype))


def _give_up(like: Any) -> None:
    """Release the memory of a leaf, unless its weak type is still to be passed on."""
    weak = getattr(like, "weak_type", False)  # random keys have none
    if isinstance(like, jax.Array) and not weak and not like.is_deleted():
        like.delete()


def _like(data: jax.Array, like: Any, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if not (isinstance(like, jax.Array) and like.weak_type):
        return data
    # An indexed update is the public way to keep a weak type.
    return jax.device_put(like.at[...].set(data), sharding)
