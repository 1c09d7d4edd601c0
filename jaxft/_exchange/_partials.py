"""This group's contributions to one step, summed as far as the tree allows.

Theory of operation. A group computes one shard after another and adds each contribution here. As soon as both
children of a node are present they are merged, left + right, into one partial sum, so a group holds (and sends)
as few nodes as its set of shards permits.

Invariants:
- A contribution is added once, and an exchange never changes it: it only reads. When an attempt is aborted, the group
  adds the shards that it was given in the new quorum and exchanges again.
- A single contribution is kept in the leaves' own dtype, which is exact and, for half precisions, half the
  bytes on the wire. A partial sum is kept in the accumulation dtype, so it is rounded once, at the very end.
- `add` changes nothing if the leaves do not match the layout: they are checked before anything is merged.
- The arrays passed to `add` are read for as long as their node is held: they must not be donated
  or written to. Numpy arrays are copied, since the caller may write to them.

With `sums`, nodes stay on the accelerator that made them, and are merged there, until `start_copies`: the sums of
many shards are copied to the host once. Where the device has no room for that, the host adds.

The values of a single contribution are *loose*: its leaves stay in place, usually in the memory of the arrays that
`compute` made, and are read there. A part that spans several leaves, or padding, is gathered on demand, so that the
copy is as small as a chunk, is still in the cache when it is sent or summed, and delays nothing. The values of a sum
are *packed*: one flat array per region.
"""

import bisect
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from jaxft._arrays._device_sums import DeviceSums
from jaxft._arrays._host_copies import HostCopy, flat_on_host, host_copies, on_accelerator
from jaxft._arrays._layout import ALIGN_ELEMENTS, Extent, Layout, LeafSpec
from jaxft._arrays._memory import aligned_empty, leaves_of, result_regions
from jaxft._errors import ConfigurationError
from jaxft._exchange._reduce import BLOCK_ELEMENTS, add_by_lane, combine_by_lane, usual_floats
from jaxft._exchange._tree import Node, parent, root


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
        # An empty leaf has the offset of the next one.
        number = max(0, bisect.bisect_right(offsets, start) - 1)
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


# A leaf of a contribution. A HostCopy may be on its way.
Leaf = np.ndarray | jax.Array | HostCopy

_NUMPY = (np.ndarray, np.generic)
_NO_ARRAY = (*_NUMPY, HostCopy)  # of JAX


@dataclass
class _OnDevice:
    """The leaves of a node in the memory of an accelerator, and their copies on the host once these were started."""

    arrays: list[jax.Array]
    summed: bool
    copies: list[HostCopy] | None = None

    def start_copies(self) -> None:
        if self.copies is None:
            self.copies = host_copies(self.arrays)

    def on_host(self, layout: Layout) -> Loose:
        self.start_copies()
        assert self.copies is not None
        return Loose(layout, [copy.flat() for copy in self.copies], summed=self.summed)


class Partials:
    """The contributions of one group to one step, in which the whole job computes `shards` shards."""

    def __init__(self, layout: Layout, shards: int, sums: DeviceSums | None = None) -> None:
        layout.check_shards(shards)
        self.layout = layout
        self.shards = shards
        self.sums = sums
        self._values: dict[Node, NodeValues] = {}
        self._on_device: dict[Node, _OnDevice] = {}  # of the nodes that are not in `_values` yet

    @staticmethod
    def of_nodes(layout: Layout, shards: int, values: Mapping[Node, NodeValues]) -> "Partials":
        """Values of nodes that other members have a part in: the sums of a row."""
        found = Partials(layout, shards)
        found._values.update(values)
        return found

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes held: the cover of the shards that were added."""
        return tuple(sorted([*self._values, *self._on_device]))

    def has(self, shard: int) -> bool:
        return any(node.start <= shard < node.stop for node in (*self._values, *self._on_device))

    def start_copies(self) -> None:
        """Start to copy the values on devices to the host, without waiting for them."""
        for held in self._on_device.values():
            held.start_copies()

    def to_host(self) -> None:
        """Have all nodes in host memory: what comes next reads them. Waits for copies."""
        for node in list(self._on_device):
            self._values[node] = self._on_device[node].on_host(self.layout)
            del self._on_device[node]

    def part(self, node: Node, region: int, start: int, stop: int) -> np.ndarray:
        """The elements [start, stop) of a region of a node on the host, as one flat array. Read-only."""
        return self._values[node].part(region, start, stop)

    def pieces(self, node: Node, region: int) -> list[tuple[int, np.ndarray]]:
        """What lies together of a region of a node on the host, in order, each with its offset. The rest is zero."""
        return self._values[node].pieces(region)

    def select(self, layout: Layout, picks: Sequence[tuple[int, tuple[slice, ...]]]) -> "Partials":
        """The same nodes, of some blocks of the leaves, after `to_host`. Blocks that lie together share memory."""
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

    def add(self, shard: int, leaves: Sequence[Leaf]) -> None:
        """Add a shard's contribution, and merge every node that is complete.

        What stays on a device is not waited for.

        Raises:
            ConfigurationError: the leaves do not match the layout. Nothing was added.
        """
        assert 0 <= shard < self.shards
        assert not self.has(shard), f"shard {shard} was already added"
        node = Node(shard, shard + 1)
        _check_all(self.layout, leaves)
        arrays = [leaf for leaf in leaves if not isinstance(leaf, _NO_ARRAY)]
        if self.sums is not None and len(arrays) == len(leaves) and self.sums.have_room():
            self._on_device[node] = _OnDevice(arrays, summed=False)
        else:
            self._values[node] = Loose(self.layout, _flat(leaves))
        while node != root(self.shards):
            node = parent(node, self.shards)
            held = self.nodes
            if not all(child in held for child in node.children):
                return
            self._merge(node)

    def _merge(self, node: Node) -> None:
        """Add the two children of a node: on the device if both are there and it has room."""
        left, right = node.children
        if self._merged_on_device(node):
            return
        for child in node.children:
            if child in self._on_device:
                self._values[child] = self._on_device[child].on_host(self.layout)
                del self._on_device[child]
        with usual_floats():
            self._values[node] = merged(self.layout, self._values.pop(left), self._values.pop(right))

    def _merged_on_device(self, node: Node) -> bool:
        pair = [self._on_device.get(child) for child in node.children]
        left, right = pair
        if self.sums is None or left is None or right is None or left.copies is not None:
            return False  # a value that is copied to the host is not consumed
        made = self.sums.add(left.arrays, right.arrays, summed=(left.summed, right.summed))
        if made is None:
            return False
        for child in node.children:
            del self._on_device[child]
        self._on_device[node] = _OnDevice(made, summed=True)
        return True

    def mean_alone(self) -> list[np.ndarray]:
        """The means and sums over all shards, in new buffers. Only if this group holds every shard."""
        result = result_regions(self.layout)
        self.mean_into(result)
        return leaves_of(self.layout, result)

    def mean_into(self, result: Sequence[np.ndarray]) -> None:
        """As `mean_alone`, into one array for each region."""
        self.to_host()
        whole = root(self.shards)
        assert self.nodes == (whole,), f"holds {self.nodes} of {whole}"
        with usual_floats():
            for number, (region, out) in enumerate(zip(self.layout.regions, result, strict=True)):
                for start in range(0, region.size, BLOCK_ELEMENTS):
                    stop = min(start + BLOCK_ELEMENTS, region.size)
                    total = self.part(whole, number, start, stop)
                    combine_by_lane(out[start:stop], {whole: total}, self.shards, region)


def _check_all(layout: Layout, leaves: Sequence[Leaf]) -> None:
    if len(leaves) != len(layout.specs):
        raise ConfigurationError(
            f"A contribution has {len(leaves)} leaves, but the exchange was laid out for {len(layout.specs)}. "
            "Every call of the step must pass the same leaves."
        )
    for leaf, spec in zip(leaves, layout.specs, strict=True):
        _check(leaf, spec)


def _check(leaf: Leaf, spec: LeafSpec) -> None:
    # Compare dtypes, not their names: numpy builds the name again on each access.
    if tuple(leaf.shape) != spec.shape or leaf.dtype != _dtype(spec.dtype):
        raise ConfigurationError(
            f"Leaf {spec.path!r} has shape {tuple(leaf.shape)} and dtype {leaf.dtype.name}, but the exchange "
            f"was laid out for {spec.shape} and {spec.dtype}. Every call of the step must pass the same "
            "shapes and dtypes."
        )
    if not isinstance(leaf, _NO_ARRAY) and not leaf.is_fully_addressable:
        raise ConfigurationError(
            f"Leaf {spec.path!r} is spread over several processes, but each process can only contribute "
            "arrays on its own devices. Keep a group's arrays on the devices of its process."
        )


_dtype = functools.cache(np.dtype)


def _flat(leaves: Sequence[Leaf]) -> list[np.ndarray]:
    """The leaves on the host, flat and contiguous; copied only if they are not so already. Waits for them."""
    arrays = [leaf for leaf in leaves if not isinstance(leaf, _NO_ARRAY)]
    # One program has made them, so all are in memory of the same kind.
    copies = iter(host_copies(arrays) if arrays and on_accelerator(arrays[0]) else ())
    return [_flat_leaf(leaf, copies) for leaf in leaves]


def _flat_leaf(leaf: Leaf, copies: Iterator[HostCopy]) -> np.ndarray:
    if isinstance(leaf, _NUMPY):
        return np.array(leaf).reshape(-1)
    copy = leaf if isinstance(leaf, HostCopy) else next(copies, None)
    return flat_on_host(leaf) if copy is None else copy.flat()  # pyright: ignore[reportArgumentType]
