"""Copies a state to host memory for a save, and back to devices after a load.

On the host a state is a list of numpy arrays, its leaves in their order. For Orbax they are put into dicts, lists and
tuples (`skeleton`): a node of another class may accept only what `jax.jit` makes of it.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft._arrays._leaf_types import is_key, type_of
from jaxft._errors import ConfigurationError

_Piece = tuple[tuple[slice, ...], np.ndarray]


class HostCopy:
    """A copy of a state that later changes of the state do not affect.

    Everything that must be copied is copied at once. Arrays on several devices are assembled in `join`, which may run
    in another thread.
    """

    def __init__(self, state: Any) -> None:
        found = jax.tree_util.tree_leaves_with_path(state)
        leaves = [leaf for _, leaf in found]
        self.names = [jax.tree_util.keystr(path) for path, _ in found]
        self.skeleton = skeleton(state)
        for leaf in leaves:
            begin_copy(leaf)
        self.key_impls = key_impls(state)
        self._types = [type_of(leaf) for leaf in leaves]
        self._pieces = [_pieces(leaf) for leaf in leaves]

    def join(self) -> list[np.ndarray]:
        """The leaves as numpy arrays, a key as its key data. Call it once."""
        joined: list[np.ndarray] = []
        for leaf_type in self._types:
            pieces = self._pieces.pop(0)  # freed one by one, so that a large state is not held twice
            if len(pieces) == 1 and pieces[0][1].shape == leaf_type.shape:
                joined.append(pieces[0][1].astype(leaf_type.dtype, copy=False))
                continue
            whole = np.empty(leaf_type.shape, np.dtype(leaf_type.dtype))
            for index, piece in pieces:
                whole[index] = piece
            joined.append(whole)
        return joined


def skeleton(state: Any) -> Any:
    """A state as dicts, lists and tuples of the numbers of its leaves. A node of another class becomes a dict.

    Raises:
        ConfigurationError: two keys of such a node are the same as text.
    """
    return _skeleton(state, itertools.count())


def _skeleton(node: Any, numbers: Iterator[int]) -> Any:
    def is_child(other: Any) -> bool:
        return other is not node

    if type(node) in (dict, list, tuple) or (isinstance(node, tuple) and hasattr(node, "_fields")):
        return jax.tree.map(lambda child: _skeleton(child, numbers), node, is_leaf=is_child)
    children = jax.tree_util.tree_leaves_with_path(node, is_leaf=is_child)
    if [path for path, _ in children] == [()]:
        return next(numbers)
    if node is None:
        return None
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in children]
    if twice := repeated(names):
        raise ConfigurationError(
            f"Two children of a {type(node).__name__} in the state have the same key as text, {twice!r}, "
            "so that a checkpoint cannot tell them apart: rename one of them."
        )
    return {name: _skeleton(child, numbers) for name, (_, child) in zip(names, children, strict=True)}


def repeated(names: Iterable[str]) -> str | None:
    """The first name, in their order as text, that is there twice; None if there is none."""
    return next((one for one, other in pairwise(sorted(names)) if one == other), None)


def filled(numbers: Any, arrays: Sequence[Any]) -> Any:
    """A skeleton with the arrays in the places of their numbers."""
    return jax.tree.map(arrays.__getitem__, numbers)


def key_impls(state: Any) -> list[Any]:
    """The generator of each leaf that is a key; None for the others."""
    return [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in jax.tree.leaves(state)]


def with_keys(host: Sequence[np.ndarray], impls: Sequence[Any]) -> list[Any]:
    """Leaves with key data made into keys again, as their digest needs them."""
    return [
        leaf if impl is None else jax.random.wrap_key_data(jnp.array(leaf), impl=impl)
        for leaf, impl in zip(host, impls, strict=True)
    ]


def as_arrays(like: Any) -> list[Any]:
    """The leaves of `like`, as `place` takes them. A Python number is the array that jit makes of it."""
    return [
        jnp.asarray(leaf) if isinstance(leaf, bool | int | float | complex) else _stand_in(leaf)
        for leaf in jax.tree.leaves(like)
    ]


def _stand_in(leaf: Any) -> Any:
    """A leaf; in place of a weak type, an array of this type."""
    if not (isinstance(leaf, jax.ShapeDtypeStruct) and leaf.weak_type):
        return leaf
    zero = {"c": 0j, "f": 0.0, "b": False}.get(np.dtype(leaf.dtype).kind, 0)
    made = jnp.broadcast_to(jnp.asarray(zero), leaf.shape)
    return made if leaf.sharding is None else jax.device_put(made, leaf.sharding)


def on_host(array: Any) -> np.ndarray:
    """An array on one device, or of numpy, in memory that is shared with nothing else; a key as its key data."""
    ((_, copy),) = _pieces(array)
    return copy.astype(type_of(array).dtype, copy=False)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and is_key(leaf)


def begin_copy(leaf: Any) -> None:
    """Start the copy of an array to the host without waiting for it."""
    if isinstance(leaf, jax.Array) and not is_key(leaf):
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0 and shard.device.platform != "cpu":
                shard.data.copy_to_host_async()


def _pieces(leaf: Any) -> list[_Piece]:
    """A leaf's unique pieces, in memory that is shared with nothing else."""
    if not isinstance(leaf, jax.Array):
        return [((), np.array(leaf))]
    if is_key(leaf):
        return [((), np.array(jax.random.key_data(leaf)))]
    assert leaf.is_fully_addressable, "other processes hold parts of this leaf"
    pieces: list[_Piece] = []
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            view = np.asarray(shard.data)
            # A view of an array in host memory shares that memory; any other view is already a copy.
            on_host = shard.device.platform == "cpu" or "host" in (shard.data.sharding.memory_kind or "")
            pieces.append((shard.index, np.array(view) if on_host else view))
    return pieces
