"""The types of leaves, as they are stored and sent."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (registers bfloat16 and its kin with numpy by name)
import numpy as np


@dataclass(frozen=True, slots=True)
class LeafType:
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def type_of(leaf: Any) -> LeafType:
    """The type of a leaf as it is sent; a key is sent as its key data."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    if is_key(aval):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return LeafType(tuple(aval.shape), aval.dtype.name)


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
