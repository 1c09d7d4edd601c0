"""This group's contributions to one step, summed as far as the tree allows.

Theory of operation. A group computes one shard after another and adds each contribution here. As soon as both
children of a node are there they are merged, left + right, into one partial sum, so a group holds (and sends)
as few nodes as its set of shards permits.

Invariants:
- A contribution is added once, and never changed by an exchange: an exchange only reads. When an attempt is
  aborted the group adds the shards that it has been given in the new quorum and exchanges again.
- A single contribution is kept in the leaves' own dtype, which is exact and, for half precisions, half the
  bytes on the wire. A partial sum is kept in the accumulation dtype, so it is rounded once, at the very end.
- `add` changes nothing if it raises: leaves are packed into a buffer of their own before anything is merged.

Left out: reading a leaf that is one contiguous host view where it lies, without packing it. Everything that
leaves this class goes through `buffers`, so that can change here alone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxft._errors import ConfigurationError
from jaxft._exchange._layout import Layout, LeafSpec
from jaxft._exchange._memory import aligned_empty, empty_regions, leaves_of
from jaxft._exchange._sum import add_into, combine_into
from jaxft._exchange._tree import Node, parent, root

if TYPE_CHECKING:
    import jax


class Partials:
    """The contributions of one group to one step, of `shards` that the whole job computes."""

    def __init__(self, layout: Layout, shards: int) -> None:
        self.layout = layout
        self.shards = shards
        self._held: dict[Node, tuple[np.ndarray, ...]] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What is held: the cover of the shards that were added."""
        return tuple(sorted(self._held))

    def has(self, shard: int) -> bool:
        return any(node.start <= shard < node.stop for node in self._held)

    def buffers(self, node: Node) -> tuple[np.ndarray, ...]:
        """The packed values of a held node, one flat array for each region of the layout. Do not write."""
        return self._held[node]

    def add(self, shard: int, leaves: "Sequence[np.ndarray | jax.Array]") -> None:
        """Add a shard's contribution, copied, and merge what is complete.

        Raises:
            ConfigurationError: the leaves are not those of the layout. Nothing has been added.
        """
        assert 0 <= shard < self.shards
        assert not self.has(shard), f"shard {shard} was added before"
        node = Node(shard, shard + 1)
        self._held[node] = _pack(self.layout, leaves)
        while node != root(self.shards):
            above = parent(node, self.shards)
            left, right = above.children
            if left not in self._held or right not in self._held:
                return
            self._held[above] = self._merge(self._held.pop(left), self._held.pop(right))
            node = above

    def mean_alone(self) -> list[np.ndarray]:
        """The means and sums over all shards, in buffers of their own. Only if this group holds every shard."""
        whole = root(self.shards)
        assert self.nodes == (whole,), f"holds {self.nodes} of {whole}"
        result = empty_regions(self.layout, [region.dtype for region in self.layout.regions])
        for region, out, total in zip(self.layout.regions, result, self._held[whole], strict=True):
            combine_into(out, {whole: total}, self.shards, region)
        return leaves_of(self.layout, result)

    def _merge(self, left: tuple[np.ndarray, ...], right: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        merged: list[np.ndarray] = []
        for region, one, other in zip(self.layout.regions, left, right, strict=True):
            out = one
            if one.dtype != np.dtype(region.sum_dtype):
                out = aligned_empty(region.size * region.sum_item_bytes).view(region.sum_dtype)
            add_into(out, one, other)
            merged.append(out)
        return tuple(merged)


def _pack(layout: Layout, leaves: "Sequence[np.ndarray | jax.Array]") -> tuple[np.ndarray, ...]:
    if len(leaves) != len(layout.specs):
        raise ConfigurationError(
            f"A contribution of {len(leaves)} leaves was handed to an exchange that was laid out for "
            f"{len(layout.specs)}. Every call of the step must hand over the same leaves."
        )
    for leaf, spec in zip(leaves, layout.specs, strict=True):
        _check(leaf, spec)
    regions = empty_regions(layout, [region.dtype for region in layout.regions])
    for leaf, target in zip(leaves, leaves_of(layout, regions), strict=True):
        _copy(leaf, target)
    for gap in layout.gaps():
        regions[gap.region][gap.offset : gap.stop] = 0
    return regions


def _check(leaf: "np.ndarray | jax.Array", spec: LeafSpec) -> None:
    if tuple(leaf.shape) != spec.shape or leaf.dtype.name != spec.dtype:
        raise ConfigurationError(
            f"Leaf {spec.path!r} has shape {tuple(leaf.shape)} and dtype {leaf.dtype.name}, but the exchange "
            f"was laid out for {spec.shape} and {spec.dtype}. Every call of the step must hand over the same "
            "shapes and dtypes."
        )


def _copy(leaf: "np.ndarray | jax.Array", target: np.ndarray) -> None:
    """Copy a leaf from wherever it lies. An array on several devices is read piece by piece, each once."""
    if isinstance(leaf, np.ndarray | np.generic):
        np.copyto(target, leaf)
        return
    if not leaf.is_fully_addressable:
        raise ConfigurationError(
            f"A leaf of shape {leaf.shape} is spread over several processes; each process can only hand over "
            "arrays that lie on its own devices."
        )
    if len(leaf.sharding.device_set) == 1:
        np.copyto(target, np.asarray(leaf))
        return
    for piece in leaf.addressable_shards:
        if piece.replica_id == 0:
            target[piece.index] = np.asarray(piece.data)
