"""How leaves are divided among the devices of a group, the same in every group of a job.

A *lane* is the blocks of all leaves on one device. Devices are counted process by process, so the lanes of a process
are consecutive. A *part* is a block of a leaf; each part belongs to exactly one lane, also if several devices hold
the block. So each part travels once between two groups. The division depends only on the blocks: groups of other
process counts divide leaves alike, which they check by comparing `digest`.

Lanes that lie in one process in each of several groups travel together, as a *span*.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jaxft_protocol.ranks.lanes import Span

from jaxft._arrays._layout import LeafSpec
from jaxft._arrays._leaf_types import LeafType

Block = tuple[tuple[int, int], ...]  # start and stop in each dimension
Held = Sequence[Block | None]  # the block of a leaf that each device holds, in the order of the lanes


@dataclass(frozen=True, slots=True)
class Part:
    """One block of one leaf."""

    leaf: int
    block: Block

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.block)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.block)

    def type_of(self, leaf: LeafType) -> LeafType:
        """The type of this part of a leaf. The data of a PRNG key have further dimensions, which are not divided."""
        return LeafType((*self.shape, *leaf.shape[len(self.block) :]), leaf.dtype)


class Lanes:
    """The division of a list of leaves."""

    def __init__(self, held: Sequence[Held], types: Sequence[LeafType], count: int) -> None:
        self.held = tuple(map(tuple, held))
        self.leaf_types = tuple(types)
        self.count = count

    @staticmethod
    def of(
        shapes: Sequence[tuple[int, ...]],
        types: Sequence[LeafType],
        shardings: Sequence[Sharding | None],
        devices: Sequence[Any],
    ) -> "Lanes":
        """Divide leaves.

        Args:
            shapes: the shapes of the leaves.
            types: their types, as they are sent: the data of a PRNG key have further dimensions.
            shardings: where each leaf lies. A leaf on one device, or anywhere, counts as held by all.
            devices: all devices of the group, from `lane_devices`.
        """
        count = max(1, len(devices))
        held = [_held(*pair, devices, count) for pair in zip(shapes, shardings, strict=True)]
        return Lanes(held, types, count)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.held).encode()).hexdigest()[:16]

    def parts(self, span: Span) -> tuple[Part, ...]:
        """The parts that belong to these lanes, lane by lane."""
        return tuple(part for parts in self.by_lane[span.start : span.stop] for part in parts)

    def specs(self, specs: Sequence[LeafSpec], span: Span) -> tuple[LeafSpec, ...]:
        """The types of these lanes' parts of leaves of these types."""
        return tuple(_spec_of(part, specs[part.leaf]) for part in self.parts(span))

    def types(self, span: Span) -> list[LeafType]:
        """The types, as they are sent, of these lanes' parts."""
        return [self.type_of(part) for part in self.parts(span)]

    def type_of(self, part: Part) -> LeafType:
        return part.type_of(self.leaf_types[part.leaf])

    def whole(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Whole leaves, in new memory, from the parts of all lanes."""
        leaves = [np.empty(kind.shape, np.dtype(kind.dtype)) for kind in self.leaf_types]
        for part, array in zip(self.parts(Span(0, self.count)), parts, strict=True):
            leaves[part.leaf][part.index] = array
        return leaves

    @cached_property
    def by_lane(self) -> tuple[tuple[Part, ...], ...]:
        """The parts that belong to each lane."""
        found: list[list[Part]] = [[] for _ in range(self.count)]
        shared_bytes = [0] * self.count
        for number, blocks in enumerate(self.held):
            for block, lanes in holders(blocks).items():
                part = Part(number, block)
                lane = min(lanes, key=lambda lane: shared_bytes[lane])
                if len(lanes) > 1:
                    shared_bytes[lane] += self.type_of(part).size_bytes
                found[lane].append(part)
        return tuple(map(tuple, found))


def holders(blocks: Held) -> dict[Block, list[int]]:
    """The lanes that hold each block of a leaf."""
    found: dict[Block, list[int]] = {}
    for lane, block in enumerate(blocks):
        if block is not None:
            found.setdefault(block, []).append(lane)
    return found


def lane_devices(shardings: Iterable[Sharding | None] | None) -> tuple[Any, ...]:
    """The devices of a group whose leaves lie so, in the order of the lanes; empty if no leaf is on several.

    None: all devices.
    """
    found: set[Any] = set(jax.devices()) if shardings is None else set()
    for sharding in shardings or ():
        if sharding is not None and len(sharding.device_set) > 1:
            found |= sharding.device_set
    return tuple(sorted(found, key=lambda device: (device.process_index, device.id)))


def block_of(index: tuple[slice, ...], shape: Sequence[int]) -> Block:
    bounds = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in bounds)


def _held(shape: tuple[int, ...], sharding: Sharding | None, devices: Sequence[Any], count: int) -> Held:
    if sharding is None or len(sharding.device_set) == 1:
        return (tuple((0, size) for size in shape),) * count
    indices = sharding.devices_indices_map(shape)
    return tuple(block_of(indices[each] or (), shape) if each in indices else None for each in devices)


def _spec_of(part: Part, spec: LeafSpec) -> LeafSpec:
    if part.shape == spec.shape:
        return spec
    where = ",".join(f"{start}:{stop}" for start, stop in part.block)
    return replace(spec, path=f"{spec.path}[{where}]", shape=part.shape)


def device_order(sharding: Sharding) -> tuple[int, ...]:
    """The numbers of a sharding's devices, in the order of the mesh where there is one.

    A program takes all its inputs on the same devices in one order.
    """
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return tuple(device.id for device in sharding.mesh.devices.flat)
    return tuple(sorted(device.id for device in sharding.device_set))
