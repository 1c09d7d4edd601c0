"""Places a fetched state on devices like the joiner's own state."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft._arrays._leaf_types import is_key
from jaxft._arrays._no_mesh import no_mesh


def place(arrays: Sequence[np.ndarray], like: Sequence[Any]) -> list[jax.Array]:
    """Place host arrays like the leaves of `like`. On the CPU backend this does not copy.

    An array whose leaf in `like` is not committed is not committed either: programs that span a mesh accept it, but
    would refuse one that is committed to a single device. A weak type, which is part of a program's signature, stays.
    """
    with no_mesh():
        return _placed(arrays, like)


def _placed(arrays: Sequence[np.ndarray], like: Sequence[Any]) -> list[jax.Array]:
    keys = [isinstance(leaf, jax.Array) and is_key(leaf) for leaf in like]
    raw = [
        jnp.array(array) if key else array  # small, and wrapped below
        for array, key in zip(arrays, keys, strict=True)
    ]
    shardings = [leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None for leaf in like]
    placed = jax.device_put(raw, [None if key else one for key, one in zip(keys, shardings, strict=True)])
    return [
        _key(data, leaf, sharding) if key else _weak_like(data, leaf)
        for data, leaf, key, sharding in zip(placed, like, keys, shardings, strict=True)
    ]


def _weak_like(data: jax.Array, like: Any) -> jax.Array:
    if not (isinstance(like, jax.Array) and like.weak_type):
        return data
    # An indexed update is the public way to keep a weak type.
    return jax.device_put(like.at[...].set(data), like.sharding if like.committed else None)


def _key(data: jax.Array, like: jax.Array, sharding: jax.sharding.Sharding | None) -> jax.Array:
    key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    return key if sharding is None else jax.device_put(key, sharding)
