"""This group's contributions to one step, summed as far as the tree allows.

Theory of operation. A group computes one shard after another and adds each contribution here. As soon as both
children of a node are there they are merged, left + right, into one partial sum, so a group holds (and sends)
as few nodes as its set of shards permits.

Invariants:
- A contribution is added once, and never changed by an exchange: an exchange only reads. When an attempt is
  aborted the group adds the shards that it has been given in the new quorum and exchanges again.
- A single contribution is kept in the leaves' own dtype, which is exact and, for half precisions, half the
  bytes on the wire. A partial sum is kept in the accumulation dtype, so it is rounded once, at the very end.
- `add` changes nothing if it raises: leaves are checked before anything is merged.
- The arrays that `add` was given are read for as long as their node is held (`_node_values.py`): nobody may donate or
  rewrite them. Those of numpy are copied, for their owner may.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._arrays._memory import aligned_empty, empty_regions, leaves_of
from jaxft._errors import ConfigurationError
from jaxft._exchange._node_values import Held, Loose, merged
from jaxft._exchange._reduce import BLOCK_ELEMENTS, combine_into
from jaxft._exchange._tree import Node, parent, root

if TYPE_CHECKING:
    import jax


class Partials:
    """The contributions of one group to one step, of `shards` that the whole job computes."""

    def __init__(self, layout: Layout, shards: int) -> None:
        self.layout = layout
        self.shards = shards
        self._held: dict[Node, Held] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What is held: the cover of the shards that were added."""
        return tuple(sorted(self._held))

    def has(self, shard: int) -> bool:
        return any(node.start <= shard < node.stop for node in self._held)

    def part(self, node: Node, region: int, start: int, stop: int) -> np.ndarray:
        """The elements [start, stop) of a region of a held node, as one flat array. Do not write."""
        return self._held[node].part(region, start, stop)

    def add(self, shard: int, leaves: "Sequence[np.ndarray | jax.Array]") -> None:
        """Add a shard's contribution, and merge what is complete.

        Raises:
            ConfigurationError: the leaves are not those of the layout. Nothing has been added.
        """
        assert 0 <= shard < self.shards
        assert not self.has(shard), f"shard {shard} was added before"
        node = Node(shard, shard + 1)
        self._held[node] = Loose(self.layout, _flat(self.layout, leaves))
        while node != root(self.shards):
            above = parent(node, self.shards)
            left, right = above.children
            if left not in self._held or right not in self._held:
                return
            self._held[above] = merged(self.layout, self._held.pop(left), self._held.pop(right))
            node = above

    def mean_alone(self) -> list[np.ndarray]:
        """The means and sums over all shards, in buffers of their own. Only if this group holds every shard."""
        whole = root(self.shards)
        assert self.nodes == (whole,), f"holds {self.nodes} of {whole}"
        result = empty_regions(self.layout, [region.dtype for region in self.layout.regions])
        for number, (region, out) in enumerate(zip(self.layout.regions, result, strict=True)):
            for start in range(0, region.size, BLOCK_ELEMENTS):
                stop = min(start + BLOCK_ELEMENTS, region.size)
                total = self.part(whole, number, start, stop)
                combine_into(out[start:stop], {whole: total}, self.shards, region)
        return leaves_of(self.layout, result)


def _flat(layout: Layout, leaves: "Sequence[np.ndarray | jax.Array]") -> list[np.ndarray]:
    """The leaves on the host, flat and contiguous; without a copy where they lie so already."""
    if len(leaves) != len(layout.specs):
        raise ConfigurationError(
            f"A contribution of {len(leaves)} leaves was handed to an exchange that was laid out for "
            f"{len(layout.specs)}. Every call of the step must hand over the same leaves."
        )
    for leaf, spec in zip(leaves, layout.specs, strict=True):
        _check(leaf, spec)
    for leaf in leaves if _on_accelerator(leaves) else ():
        if not isinstance(leaf, np.ndarray | np.generic) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()  # so that copies from a device overlap
    return [_on_host(leaf) for leaf in leaves]


def _on_accelerator(leaves: "Sequence[np.ndarray | jax.Array]") -> bool:
    """Whether the leaves, which one program made, lie in the memory of a device that is not this machine's own."""
    if not leaves or isinstance(leaves[0], np.ndarray | np.generic):
        return any(not isinstance(leaf, np.ndarray | np.generic) for leaf in leaves)
    return next(iter(leaves[0].sharding.device_set)).platform != "cpu"


def _check(leaf: "np.ndarray | jax.Array", spec: LeafSpec) -> None:
    # Not by the dtype's name, which numpy puts together anew each time it is asked.
    if tuple(leaf.shape) != spec.shape or leaf.dtype != _dtype(spec.dtype):
        raise ConfigurationError(
            f"Leaf {spec.path!r} has shape {tuple(leaf.shape)} and dtype {leaf.dtype.name}, but the exchange "
            f"was laid out for {spec.shape} and {spec.dtype}. Every call of the step must hand over the same "
            "shapes and dtypes."
        )


_dtype = functools.cache(np.dtype)


def _on_host(leaf: "np.ndarray | jax.Array") -> np.ndarray:
    """A leaf from wherever it lies, flat. An array on several devices is read piece by piece, each once."""
    if isinstance(leaf, np.ndarray | np.generic):
        return np.array(leaf).reshape(-1)
    if not leaf.is_fully_addressable:
        raise ConfigurationError(
            f"A leaf of shape {leaf.shape} is spread over several processes; each process can only hand over "
            "arrays that lie on its own devices."
        )
    if len(leaf.sharding.device_set) == 1:
        return np.ascontiguousarray(leaf).reshape(-1)
    flat = aligned_empty(leaf.size * leaf.dtype.itemsize).view(leaf.dtype)
    target = flat.reshape(leaf.shape)
    for piece in leaf.addressable_shards:
        if piece.replica_id == 0:
            target[piece.index] = np.asarray(piece.data)
    return flat
