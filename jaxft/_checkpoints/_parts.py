"""What one process of several holds of a state, in host memory, to be saved with what the others hold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from jaxft._arrays._device_digest import PendingDigest
from jaxft._arrays._lanes import Part
from jaxft._arrays._leaf_types import LeafType, type_of
from jaxft._arrays._pieces import Pieces
from jaxft._checkpoints._host import begin_copy, on_host, skeleton


@dataclass(frozen=True, slots=True)
class Stored:
    """One array of a checkpoint: its name on disk, and its type; a key is stored as its key data."""

    name: str
    type: LeafType


def stored_arrays(state: Any) -> list[Stored]:
    """The arrays of a state, in the order of its leaves."""
    names: dict[int, str] = {}
    for path, number in jax.tree_util.tree_leaves_with_path(skeleton(state)):
        names[number] = jax.tree_util.keystr(path, simple=True, separator=".")
    return [Stored(names[number], type_of(leaf)) for number, leaf in enumerate(jax.tree.leaves(state))]


def check_names(arrays: Sequence[Stored]) -> None:
    """Raise ValueError if two arrays have the same name on disk."""
    found = sorted(one.name for one in arrays)
    if same := [one for one, other in pairwise(found) if one == other]:
        raise ValueError(
            f"two leaves of the state have the name {same[0]!r} on disk, where the keys of a path are joined by "
            "dots: rename one of them"
        )


class PartsCopy:
    """A copy of this process's parts of a state, that later changes of the state do not affect.

    Everything is copied at once; every block of a leaf that several processes hold is copied by one of them.

    Args:
        state: the state.
        digest: of the whole state, which its devices may still be computing.
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
