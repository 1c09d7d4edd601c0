"""Copies of arrays in host memory, made while the host goes on.

A device reaches pinned memory by itself, at the speed of its link. To other memory the driver copies through a
buffer. So an array of an accelerator is copied to memory of the kind `pinned_host`, where its backend has that (CUDA
and ROCm do), and numpy reads it there without another copy. Of equal copies on several devices one is copied.

XLA takes pinned memory from a pool, keeps dropped memory for the next copy, and has a limit for it (64 GB, or
XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB). Without pinned memory a copy is made at once, and waited for.

Arrays in host memory, as all on CPU, are read where they are.
"""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxft._arrays._memory import aligned_empty

_log = logging.getLogger("jaxft")

_PINNED = "pinned_host"
_NO_MESH = Mesh(np.empty((), object), ())

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of an array in host memory, complete or on its way: pieces that make up the whole, each once."""

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[tuple[Index, "jax.Array | np.ndarray"], ...]

    def flat(self) -> np.ndarray:
        """All elements in C order; waits for them. Read-only: it may be the memory of the copy."""
        if len(self.pieces) == 1:
            return np.ascontiguousarray(self.pieces[0][1]).reshape(-1)
        size_bytes = self.dtype.itemsize * int(np.prod(self.shape))
        flat = aligned_empty(size_bytes).view(self.dtype)
        whole = flat.reshape(self.shape)
        for index, piece in self.pieces:
            whole[index] = np.asarray(piece)
        return flat


def pinned_limit_bytes() -> int:
    """How much pinned memory XLA gives to a process on an accelerator."""
    try:
        return int(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "64")) << 30
    except ValueError:  # as XLA does
        return 64 << 30


def is_accelerator(device: Any) -> bool:
    """Whether a device has memory apart from the host's."""
    return _has_memory(device.platform)


def _has_memory(platform: str) -> bool:
    return platform != "cpu"


def on_accelerator(array: jax.Array) -> bool:
    """Whether an array is in the memory of an accelerator."""
    return is_accelerator(_a_device(array)) and "host" not in (array.sharding.memory_kind or "")


def goes_to_pinned(array: jax.Array) -> bool:
    """Whether a copy of an array can be in pinned memory."""
    return on_accelerator(array) and _has_pinned(_a_device(array))


def flat_on_host(array: jax.Array) -> np.ndarray:
    """The elements of an array that is in host memory, in C order; waits for it. Read-only."""
    if len(array.sharding.device_set) == 1:
        return np.ascontiguousarray(array).reshape(-1)
    return HostCopy(array.shape, array.dtype, tuple(unique_pieces(array))).flat()


def host_copies(arrays: Sequence[jax.Array], *, pinned: bool = True) -> list[HostCopy]:
    """Start to copy arrays to host memory; return the copies without waiting for them.

    Arrays that were in the memory of an accelerator may be donated afterwards: it is read before it is overwritten.

    Args:
        arrays: on this process's devices, of any dtypes and shardings.
        pinned: False: wait for each, and use no pinned memory.
    """
    pieces = [unique_pieces(array) for array in arrays]
    away = [
        piece
        for array, of_array in zip(arrays, pieces, strict=True)
        if on_accelerator(array)
        for _, piece in of_array
    ]
    made = iter(_copied(away, pinned=pinned))
    return [
        HostCopy(
            array.shape,
            array.dtype,
            tuple((index, next(made) if on_accelerator(array) else piece) for index, piece in of_array),
        )
        for array, of_array in zip(arrays, pieces, strict=True)
    ]


def unique_pieces(array: jax.Array) -> list[tuple[Index, jax.Array]]:
    """The blocks of an array that this process holds, each once."""
    if len(array.sharding.device_set) == 1:
        return [(tuple(slice(None) for _ in array.shape), array)]
    return [(shard.index, shard.data) for shard in array.addressable_shards if shard.replica_id == 0]


def _copied(pieces: Sequence[jax.Array], *, pinned: bool) -> "Sequence[jax.Array | np.ndarray]":
    """Copies of arrays on one accelerator each."""
    if pinned and pieces and _has_pinned(_a_device(pieces[0])):
        try:
            return jax.device_put(
                list(pieces), [piece.sharding.with_memory_kind(_PINNED) for piece in pieces]
            )
        except jax.errors.JaxRuntimeError as error:
            _log.warning(
                "There is no pinned host memory for copies of %.1f GB, so they are slower: %s. Raise "
                "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, or the host's limit of locked memory.",
                sum(piece.nbytes for piece in pieces) / 1e9,
                str(error).partition("\n")[0],
            )
    for piece in pieces:
        piece.copy_to_host_async()  # so that they overlap
    return [np.asarray(piece) for piece in pieces]


@functools.cache
def _has_pinned(device: Any) -> bool:
    return _PINNED in {memory.kind for memory in device.addressable_memories()}


def _a_device(array: jax.Array) -> Any:
    return next(iter(array.sharding.addressable_devices))


def no_mesh() -> AbstractContextManager[object]:
    """A context in which no mesh is set.

    Under a mesh that the program has set with `jax.set_mesh`, JAX makes new arrays on all its devices, and a process
    of several cannot bring these back to one device. Nor does it compile for the mesh's devices in another order.
    """
    return jax.set_mesh(_NO_MESH)


def compiled_ahead(jitted: Any, *like: Any) -> Callable[..., Any]:
    """A jitted program, compiled for arguments like these.

    Called through `jax.jit`, a program would be compiled twice: the leaves of a first state are often not committed
    to their devices, and later ones are. A compiled program takes both, and refuses leaves of int4 whose layout in
    memory is another, which jit takes: from then on jit is called.
    """
    program = jitted.lower(*like).compile()

    def call(*given: Any) -> Any:
        nonlocal program
        try:
            return program(*given)
        except ValueError:  # raised by the check of the arguments, before anything runs or is donated
            program = jitted
            return jitted(*given)

    return call
