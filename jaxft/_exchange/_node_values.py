"""The values that a group holds of one node of the tree, in the order of the layout.

A single contribution is *loose*: its leaves stay in place, usually in the memory of the arrays that `compute` made,
and are read there. A part that spans several leaves, or padding, is gathered on demand, so that the copy is as small
as a chunk, is still in the cache when it is sent or summed, and delays nothing. A sum is *packed*: one flat array per
region.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxft._arrays._layout import ALIGN_ELEMENTS, Extent, Layout
from jaxft._arrays._memory import aligned_empty
from jaxft._exchange._reduce import add_by_lane


class NodeValues(Protocol):
    """The values of one node."""

    def dtype(self, region: int) -> np.dtype:
        """The dtype of a region's values."""
        ...

    def part(self, region: int, start: int, stop: int) -> np.ndarray:
        """The elements [start, stop) of a region as one flat array. Read-only."""
        ...

    def pieces(self, region: int) -> list[tuple[int, np.ndarray]]:
        """What lies together in memory, in order, each with its offset in the region. Between them is zero."""
        ...


@dataclass(frozen=True, slots=True)
class Packed:
    regions: tuple[np.ndarray, ...]

    def dtype(self, region: int) -> np.dtype:
        return self.regions[region].dtype

    def part(self, region: int, start: int, stop: int) -> np.ndarray:
        return self.regions[region][start:stop]

    def pieces(self, region: int) -> list[tuple[int, np.ndarray]]:
        return [(0, self.regions[region])]


@dataclass(frozen=True, slots=True)
class Sliced:
    """A part of each region, in place of all of it.

    Attributes:
        firsts: where in its region each part begins.
        parts: the parts, flat.
    """

    firsts: tuple[int, ...]
    parts: tuple[np.ndarray, ...]

    def dtype(self, region: int) -> np.dtype:
        return self.parts[region].dtype

    def part(self, region: int, start: int, stop: int) -> np.ndarray:
        first = self.firsts[region]
        assert first <= start <= stop <= first + self.parts[region].size
        return self.parts[region][start - first : stop - first]

    def pieces(self, region: int) -> list[tuple[int, np.ndarray]]:
        return [(self.firsts[region], self.parts[region])]


class Loose:
    """Leaves in place. They must not be written to while this object lives."""

    def __init__(self, layout: Layout, leaves: Sequence[np.ndarray], *, summed: bool = False) -> None:
        """`leaves` are flat and contiguous, in the order of the layout; `summed`: of the dtype of sums."""
        regions = layout.regions
        self._dtypes = [np.dtype(region.sum_dtype if summed else region.dtype) for region in regions]
        self._offsets: list[list[int]] = [[] for _ in layout.regions]
        self._leaves: list[list[np.ndarray]] = [[] for _ in layout.regions]
        for extent, leaf in zip(layout.extents, leaves, strict=True):
            self._offsets[extent.region].append(extent.offset)
            self._leaves[extent.region].append(leaf)

    def dtype(self, region: int) -> np.dtype:
        return self._dtypes[region]

    def part(self, region: int, start: int, stop: int) -> np.ndarray:
        offsets, leaves = self._offsets[region], self._leaves[region]
        number = max(
            0, bisect.bisect_right(offsets, start) - 1
        )  # an empty leaf has the offset of the next one
        offset, leaf = offsets[number], leaves[number]
        if stop - offset <= leaf.size:
            return leaf[start - offset : stop - offset]
        return self._gather(region, number, start, stop)

    def leaves(self, region: int) -> list[np.ndarray]:
        """All leaves of a region, also empty ones, flat."""
        return self._leaves[region]

    def pieces(self, region: int) -> list[tuple[int, np.ndarray]]:
        pairs = zip(self._offsets[region], self._leaves[region], strict=True)
        return [(offset, leaf) for offset, leaf in pairs if leaf.size]

    def _gather(self, region: int, number: int, start: int, stop: int) -> np.ndarray:
        """Copy from the leaves starting at `number`, with zeros for the padding between them."""
        dtype = self.dtype(region)
        offsets, leaves = self._offsets[region], self._leaves[region]
        padding = np.zeros(ALIGN_ELEMENTS, dtype)
        pieces: list[np.ndarray] = []
        for offset, leaf, following in zip(
            offsets[number:], leaves[number:], [*offsets[number + 1 :], stop], strict=True
        ):
            if offset >= stop:
                break
            pieces.append(leaf[max(0, start - offset) : stop - offset])
            pieces.append(padding[: max(0, min(stop, following) - max(start, offset + leaf.size))])
        out = aligned_empty((stop - start) * dtype.itemsize).view(dtype)
        return np.concatenate(pieces, out=out)


def merged(layout: Layout, left: NodeValues, right: NodeValues) -> Packed:
    """Add two nodes, in the dtype of sums. If the left one is a sum itself, its memory is reused for the result."""
    return Packed(tuple(_merged(layout, number, left, right) for number in range(len(layout.regions))))


def _merged(layout: Layout, number: int, left: NodeValues, right: NodeValues) -> np.ndarray:
    region = layout.regions[number]
    if isinstance(left, Packed):
        out = left.regions[number]
    else:
        out = aligned_empty(region.size * region.sum_item_bytes).view(region.sum_dtype)
    if isinstance(left, Packed) and isinstance(right, Packed):
        add_by_lane(out, [0], [out], [right.regions[number]], region)
        return out
    extents = [extent for extent in layout.extents if extent.region == number]
    lefts, rights = (_leaves(node, number, extents) for node in (left, right))
    add_by_lane(out, [extent.offset for extent in extents], lefts, rights, region)
    if not isinstance(left, Packed):  # of a sum, the padding is zero already
        for gap in layout.gaps():
            if gap.region == number:
                out[gap.offset : gap.stop] = 0
    return out


def _leaves(node: NodeValues, region: int, extents: Sequence[Extent]) -> list[np.ndarray]:
    if isinstance(node, Loose):
        return node.leaves(region)
    return [node.part(region, extent.offset, extent.stop) for extent in extents]
