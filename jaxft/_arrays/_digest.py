"""A digest of a state that does not depend on its sharding."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.experimental import multihost_utils

from jaxft._base._transfers import MAY_TRANSFER
from jaxft._errors import ConfigurationError


@MAY_TRANSFER
def digest(tree: Any) -> str:
    """Return a digest of a pytree of arrays: equal trees have equal digests.

    It covers the path, shape, dtype and every byte of each leaf, in the leaf's own global order; so it does not
    depend on how a leaf is sharded, and a run on one device can be compared with one on eight. NaNs and signed zeros
    count by their bits. The arrays are read through host memory: use it at the start or end of a run and in tests,
    not in each step. Arrays that are spread over several processes are gathered, so all of these must call it.

    Args:
        tree: arrays of any dtype, typed PRNG keys included; Python numbers are converted as numpy does.

    Returns:
        128 bits of xxHash3 (https://xxhash.com) as 32 hexadecimal digits. It detects accidents, not attackers.

    Raises:
        TypeError: a leaf is neither an array nor a number.
        ConfigurationError: a leaf was consumed by a step.

    Example:
        >>> import jax.numpy as jnp, jaxft
        >>> jaxft.digest({"w": jnp.ones(3)}) == jaxft.digest({"w": jnp.ones(3)})
        True
    """
    found = jax.tree_util.tree_leaves_with_path(tree)
    return digest_of_leaves([jax.tree_util.keystr(path) for path, _ in found], [leaf for _, leaf in found])


def digest_of_leaves(names: Sequence[str], leaves: Sequence[Any]) -> str:
    """`digest` of a tree whose leaves have these paths."""
    whole = xxhash.xxh3_128()
    for name, leaf in zip(names, leaves, strict=True):
        array, dtype = _host(leaf, name)
        head = f"{name} {dtype} {array.shape}".encode()
        # The lengths separate the parts, so that no name can look like another leaf's bytes.
        whole.update(f"{len(head)} {array.nbytes} ".encode())
        whole.update(head)
        if array.nbytes:
            whole.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return whole.hexdigest()


def _host(leaf: Any, name: str) -> tuple[np.ndarray, str]:
    """A leaf's values in the machine's own byte order, and the name of its dtype."""
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ConfigurationError(
            f"jaxft.digest was given a state {f'whose leaf {name}' if name else 'that'} was consumed by a step, or "
            "by a function that donates it. Take the digest of the state that the step returned, or of the old one "
            "before the step."
        )
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _gathered(jax.random.key_data(leaf)), str(leaf.dtype)
    array = _gathered(leaf)
    if array.dtype.hasobject or array.dtype.kind in "SUMm":  # text and times
        raise TypeError(
            f"jaxft.digest takes arrays and numbers, but the leaf {name or 'itself'} is a {type(leaf).__name__}. "
            "Pass the arrays alone, such as `equinox.filter(state, equinox.is_array)`."
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False), array.dtype.name


def _gathered(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return np.asarray(leaf)
