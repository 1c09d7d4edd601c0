"""This group's contributions to one step, summed as far as the tree allows.

Theory of operation. A group computes one shard after another and adds each contribution here. As soon as both
children of a node are present they are merged, left + right, into one partial sum, so a group holds (and sends)
as few nodes as its set of shards permits.

Invariants:
- A contribution is added once, and an exchange never changes it: it only reads. When an attempt is aborted, the group
  adds the shards that it was given in the new quorum and exchanges again.
- A single contribution is kept in the leaves' own dtype, which is exact and, for half precisions, half the
  bytes on the wire. A partial sum is kept in the accumulation dtype, so it is rounded once, at the very end.
- `add` changes nothing if it raises: leaves are checked before anything is merged.
- The arrays passed to `add` are read for as long as their node is held (`_node_values.py`): they must not be donated
  or written to. Numpy arrays are copied, since the caller may write to them.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._arrays._memory import aligned_empty, leaves_of, result_regions
from jaxft._errors import ConfigurationError
from jaxft._exchange._node_values import Loose, NodeValues, merged
from jaxft._exchange._reduce import BLOCK_ELEMENTS
from jaxft._exchange._sums import combine_into
from jaxft._exchange._tree import Node, parent, root

if TYPE_CHECKING:
    import jax


class Partials:
    """The contributions of one group to one step, in which the whole job computes `shards` shards."""

    def __init__(self, layout: Layout, shards: int) -> None:
        self.layout = layout
        self.shards = shards
        self._values: dict[Node, NodeValues] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes held: the cover of the shards that were added."""
        return tuple(sorted(self._values))

    def has(self, shard: int) -> bool:
        return any(node.start <= shard < node.stop for node in self._values)

    def part(self, node: Node, region: int, start: int, stop: int) -> np.ndarray:
        """The elements [start, stop) of a region of a held node, as one flat array. Read-only."""
        return self._values[node].part(region, start, stop)

    def pieces(self, node: Node, region: int) -> list[tuple[int, np.ndarray]]:
        """What lies together of a region of a held node, in order, each with its offset. Between them is zero."""
        return self._values[node].pieces(region)

    def select(self, layout: Layout, picks: Sequence[tuple[int, tuple[slice, ...]]]) -> "Partials":
        """The same nodes, of some blocks of the leaves only. Shares the memory of blocks that lie together.

        Args:
            layout: the layout of the blocks.
            picks: for each block the number of its leaf, and where in the leaf it lies.
        """
        found = Partials(layout, self.shards)
        for node, values in self._values.items():
            blocks = [
                np.ascontiguousarray(self._leaf(values, leaf)[index]).reshape(-1) for leaf, index in picks
            ]
            found._values[node] = Loose(layout, blocks, summed=node.size > 1)
        return found

    def _leaf(self, values: NodeValues, number: int) -> np.ndarray:
        extent = self.layout.extents[number]
        flat = values.part(extent.region, extent.offset, extent.stop)
        return flat.reshape(self.layout.specs[number].shape)

    def add(self, shard: int, leaves: "Sequence[np.ndarray | jax.Array]") -> None:
        """Add a shard's contribution, and merge every node that is complete.

        Raises:
            ConfigurationError: the leaves do not match the layout. Nothing was added.
        """
        assert 0 <= shard < self.shards
        assert not self.has(shard), f"shard {shard} was already added"
        node = Node(shard, shard + 1)
        self._values[node] = Loose(self.layout, _flat(self.layout, leaves))
        while node != root(self.shards):
            above = parent(node, self.shards)
            left, right = above.children
            if left not in self._values or right not in self._values:
                return
            self._values[above] = merged(self.layout, self._values.pop(left), self._values.pop(right))
            node = above

    def mean_alone(self) -> list[np.ndarray]:
        """The means and sums over all shards, in new buffers. Only if this group holds every shard."""
        result = result_regions(self.layout)
        self.mean_into(result)
        return leaves_of(self.layout, result)

    def mean_into(self, result: Sequence[np.ndarray]) -> None:
        """As `mean_alone`, into one array for each region."""
        whole = root(self.shards)
        assert self.nodes == (whole,), f"holds {self.nodes} of {whole}"
        for number, (region, out) in enumerate(zip(self.layout.regions, result, strict=True)):
            for start in range(0, region.size, BLOCK_ELEMENTS):
                stop = min(start + BLOCK_ELEMENTS, region.size)
                total = self.part(whole, number, start, stop)
                combine_into(out[start:stop], {whole: total}, self.shards, region)


def _flat(layout: Layout, leaves: "Sequence[np.ndarray | jax.Array]") -> list[np.ndarray]:
    """The leaves on the host, flat and contiguous; copied only if they are not so already."""
    if len(leaves) != len(layout.specs):
        raise ConfigurationError(
            f"A contribution has {len(leaves)} leaves, but the exchange was laid out for {len(layout.specs)}. "
            "Every call of the step must pass the same leaves."
        )
    for leaf, spec in zip(leaves, layout.specs, strict=True):
        _check(leaf, spec)
    for leaf in leaves if _on_accelerator(leaves) else ():
        if not isinstance(leaf, np.ndarray | np.generic) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()  # so that copies from a device overlap
    return [_on_host(leaf) for leaf in leaves]


def _on_accelerator(leaves: "Sequence[np.ndarray | jax.Array]") -> bool:
    """Whether the leaves, which one program made, are in the memory of an accelerator."""
    if not leaves or isinstance(leaves[0], np.ndarray | np.generic):
        return any(not isinstance(leaf, np.ndarray | np.generic) for leaf in leaves)
    return next(iter(leaves[0].sharding.device_set)).platform != "cpu"


def _check(leaf: "np.ndarray | jax.Array", spec: LeafSpec) -> None:
    # Compare dtypes, not their names: numpy builds the name again on each access.
    if tuple(leaf.shape) != spec.shape or leaf.dtype != _dtype(spec.dtype):
        raise ConfigurationError(
            f"Leaf {spec.path!r} has shape {tuple(leaf.shape)} and dtype {leaf.dtype.name}, but the exchange "
            f"was laid out for {spec.shape} and {spec.dtype}. Every call of the step must pass the same "
            "shapes and dtypes."
        )


_dtype = functools.cache(np.dtype)


def _on_host(leaf: "np.ndarray | jax.Array") -> np.ndarray:
    """A leaf on the host, flat. Of an array on several devices, each piece is read once."""
    if isinstance(leaf, np.ndarray | np.generic):
        return np.array(leaf).reshape(-1)
    if not leaf.is_fully_addressable:
        raise ConfigurationError(
            f"A leaf of shape {leaf.shape} is spread over several processes, but each process can only contribute "
            "arrays on its own devices. Keep a group's arrays on the devices of its process."
        )
    if len(leaf.sharding.device_set) == 1:
        return np.ascontiguousarray(leaf).reshape(-1)
    flat = aligned_empty(leaf.size * leaf.dtype.itemsize).view(leaf.dtype)
    target = flat.reshape(leaf.shape)
    for piece in leaf.addressable_shards:
        if piece.replica_id == 0:
            target[piece.index] = np.asarray(piece.data)
    return flat
