"""The exchanges of a step: their order, their buckets, and where elements lie.

An exchange takes a *bucket* of a program's contributions. On an accelerator contributions have to be copied to the
host, and means to the devices. In several buckets that takes place during the exchange: while one is exchanged, the
next is copied to the host, and the means of the last to the devices. On CPU there is nothing to copy, and in each
further exchange all members wait for each other once more.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxft_protocol.ranks.lanes import Span

from jaxft._arrays._host_copies import is_accelerator
from jaxft._arrays._lanes import Lanes, lane_devices
from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._arrays._leaf_types import LeafType, type_of
from jaxft._arrays._pieces import Pieces, Spread
from jaxft._programs._compile import Executables
from jaxft._programs._partition import Cut

# The most buckets of one program.
MOST_BUCKETS = 8
# The fewest bytes of a bucket, if there are several.
BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Contributions of one program for one exchange, from `first` up to but not including `stop`."""

    program: int
    first: int
    stop: int


@dataclass(frozen=True, eq=False)
class Stages:
    """The exchanges of a step, in order. Nothing here runs a program.

    Attributes:
        contribution: the types of all exchanged values.
        cut: the step.
        state_specs: the types of the leaves of the state.
        left: how the contributions of each program leave it.
        devices: of the group, in the order of the lanes; empty if there is only one.
        on_accelerator: whether contributions are made in the memory of accelerators.
    """

    contribution: tuple[LeafSpec, ...]
    cut: Cut
    state_specs: Sequence[jax.ShapeDtypeStruct]
    left: Sequence[Sequence[Any]]
    devices: tuple[Any, ...]
    on_accelerator: bool
    _layouts: dict[tuple[int, Span | None], Layout] = field(default_factory=dict, init=False)

    @staticmethod
    def of(
        contribution: tuple[LeafSpec, ...],
        cut: Cut,
        state_specs: Sequence[jax.ShapeDtypeStruct],
        executables: Executables,
    ) -> "Stages":
        """The exchanges of compiled programs."""
        left = [program.output_shardings for program in executables.computes]
        lanes = lane_devices([*(spec.sharding for spec in state_specs), *executables.pins])
        devices = lanes or (lane_devices(None) if jax.process_count() > 1 else ())
        made_on = [device for sharding in jax.tree.leaves(left[0])[:1] for device in sharding.device_set]
        return Stages(contribution, cut, state_specs, left, devices, any(map(is_accelerator, made_on)))

    @property
    def count(self) -> int:
        """How many exchanges a step has."""
        return len(self.buckets)

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of all exchanged values: groups that agree on it exchange the same."""
        return Layout.of(self.contribution)

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The bucket of each exchange. Groups that have the same programs on the same kind of device divide alike."""
        rest = iter(self.contribution)
        found: list[Bucket] = []
        for number, stage in enumerate(self.cut.stages):
            specs = list(itertools.islice(rest, len(stage.contributions)))
            found += divided(
                number, [Layout.of([spec]).size_bytes for spec in specs], on_accelerator=self.on_accelerator
            )
        return tuple(found)

    @functools.cached_property
    def specs(self) -> tuple[tuple[LeafSpec, ...], ...]:
        """The contribution, exchange by exchange."""
        rest = iter(self.contribution)
        return tuple(tuple(itertools.islice(rest, bucket.stop - bucket.first)) for bucket in self.buckets)

    def bucket(self, stage: int, made: Sequence[Any]) -> Sequence[Any]:
        """The bucket of one exchange, out of all contributions of its program."""
        bucket = self.buckets[stage]
        return made[bucket.first : bucket.stop]

    def begins(self, stage: int) -> bool:
        """Whether a program is run before an exchange; otherwise the one before has made its bucket, too."""
        return self.buckets[stage].first == 0

    def made_with(self, stage: int) -> range:
        """An exchange, and those after it whose buckets the same program makes."""
        program = self.buckets[stage].program
        return range(stage, max(n for n, bucket in enumerate(self.buckets) if bucket.program == program) + 1)

    def run_of(self, stage: int) -> range:
        """The stages that can be started together with one."""
        return next(run for run in self.runs if stage in run)

    @functools.cached_property
    def runs(self) -> tuple[range, ...]:
        """The stages, divided where one reads the means of another. Without overlap, each run is one stage."""
        counts = [bucket.stop - bucket.first for bucket in self.buckets]
        begins = [0]
        for number, bucket in enumerate(self.buckets):
            means = self.cut.stages[bucket.program].compute.means
            if self.begins(number) and max(means, default=-1) >= sum(counts[: begins[-1]]):
                begins.append(number)
        return tuple(map(range, begins, [*begins[1:], self.count]))

    def shardings(self, stage: int) -> Sequence[Any]:
        """How the contributions to an exchange leave their program."""
        return self.bucket(stage, self.left[self.buckets[stage].program])

    @functools.cached_property
    def stage_pieces(self) -> tuple[Pieces, ...]:
        """How the leaves of each stage's contribution are split in this process."""
        made: list[Pieces] = []
        for number, specs in enumerate(self.specs):
            shapes = [spec.shape for spec in specs]
            types = [LeafType(spec.shape, spec.result_dtype) for spec in specs]
            made.append(self._pieces(shapes, types, self.shardings(number)))
        return tuple(made)

    @functools.cached_property
    def state_pieces(self) -> Pieces:
        """How the leaves of the state are split in this process."""
        return self.pieces_of_state(range(len(self.state_specs)))

    def pieces_of_state(self, numbers: Sequence[int]) -> Pieces:
        """How some leaves of the state are split in this process."""
        specs = [self.state_specs[number] for number in numbers]
        shapes = [tuple(spec.shape) for spec in specs]
        return self._pieces(shapes, list(map(type_of, specs)), [spec.sharding for spec in specs])

    def _pieces(
        self, shapes: Sequence[tuple[int, ...]], types: Sequence[LeafType], shardings: Sequence[Any]
    ) -> Pieces:
        lanes = Lanes.of(shapes, types, shardings, self.devices)
        spread = [Spread.of(*pair) for pair in zip(shapes, shardings, strict=True)]
        return Pieces(lanes, self.devices, spread, rank=jax.process_index(), ranks=jax.process_count())

    @functools.cached_property
    def lanes_text(self) -> str:
        """A digest of the blocks that each device holds: groups that differ in it cannot exchange lane by lane."""
        held = [pieces.lanes.digest for pieces in (self.state_pieces, *self.stage_pieces)]
        digest = hashlib.sha256(" ".join(held).encode()).hexdigest()[:16]
        meshes = {
            ", ".join(f"{name}: {size}" for name, size in spec.sharding.mesh.shape.items())
            for spec in self.state_specs
            if isinstance(spec.sharding, jax.sharding.NamedSharding)
        }
        return f"{max(1, len(self.devices))} devices on ({') and ('.join(sorted(meshes))}), {digest}"

    @functools.cached_property
    def piece_specs(self) -> tuple[LeafSpec, ...]:
        """The types of all arrays that this process exchanges with other groups."""
        return self.specs_of(None)

    def specs_of(self, span: Span | None) -> tuple[LeafSpec, ...]:
        """The types of all exchanged arrays of some lanes; None: of this process."""
        by_stage = zip(self.stage_pieces, self.specs, strict=True)
        return tuple(spec for pieces, specs in by_stage for spec in pieces.specs(specs, span))

    @functools.cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Where the elements lie in each exchange.

        Layouts of whole leaves differ, so that no frame is taken for another exchange's. Parts of two stages may look
        alike; they go over the same connection, one after the other.
        """
        made = tuple(self.span_layout(number, None) for number in range(self.count))
        assert len({layout.digest for layout in made}) == len(made) or not self.state_pieces.whole
        return made

    def span_layout(self, stage: int, span: Span | None) -> Layout:
        """The layout of the parts of some lanes in one exchange; None: of this process."""
        key = (stage, span)
        if key not in self._layouts:
            specs = self.stage_pieces[stage].specs(self.specs[stage], span)
            self._layouts[key] = Layout.of(specs)
        return self._layouts[key]

    def layouts_with(self, ranks: int) -> list[Layout]:
        """The layouts of all exchanges of a step, among groups of as many processes."""
        return [
            self.span_layout(number, span)
            for number, pieces in enumerate(self.stage_pieces)
            for span in (pieces.spans({ranks}) if ranks > 1 else (None,))
        ]

    def joined(self, means: Sequence[np.ndarray], stages: int | None = None) -> list[Any]:
        """The means of the first stages as `compute_next` and `apply` take them, from this process's pieces."""
        found: list[Any] = []
        start = 0
        for pieces in self.stage_pieces[:stages]:
            found += pieces.join(means[start : start + pieces.count])
            start += pieces.count
        return found

    def cut_means(self, means: Sequence[np.ndarray], span: Span) -> list[np.ndarray]:
        """The parts of the means of all stages, as this process holds them, that belong to some lanes."""
        found: list[np.ndarray] = []
        start = 0
        for pieces in self.stage_pieces:
            found += pieces.cut(means[start : start + pieces.count], span)
            start += pieces.count
        return found

    def split(self, means: Sequence[Any]) -> list[Any]:
        """This process's pieces of the means of all stages."""
        found: list[Any] = []
        start = 0
        for pieces, specs in zip(self.stage_pieces, self.specs, strict=True):
            found += pieces.split(means[start : start + len(specs)])
            start += len(specs)
        return found


def divided(program: int, sizes: Sequence[int], *, on_accelerator: bool) -> list[Bucket]:
    """Divide the contributions of a program into buckets, none of which is small."""
    if not on_accelerator:
        return [Bucket(program, 0, len(sizes))]
    least = max(BUCKET_BYTES, math.ceil(sum(sizes) / MOST_BUCKETS))
    ends: list[int] = []
    bucket, rest = 0, sum(sizes)
    for number, size in enumerate(sizes, 1):
        bucket, rest = bucket + size, rest - size
        if bucket >= least and rest >= least:
            ends.append(number)
            bucket = 0
    return [Bucket(program, *pair) for pair in itertools.pairwise([0, *ends, len(sizes)])]
