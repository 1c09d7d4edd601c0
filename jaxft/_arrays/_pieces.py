"""What one process holds of arrays that are spread over the processes of its group.

A leaf on devices of several processes is split, for everything that travels between groups, into its *pieces*: the
distinct blocks that devices of this process hold, in the order of their offsets. Every other leaf is its only piece.
So an exchange and a heal handle lists of ordinary arrays; rank r of one group meets rank r of another, and nothing is
gathered. A block that several devices hold, such as a replicated leaf, is one piece in each process that holds it.

Groups can meet this way only if their ranks hold the same pieces: they must have equal meshes. The digest of the
layout of the pieces says whether they do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxft._arrays._layout import LeafSpec

Block = tuple[tuple[int, int], ...]  # start and stop in each dimension


@dataclass(frozen=True, slots=True)
class Spread:
    """One leaf: its shape, and its sharding if it is spread over several processes."""

    shape: tuple[int, ...]
    sharding: Sharding | None

    @staticmethod
    def of(shape: Sequence[int], sharding: Sharding | None) -> "Spread":
        apart = sharding is not None and not sharding.is_fully_addressable
        return Spread(tuple(shape), sharding if apart else None)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The distinct blocks that this process holds, in order; none if the leaf is not spread."""
        return tuple(sorted(set(self._by_device().values())))

    def split(self, leaf: Any) -> list[Any]:
        """The pieces of a leaf: arrays on one device each, or the leaf itself."""
        if self.sharding is None:
            return [leaf]
        found: dict[Block, Any] = {}
        for shard in leaf.addressable_shards:
            found.setdefault(_block(shard.index, self.shape), shard.data)
        return [found[block] for block in self.blocks]

    def join(self, pieces: Sequence[Any]) -> Any:
        """The leaf of these pieces, on this process's devices. All processes must call it."""
        if self.sharding is None:
            return pieces[0]
        by_block = dict(zip(self.blocks, pieces, strict=True))
        by_device = self._by_device()
        arrays = jax.device_put([by_block[block] for block in by_device.values()], list(by_device))
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)

    def _by_device(self) -> "dict[Any, Block]":
        if self.sharding is None:
            return {}
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        return {device: _block(index or (), self.shape) for device, index in indices.items()}


class Pieces:
    """How a list of leaves is split in this process."""

    def __init__(self, leaves: Sequence[Spread]) -> None:
        self._leaves = tuple(leaves)
        self._counts = [max(1, len(leaf.blocks)) for leaf in leaves]
        self.count = sum(self._counts)
        self.whole = all(leaf.sharding is None for leaf in leaves)  # nothing to split

    @staticmethod
    def of(leaves: Sequence[Any]) -> "Pieces":
        """How these arrays are split."""
        return Pieces([Spread.of(np.shape(leaf), getattr(leaf, "sharding", None)) for leaf in leaves])

    def split(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The pieces of all leaves, in order."""
        if self.whole:
            return leaves
        return [
            piece for spread, leaf in zip(self._leaves, leaves, strict=True) for piece in spread.split(leaf)
        ]

    def join(self, pieces: Sequence[Any]) -> Sequence[Any]:
        """The leaves of these pieces."""
        if self.whole:
            return pieces
        return [spread.join(own) for spread, own in zip(self._leaves, self._grouped(pieces), strict=True)]

    def specs(self, specs: Sequence[LeafSpec]) -> tuple[LeafSpec, ...]:
        """The types of the pieces of leaves of these types."""
        if self.whole:
            return tuple(specs)
        found: list[LeafSpec] = []
        for spread, spec in zip(self._leaves, specs, strict=True):
            if spread.sharding is None:
                found.append(spec)
            for block in spread.blocks:
                where = ",".join(f"{start}:{stop}" for start, stop in block)
                shape = tuple(stop - start for start, stop in block)
                found.append(replace(spec, path=f"{spec.path}[{where}]", shape=shape))
        return tuple(found)

    def _grouped(self, pieces: Sequence[Any]) -> Iterator[Sequence[Any]]:
        first = 0
        for count in self._counts:
            yield pieces[first : first + count]
            first += count
        assert first == len(pieces), f"{len(pieces)} pieces instead of {first}"


def _block(index: tuple[slice, ...], shape: Sequence[int]) -> Block:
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)
