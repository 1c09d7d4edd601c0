"""Hands each block of a leaf from the process of its lane to the others of the group that hold it.

All blocks that are handed over between the same sets of devices go as one run of bytes per device, in one all-gather
among each set. It calculates nothing, so values of any type keep their bits.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxft._arrays._host_copies import no_mesh
from jaxft._arrays._lanes import Lanes, Part, holders

# For each block of a leaf, the lanes that hold it.
_Sets = tuple[tuple[int, ...], ...]


class Handover:
    """For leaves divided by `lanes`, on these devices, in the order of the lanes."""

    def __init__(self, lanes: Lanes, devices: Sequence[Any]) -> None:
        self._lanes = lanes
        self._devices = devices

    def complete(self, found: dict[Part, np.ndarray], wanted: Sequence[Part]) -> None:
        """Add the wanted parts that are missing. All processes of the group call it, with parts of equal leaves."""
        for round_ in self._rounds:
            round_.run(found)
        missing = [part for part in wanted if part not in found]
        assert not missing, f"no lane has handed over {missing}"

    @cached_property
    def _rounds(self) -> "list[_Round]":
        by_sets: dict[_Sets, set[int]] = {}
        for leaf, blocks in enumerate(self._lanes.held):
            sets = tuple(map(tuple, holders(blocks).values()))
            if any(self._crosses(lanes) for lanes in sets):
                by_sets.setdefault(sets, set()).add(leaf)
        return [
            _Round(
                [[self._devices[lane] for lane in lanes] for lanes in sets],
                [
                    [[part for part in self._lanes.by_lane[lane] if part.leaf in leaves] for lane in lanes]
                    for lanes in sets
                ],
                self._lanes,
            )
            for sets, leaves in sorted(by_sets.items())
        ]

    def _crosses(self, lanes: Sequence[int]) -> bool:
        return len({self._devices[lane].process_index for lane in lanes}) > 1


@dataclass(frozen=True)
class _Round:
    """One all-gather: among each set of devices, each with the parts that belong to its lane."""

    devices: Sequence[Sequence[Any]]
    parts: Sequence[Sequence[Sequence[Part]]]
    lanes: Lanes

    @cached_property
    def size_bytes(self) -> int:
        """The bytes of the device that has most."""
        return max(1, *(sum(map(self._bytes, own)) for parts in self.parts for own in parts))

    def run(self, found: dict[Part, np.ndarray]) -> None:
        """Add the parts of other processes."""
        mesh = Mesh(np.array(self.devices), ("block", "copy"))
        spread = NamedSharding(mesh, PartitionSpec("block", "copy"))
        gathered = NamedSharding(mesh, PartitionSpec("block"))
        own = [
            jax.device_put(self._packed(parts, found), device)
            for devices, all_parts in zip(self.devices, self.parts, strict=True)
            for device, parts in zip(devices, all_parts, strict=True)
            if device.process_index == jax.process_index()
        ]
        if not own:
            return  # no device of this process takes part
        shape = (len(self.devices), len(self.devices[0]), self.size_bytes)
        made = jax.make_array_from_single_device_arrays(shape, spread, own)
        with no_mesh():  # the program's may have another order of devices
            results = _gather(gathered)(made).addressable_shards
        for shard in results:
            number = shard.index[0].start or 0
            for parts, run in zip(self.parts[number], np.asarray(shard.data)[0], strict=True):
                self._unpack(parts, run, found)

    def _packed(self, parts: Sequence[Part], found: Mapping[Part, np.ndarray]) -> np.ndarray:
        run = np.zeros((1, 1, self.size_bytes), np.uint8)
        at = 0
        for part in parts:
            size = self._bytes(part)
            run[0, 0, at : at + size] = np.ascontiguousarray(found[part]).reshape(-1).view(np.uint8)
            at += size
        return run

    def _unpack(self, parts: Sequence[Part], run: np.ndarray, found: dict[Part, np.ndarray]) -> None:
        at = 0
        for part in parts:
            size, leaf = self._bytes(part), self.lanes.type_of(part)
            if part not in found:
                # A copy: the parts are not aligned in the run.
                found[part] = run[at : at + size].copy().view(np.dtype(leaf.dtype)).reshape(leaf.shape)
            at += size

    def _bytes(self, part: Part) -> int:
        return self.lanes.type_of(part).size_bytes


@functools.cache
def _gather(sharding: NamedSharding) -> Any:
    return jax.jit(lambda run: run, out_shardings=sharding)
