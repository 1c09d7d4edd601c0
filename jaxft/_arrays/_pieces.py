"""The blocks of its group's leaves that one process holds, and the parts that it exchanges and serves.

A leaf on devices of several processes is split into its *pieces*: the distinct blocks that devices of this process
hold, in the order of their offsets. Every other leaf is its only piece. A process contributes and serves the pieces
in its lanes (`_lanes.py`). The others belong to a lane of another process, which hands them over by an all-gather
within the group when leaves are joined again. It moves bytes, so no bit can change.

A group of one process has whole leaves. It cuts parts out of them only for peers that have several processes.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxft_protocol.ranks.lanes import Span, span_of, spans

from jaxft._arrays._handover import Handover
from jaxft._arrays._lanes import Block, Lanes, Part, block_of, lane_devices
from jaxft._arrays._layout import LeafSpec
from jaxft._arrays._leaf_types import LeafType, type_of
from jaxft._arrays._placement import place, sharding_of


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
        """The distinct blocks that this process holds, in order."""
        if self.sharding is None:
            return (tuple((0, size) for size in self.shape),)
        return tuple(sorted(set(self._by_device().values())))

    def blocks_of(self, rank: int) -> tuple[Block, ...]:
        """As `blocks`, of any process of the group."""
        if self.sharding is None:
            return self.blocks
        items = self.sharding.devices_indices_map(self.shape).items()
        return tuple(
            sorted({block_of(at or (), self.shape) for device, at in items if device.process_index == rank})
        )

    def split(self, leaf: Any) -> list[Any]:
        """The pieces of a leaf: arrays on one device each, or the leaf itself; without values, their types."""
        if self.sharding is None:
            return [leaf]
        if not isinstance(leaf, jax.Array) or leaf.is_deleted():
            return self._types(leaf)
        found: dict[Block, Any] = {}
        for shard in leaf.addressable_shards:
            index = shard.index[: len(self.shape)]  # a typed PRNG key's extends into its data
            found.setdefault(block_of(index, self.shape), shard.data)
        return [found[block] for block in self.blocks]

    def join(self, pieces: Sequence[Any]) -> Any:
        """The leaf of these pieces, on this process's devices. All processes must call it."""
        if self.sharding is None:
            return pieces[0]
        by_block = dict(zip(self.blocks, pieces, strict=True))
        by_device = self._by_device()
        arrays = jax.device_put([by_block[block] for block in by_device.values()], list(by_device))
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)

    def _types(self, leaf: Any) -> list[Any]:
        """As `split`, of a leaf without values: the type of each piece, on a device that holds it."""
        assert self.sharding is not None
        kind = self.sharding.memory_kind
        devices = {block: device for device, block in self._by_device().items()}
        return [
            jax.ShapeDtypeStruct(
                tuple(stop - start for start, stop in block),
                leaf.dtype,
                sharding=jax.sharding.SingleDeviceSharding(devices[block], memory_kind=kind),
            )
            for block in self.blocks
        ]

    def _by_device(self) -> "dict[Any, Block]":
        assert self.sharding is not None
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        return {device: block_of(index or (), self.shape) for device, index in indices.items()}


class Pieces:
    """How a list of leaves is split in this process."""

    def __init__(
        self, lanes: Lanes, devices: Sequence[Any], leaves: Sequence[Spread], *, rank: int, ranks: int
    ) -> None:
        self.lanes = lanes
        self.whole = ranks == 1  # nothing to split
        self.own = span_of(rank, ranks, lanes.count)
        self._devices = tuple(devices)
        self._leaves = tuple(leaves)

    @staticmethod
    def of_arrays(arrays: Sequence[Any]) -> "Pieces":
        """How these arrays are split in this process. All processes hold an array that was not placed explicitly."""
        shapes = [tuple(np.shape(array)) for array in arrays]
        shardings = list(map(sharding_of, arrays))
        devices = lane_devices(shardings) or lane_devices(None)
        lanes = Lanes.of(shapes, list(map(type_of, arrays)), shardings, devices)
        spread = [Spread.of(*pair) for pair in zip(shapes, shardings, strict=True)]
        return Pieces(lanes, devices, spread, rank=jax.process_index(), ranks=jax.process_count())

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The arrays of `split`, part by part."""
        return self.lanes.parts(self.own)

    @property
    def count(self) -> int:
        return len(self._leaves) if self.whole else len(self.parts)

    def split(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The parts of the leaves that belong to this process's lanes, lane by lane; the leaves if they are whole."""
        if self.whole:
            return leaves
        found = dict(zip(self._local, self._pieces(leaves), strict=True))
        return [found[part] for part in self.parts]

    def join(self, parts: Sequence[np.ndarray]) -> Sequence[Any]:
        """The leaves of these parts, on host memory or devices as programs take them. All processes must call it."""
        return parts if self.whole else self._joined(self._completed(parts))

    def place(
        self, parts: Sequence[np.ndarray], like: Sequence[Any], consumed: Collection[int] = ()
    ) -> Sequence[jax.Array]:
        """The leaves of these parts, placed like `like`. All processes must call it.

        The leaves of `like` whose numbers are in `consumed` give up their memory (see `place`).
        """
        if self.whole:
            return place(parts, like, consumed)
        made: list[jax.Array] = []
        completed = self._grouped(self._completed(parts))
        for number, (spread, own, leaf) in enumerate(zip(self._leaves, completed, like, strict=True)):
            pieces = spread.split(leaf)
            made.append(spread.join(place(own, pieces, range(len(pieces)) if number in consumed else ())))
        return made

    def specs(self, specs: Sequence[LeafSpec], span: Span | None = None) -> tuple[LeafSpec, ...]:
        """The types of the arrays of `split`, or of the parts of some lanes, for leaves of these types."""
        if self.whole and span is None:
            return tuple(specs)
        return self.lanes.specs(specs, span or self.own)

    def types(self, span: Span | None = None) -> list[LeafType]:
        """As `specs`: the types as they are sent."""
        if self.whole and span is None:
            return list(self.lanes.leaf_types)
        return self.lanes.types(span or self.own)

    def leaf_numbers(self, span: Span | None = None) -> list[int]:
        """As `types`: which leaf each of them is a part of."""
        if self.whole and span is None:
            return list(range(len(self._leaves)))
        return [part.leaf for part in self.lanes.parts(span or self.own)]

    def spans(self, sizes: Iterable[int]) -> tuple[Span, ...]:
        """This process's lanes, cut as groups of these numbers of processes divide theirs."""
        return spans(self.own, sizes, self.lanes.count)

    def picks(self, span: Span) -> list[tuple[int, tuple[slice, ...]]]:
        """For the parts of some of this process's lanes: which array of `split` they lie in, and where in it."""
        parts = self.lanes.parts(span)
        if self.whole:
            return [(part.leaf, part.index) for part in parts]
        return [(self._number[part], ()) for part in parts]

    def cut(self, arrays: Sequence[np.ndarray], span: Span) -> list[np.ndarray]:
        """The parts of some of this process's lanes, out of host arrays as `split` returns them."""
        return [arrays[number][index] for number, index in self.picks(span)]

    def gathered(self, parts: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Host arrays as `split` returns them, from the parts of all lanes of this process."""
        return self.lanes.whole(parts) if self.whole else parts

    @cached_property
    def _number(self) -> dict[Part, int]:
        return {part: number for number, part in enumerate(self.parts)}

    @cached_property
    def _local(self) -> tuple[Part, ...]:
        """Every block that this process holds, leaf by leaf."""
        return tuple(Part(number, block) for number, leaf in enumerate(self._leaves) for block in leaf.blocks)

    @cached_property
    def _handover(self) -> Handover:
        return Handover(self.lanes, self._devices)

    def _pieces(self, leaves: Sequence[Any]) -> list[Any]:
        return [
            piece for spread, leaf in zip(self._leaves, leaves, strict=True) for piece in spread.split(leaf)
        ]

    def _completed(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Every block that this process holds, from the parts of its lanes."""
        found = dict(zip(self.parts, map(np.asarray, parts), strict=True))
        self._handover.complete(found, self._local)
        return [found[part] for part in self._local]

    def _joined(self, pieces: Sequence[Any]) -> Sequence[Any]:
        return [spread.join(own) for spread, own in zip(self._leaves, self._grouped(pieces), strict=True)]

    def _grouped(self, pieces: Sequence[Any]) -> Iterator[Sequence[Any]]:
        first = 0
        for leaf in self._leaves:
            count = len(leaf.blocks)
            yield pieces[first : first + count]
            first += count
        assert first == len(pieces), f"{len(pieces)} pieces instead of {first}"
