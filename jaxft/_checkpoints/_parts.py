"""The parts of a state that one process of several saves, in host memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxft._arrays._device_digest import PendingDigest
from jaxft._arrays._lanes import Part
from jaxft._arrays._leaf_types import LeafType, type_of
from jaxft._arrays._pieces import Pieces
from jaxft._checkpoints._host import begin_copy, on_host, repeated, skeleton
from jaxft._errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Stored:
    """One array of a checkpoint: its name on disk, and its type; a key is stored as its key data."""

    name: str
    type: LeafType


def stored_arrays(state: Any) -> list[Stored]:
    """The arrays of a state, in the order of its leaves."""
    return [
        Stored(name, type_of(leaf)) for name, leaf in zip(_names(state), jax.tree.leaves(state), strict=True)
    ]


def _names(state: Any) -> list[str]:
    """The name on disk of each leaf."""
    names = {
        number: jax.tree_util.keystr(path, simple=True, separator=".")
        for path, number in jax.tree_util.tree_leaves_with_path(skeleton(state))
    }
    return [names[number] for number in range(len(names))]


def check_storable(state: Any, *, shapes: bool = False) -> None:
    """Check that a checkpoint can hold a state.

    Raises:
        ConfigurationError: a leaf has no values, two leaves have the same name on disk, or there is nothing to store.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        _check_leaf(jax.tree_util.keystr(path), leaf, shapes=shapes)
    names = _names(state)
    if not names:
        raise ConfigurationError(
            "The state has no array, so that there is nothing to save in a checkpoint. Pass the state that the step "
            "returns, or leave out `checkpoints=`."
        )
    if twice := repeated(names):
        raise ConfigurationError(
            f"Two leaves of the state have the name {twice!r} on disk, where the keys of a path are joined by dots: "
            "rename one of them."
        )


def _check_leaf(name: str, leaf: Any, *, shapes: bool) -> None:
    what = f"{f'The leaf {name} of the state' if name else 'The state'} is a {type(leaf).__name__}"
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if shapes:
            return
        raise ConfigurationError(
            f"{what}, a type without values, which a step cannot begin with. `manager.restore(shapes)` returns the "
            "shapes if it has read no checkpoint: make the state then, `if state is shapes: state = init(key)`."
        )
    try:
        jax.typeof(leaf)
    except TypeError as error:
        raise ConfigurationError(
            f"{what}, and a checkpoint holds arrays and numbers: convert the leaf, or leave it out. If the state "
            "holds functions and settings too, say which leaves are arrays, as in `arrays=equinox.is_array`."
        ) from error


class PartsCopy:
    """A copy of this process's parts of a state, that later changes of the state do not affect.

    Everything is copied at once; of processes that hold the same block of a leaf, one copies it.
    """

    def __init__(self, state: Any, digest: PendingDigest) -> None:
        leaves = jax.tree.leaves(state)
        pieces = Pieces.of_arrays(leaves)
        mine = pieces.split(leaves)
        for array in mine:
            begin_copy(array)
        self.skeleton = skeleton(state)
        self.arrays = stored_arrays(state)
        self.digest = digest
        self._parts: list[tuple[Part, np.ndarray]] = [
            (part, on_host(array)) for part, array in zip(pieces.parts, mine, strict=True)
        ]

    def take(self) -> Iterator[tuple[Part, np.ndarray]]:
        """The parts, each forgotten as it is taken."""
        while self._parts:
            yield self._parts.pop(0)
