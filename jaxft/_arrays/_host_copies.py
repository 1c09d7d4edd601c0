"""Copies of arrays in host memory, made while the host goes on.

A device reaches pinned memory by itself, at the speed of its link. To other memory the driver copies through a
buffer. So an array of an accelerator is copied to memory of the kind `pinned_host`, where its backend has that (CUDA
and ROCm do), and numpy reads it there without another copy. JAX keeps the memory of a dropped copy for the next.

What is in host memory already, as everything on CPU is, is its own copy.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxft._arrays._memory import aligned_empty

_PINNED = "pinned_host"


def is_accelerator(platform: str) -> bool:
    """Whether the devices of a platform have memory apart from the host's."""
    return platform != "cpu"


def on_accelerator(array: jax.Array) -> bool:
    """Whether an array is in the memory of an accelerator."""
    return is_accelerator(_a_device(array).platform) and "host" not in (array.sharding.memory_kind or "")


def host_copies(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Start to copy arrays to host memory; return the copies without waiting for them.

    The arrays may be donated afterwards: a device reads them before it overwrites them.

    Args:
        arrays: on this process's devices, of any dtypes and shardings.
    """
    if not arrays or not is_accelerator(_a_device(arrays[0]).platform):
        return list(arrays)  # fast path: all are of one backend
    targets = [_target(array) for array in arrays]
    copies = jax.device_put(list(arrays), targets)
    for copy, target in zip(copies, targets, strict=True):
        if target is None and on_accelerator(copy):
            copy.copy_to_host_async()
    return copies


def flat_on_host(array: jax.Array) -> np.ndarray:
    """The elements of an array in host memory, in C order; waits for it. Of equal pieces one is read."""
    if len(array.sharding.device_set) == 1:
        return np.ascontiguousarray(array).reshape(-1)
    flat = aligned_empty(array.size * array.dtype.itemsize).view(array.dtype)
    whole = flat.reshape(array.shape)
    for piece in array.addressable_shards:
        if piece.replica_id == 0:
            whole[piece.index] = np.asarray(piece.data)
    return flat


def _target(array: jax.Array) -> jax.sharding.Sharding | None:
    """Where to copy an array; None: nowhere, because it is in host memory or because there is none that is pinned."""
    if not on_accelerator(array):
        return None
    kinds = {memory.kind for memory in _a_device(array).addressable_memories()}
    return array.sharding.with_memory_kind(_PINNED) if _PINNED in kinds else None


def _a_device(array: jax.Array) -> Any:
    return next(iter(array.sharding.addressable_devices))
