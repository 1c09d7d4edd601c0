"""The programs of a fault-tolerant step, compiled: `compute` before each exchange, `apply` after the vote."""

import contextlib
import functools
import hashlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxft_protocol.ranks.lanes import Span

from jaxft._arrays._device_sums import DeviceSums, device_sums, free_bytes
from jaxft._arrays._host_copies import is_accelerator
from jaxft._arrays._lanes import Lanes, lane_devices
from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._arrays._leaf_types import LeafType, type_of
from jaxft._arrays._pieces import Pieces, Spread
from jaxft._errors import ConfigurationError
from jaxft._programs._buckets import Bucket, divided
from jaxft._programs._checks import refuse_disabled_jit, refuse_others
from jaxft._programs._compat import PyTreeDef, looking_for_special, special
from jaxft._programs._compile import Executables, Program, Spec
from jaxft._programs._leaves import DonationGuard, all_alive, own, refuse_tracers
from jaxft._programs._partition import Cut
from jaxft._programs._slice import Part, Picker, picker
from jaxft._programs._structure import first_difference
from jaxft._programs._trace import Traced

_log = logging.getLogger("jaxft")

# What tells batches apart: their structure and the abstract value of each leaf.
BatchKey = tuple[PyTreeDef, tuple[Any, ...]]


class OtherTypes(ConfigurationError):
    """The programs were called with a state or a batch of other types than they were compiled for."""


@dataclass(frozen=True, slots=True)
class Local:
    """What the stages so far made of a shard besides contributions: for its later ones, and for metrics."""

    programs: "Programs"
    program: int  # the last of those that made it
    direct: Sequence[jax.Array]
    rest: Sequence[jax.Array | None]  # None: no later program reads it
    batch: Sequence[Any]  # its leaves, and the number of the shard; empty if no later program reads them
    spent: bool = False  # whether what later programs read is dropped

    def sharing(self, others: Iterable["Local"]) -> "Local":
        """The same, with what all shards have in common from another shard that has come as far: one copy is kept."""
        own, common = (self.programs, self.program, False), self.programs.cut.common
        if not common:
            return self
        like = next((one for one in others if (one.programs, one.program, one.spent) == own), None)
        if like is None:
            return self
        pairs = enumerate(zip(self.rest, like.rest, strict=True))
        return replace(self, rest=[theirs if at in common else mine for at, (mine, theirs) in pairs])

    def only_counts(self) -> "Local":
        """The same without what later programs read, once they have been started."""
        return replace(self, rest=(), batch=(), spent=True)


@dataclass(frozen=True, eq=False)
class Programs:
    """A train step, cut and compiled for one type of state, and for one type of batch.

    All programs are pure. `compute` and `compute_next` consume nothing, so they may run again for other shards, and
    a step that is not committed has nothing to undo. `apply` consumes the state: the old arrays are deleted.

    `contribution` lists what is exchanged, in the order of the exchanges. Means are given in the same order.
    """

    contribution: tuple[LeafSpec, ...]
    fingerprint: Mapping[str, str]
    flops: float | None
    batch_key: BatchKey
    traced: Traced
    cut: Cut
    executables: Executables
    state_specs: Sequence[Spec]
    # Finds the programs for a batch of another type. None: such a batch is an error.
    siblings: "Callable[[Any, Any], Programs] | None" = None
    separate: DonationGuard = field(default_factory=DonationGuard)
    _known: "dict[BatchKey, Programs]" = field(default_factory=dict, init=False)
    _sums: dict[int, DeviceSums | None] = field(default_factory=dict, init=False)
    _layouts: dict[tuple[int, Span | None], Layout] = field(default_factory=dict, init=False)

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of all that is exchanged: groups that agree on it exchange the same."""
        return Layout.of(self.contribution)

    @functools.cached_property
    def devices(self) -> tuple[Any, ...]:
        """The devices of the group, in the order of the lanes; empty if there is only one."""
        found = lane_devices([*(spec.sharding for spec in self.state_specs), *self.executables.pins])
        return found or (lane_devices(None) if jax.process_count() > 1 else ())

    @functools.cached_property
    def stage_pieces(self) -> tuple[Pieces, ...]:
        """How the leaves of each stage's contribution are split in this process."""
        made: list[Pieces] = []
        for number, specs in enumerate(self._stage_specs):
            shapes = [spec.shape for spec in specs]
            types = [LeafType(spec.shape, spec.dtype) for spec in specs]
            made.append(self._pieces(shapes, types, self._shardings(number)))
        return tuple(made)

    def _shardings(self, stage: int) -> Sequence[Any]:
        """How the contributions to an exchange leave `compute`."""
        return self.bucket(stage, self.executables.computes[self.buckets[stage].program].output_shardings)

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
        """What every device of the group holds: groups that differ in it cannot exchange lane by lane."""
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
        """The types of all pieces: what this process exchanges with other groups."""
        return self.specs_of(None)

    def specs_of(self, span: Span | None) -> tuple[LeafSpec, ...]:
        """The types of all that is exchanged of some lanes; None: of this process."""
        by_stage = zip(self.stage_pieces, self._stage_specs, strict=True)
        return tuple(spec for pieces, specs in by_stage for spec in pieces.specs(specs, span))

    @functools.cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Where the elements lie in each exchange.

        Those of whole leaves differ, so frames of one are not taken for another's. Parts of two stages may look
        alike; they go over the same connection, one after the other.
        """
        made = tuple(self.span_layout(number, None) for number in range(self.stages))
        assert len({layout.digest for layout in made}) == len(made) or not self.state_pieces.whole
        return made

    def span_layout(self, stage: int, span: Span | None) -> Layout:
        """The layout of the parts of some lanes in one exchange; None: of this process."""
        key = (stage, span)
        if key not in self._layouts:
            specs = self.stage_pieces[stage].specs(self._stage_specs[stage], span)
            self._layouts[key] = Layout.of(specs)
        return self._layouts[key]

    def layouts_with(self, ranks: int) -> list[Layout]:
        """The layouts of all exchanges of a step, among groups of as many processes."""
        return [
            self.span_layout(number, span)
            for number, pieces in enumerate(self.stage_pieces)
            for span in (pieces.spans({ranks}) if ranks > 1 else (None,))
        ]

    @functools.cached_property
    def on_accelerator(self) -> bool:
        """Whether contributions are made in the memory of accelerators."""
        shardings = jax.tree.leaves(self.executables.computes[0].output_shardings)
        return any(is_accelerator(device) for one in shardings[:1] for device in one.device_set)

    def compile_sums(self) -> None:
        """Compile what adds contributions on an accelerator, before a step needs it."""
        for stage in range(self.stages):
            self.sums(stage)

    def sums(self, stage: int) -> DeviceSums | None:
        """What adds this process's contributions to an exchange on an accelerator. The first call compiles."""
        if stage not in self._sums and self.stage_pieces[stage].whole:
            self._compile_sums(stage, self._shardings(stage))
        return self._sums.get(stage)

    def made(self, stage: int, contribution: Sequence[Any]) -> None:
        """Note where the parts of a first contribution are, in a group of several processes, and compile its sums."""
        if stage not in self._sums:
            self._compile_sums(stage, [part.sharding for part in contribution])

    def _compile_sums(self, stage: int, shardings: Sequence[Any]) -> None:
        programs = {self.buckets[each].program for each in self.run_of(stage)}
        self._sums[stage] = (
            device_sums(self.layouts[stage], tuple(shardings), self._compute_bytes)
            if len(programs) == 1
            else None  # sums would wait for all programs of the run, which are started before
        )

    def has_room_ahead(self) -> bool:
        """Whether an accelerator has memory for one more `compute` while the results of the last are there."""
        return self.on_accelerator and self._have_room(self._compute_bytes)

    def _have_room(self, size_bytes: int) -> bool:
        """Whether each device has so much memory left."""
        shardings = jax.tree.leaves(self.executables.computes[0].output_shardings)
        return all(free_bytes(device) >= size_bytes for device in shardings[0].addressable_devices)

    @functools.cached_property
    def _compute_bytes(self) -> int:
        """The memory that `compute` takes of each device, temporaries and results."""
        found = [program.memory_analysis() for program in self.executables.computes]
        if None in found:
            return sys.maxsize  # not known: there is no room to be sure of
        return sum(one.temp_size_in_bytes + one.output_size_in_bytes for one in found)

    def to_devices(self, stage: int, means: Sequence[np.ndarray]) -> Sequence[Any]:
        """Start to bring the means of an exchange to the devices of an accelerator, ahead of `apply`.

        Returns them as `joined` takes them: as they are on CPU, in a group of several processes, and where the
        devices have no room for them beside one more `compute`.
        """
        if not self.on_accelerator or not self.stage_pieces[stage].whole:
            return means
        start = sum(len(specs) for specs in self._stage_specs[:stage])
        shardings = [spec.sharding for spec in self.executables.means[start : start + len(means)]]
        if self.devices and None in shardings:
            return means  # `apply` decides where they go
        if not self._have_room(self._compute_bytes + sum(mean.nbytes for mean in means)):
            return means
        try:
            return jax.device_put(list(means), shardings)
        except jax.errors.JaxRuntimeError as error:
            _log.warning("The means are brought to the devices later, by apply: %s", error)
            return means

    @property
    def stages(self) -> int:
        """How many exchanges a step has."""
        return len(self.buckets)

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """What each exchange takes. Groups that have the same programs on the same kind of device divide alike."""
        rest = iter(self.contribution)
        found: list[Bucket] = []
        for number, stage in enumerate(self.cut.stages):
            specs = list(itertools.islice(rest, len(stage.contributions)))
            found += divided(number, [Layout.of([spec]).size_bytes for spec in specs], self.on_accelerator)
        return tuple(found)

    def bucket(self, stage: int, made: Sequence[Any]) -> Sequence[Any]:
        """Of what a program made, what one exchange takes."""
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
        return tuple(map(range, begins, [*begins[1:], self.stages]))

    def joined(self, means: Sequence[np.ndarray], stages: int | None = None) -> list[Any]:
        """The means of the first stages as `compute_next` and `apply` take them, from this process's pieces."""
        found: list[Any] = []
        start = 0
        for pieces in self.stage_pieces[:stages]:
            found += pieces.join(means[start : start + pieces.count])
            start += pieces.count
        return found

    def cut_means(self, means: Sequence[np.ndarray], span: Span) -> list[np.ndarray]:
        """Of this process's pieces of the means of all stages, what belongs to some lanes."""
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
        for pieces, specs in zip(self.stage_pieces, self._stage_specs, strict=True):
            found += pieces.split(means[start : start + len(specs)])
            start += len(specs)
        return found

    @functools.cached_property
    def _stage_specs(self) -> tuple[tuple[LeafSpec, ...], ...]:
        """The contribution, exchange by exchange."""
        rest = iter(self.contribution)
        return tuple(tuple(itertools.islice(rest, bucket.stop - bucket.first)) for bucket in self.buckets)

    def state_leaves(self, state: Any) -> list[jax.Array]:
        """The leaves of a state, as `compute` and `apply` take them. Numbers and numpy arrays are copied to a device.

        Raises:
            OtherTypes: the state has another structure.
            ConfigurationError: a leaf was consumed before, or is a tracer.
        """
        # Fast path: a sixth of the time that `jax.tree.flatten` takes. What is wrong is said below.
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            leaves = self.traced.state_tree.flatten_up_to(state)
            if all_alive(leaves):
                return leaves
        leaves, tree = jax.tree.flatten(state)
        if tree != self.traced.state_tree:
            raise OtherTypes(
                "The state has another structure than the one that this step was compiled for: "
                f"{first_difference(self.traced.state_tree, state)}.{self._remedy(state)}"
            )
        return own(leaves, state)

    def _remedy(self, given: Any) -> str:
        """What to do about a state of another structure."""
        if (
            isinstance(given, tuple)
            and len(given) == 2
            and jax.tree.structure(given[0]) == self.traced.state_tree
        ):
            return " It is the whole result of the step: write `state, metrics = step(state, batch)`."
        return (
            " Between two calls a state must keep its containers and settings: a module that was set to evaluate "
            "(`model.eval()`) is set back before the next step (`model.train()`)."
        )

    def unflatten(self, leaves: Sequence[jax.Array]) -> Any:
        """The state of these leaves."""
        return self.traced.state_tree.unflatten(leaves)

    def compute(
        self, state: Sequence[jax.Array], batch: Any, shard: int = 0
    ) -> tuple[list[jax.Array], Local]:
        """The contribution of one shard to the first exchange, and what stays here.

        Args:
            state: its leaves, from `state_leaves`.
            batch: the batch of the shard.
            shard: its number, which is what `jaxft.shard_index` returns.

        Raises:
            OtherTypes: state or batch are of other types.
            ConfigurationError: a leaf of the batch is not an array or a number.
        """
        leaves, tree = jax.tree.flatten(batch)
        try:
            key = batch_key(leaves, tree)
        except TypeError:
            refuse_others("batch", batch)
            raise
        if key != self.batch_key:
            return self._sibling(key, state, batch).compute(state, batch, shard)
        try:
            given = [*leaves, np.int32(shard)]
            part = self.cut.stages[0].compute
            outputs = self._call(self.executables.computes[0], part, part.inputs(state, batch=given))
        except OtherTypes:
            # A batch of the same type, but placed elsewhere: that is another program too.
            found = self if self.siblings is None else self.siblings(self.unflatten(state), batch)
            if found.executables.apply is not self.executables.apply or found is self:
                raise
            return found.compute(state, batch, shard)
        return self._split(0, outputs, Local(self, -1, (), (), given))

    def compute_next(
        self, state: Sequence[jax.Array], means: Sequence[np.ndarray | jax.Array], local: Local
    ) -> tuple[list[jax.Array], Local]:
        """The contribution of one shard to the next exchange, and what stays here.

        Args:
            state: as in `compute`.
            means: the results of all exchanges so far, with the same guarantees as in `apply`.
            local: of this shard, from the stage before.

        Raises:
            OtherTypes: state or means are of other types.
        """
        if local.programs is not self:
            return local.programs.compute_next(state, means, local)
        number = local.program + 1
        part = self.cut.stages[number].compute
        inputs = part.inputs(state, batch=local.batch, means=means, rest=local.rest)
        outputs = self._call(self.executables.computes[number], part, inputs)
        return self._split(number, outputs, local)

    def _split(self, number: int, outputs: list[jax.Array], before: Local) -> tuple[list[jax.Array], Local]:
        stage = self.cut.stages[number]
        count = len(stage.contributions)
        stop = count + len(stage.direct)
        read = self._read_after[number]
        rest = [one if at in read else None for at, one in enumerate((*before.rest, *outputs[stop:]))]
        batch = before.batch if any(later.compute.batch for later in self.cut.stages[number + 1 :]) else ()
        return outputs[:count], Local(self, number, (*before.direct, *outputs[count:stop]), rest, batch)

    @functools.cached_property
    def _read_after(self) -> tuple[frozenset[int], ...]:
        return tuple(map(self.cut.rest_read_after, range(len(self.cut.stages))))

    def apply(
        self, state: Sequence[jax.Array], means: Sequence[np.ndarray | jax.Array], local: Local | None
    ) -> tuple[Sequence[jax.Array], Any]:
        """The leaves of the new state and the metrics, from the old state and the means and sums over all shards.

        Runs asynchronously. Means given as numpy arrays may be read until the new state is ready: do not write
        to them before. They are never written to.

        Args:
            state: the leaves of the state of the step; consumed.
            means: one for each leaf of `contribution`, in that order; sums where it was given to psum.
            local: from the last stage of this step; None if this group computed no shard. The metrics that need it
                are then NaN (zero if they are integers). The new state never needs it.

        Raises:
            ConfigurationError: state or means are of other types.
        """
        if local is not None and local.programs is not self:
            return local.programs.apply(state, means, local)
        if len(means) != len(self.contribution):
            raise ConfigurationError(
                f"apply was given {len(means)} means for {len(self.contribution)} leaves."
            )
        metrics = self._metrics(state, means, local)
        apart = self.separate(state, self.cut.donated, self.cut.consts)
        part = self.cut.apply
        outputs = self._call(self.executables.apply, part, part.inputs(apart, means=means))
        leaves = self._new_leaves([*outputs, *state])
        self.separate.made(leaves)
        metrics.update(zip(self.cut.applied, outputs[len(self.cut.made) :], strict=True))
        metrics.update({index: jnp.asarray(value) for index, value in self.cut.constants.items()})
        ordered = [metrics[index] for index in range(len(self.cut.metrics))]
        return leaves, self.traced.metrics_tree.unflatten(ordered)

    @functools.cached_property
    def _new_leaves(self) -> Picker:
        """Picks the new state out of what `apply` made followed by the old state."""
        outputs = len(self.cut.apply.output_avals)
        index_of = {leaf: index for index, leaf in enumerate(self.cut.made)}
        index_of |= {new: outputs + old for new, old in self.cut.forwarded.items()}
        return picker([index_of[leaf] for leaf in range(len(index_of))])

    def blank_metrics(self) -> Any:
        """Metrics that say nothing: NaN, zero if they are integers."""
        return self.traced.metrics_tree.unflatten(list(map(_unknown, self.cut.metrics)))

    def _metrics(
        self, state: Sequence[jax.Array], means: Sequence[np.ndarray | jax.Array], local: Local | None
    ) -> dict[int, jax.Array]:
        """The metrics that derive from the batch, by index. Before `apply`, which consumes the state."""
        cut, report = self.cut, self.executables.report
        if local is None:
            return {index: _unknown(cut.metrics[index]) for index in (*cut.direct, *cut.reported)}
        metrics = dict(zip(cut.direct, local.direct, strict=True))
        if report is None or cut.report is None:
            return metrics
        inputs = cut.report.inputs(state, means=means, rest=local.rest)
        metrics.update(zip(cut.reported, self._call(report, cut.report, inputs), strict=True))
        return metrics

    def _call(self, program: Program, part: Part, inputs: Sequence[Any]) -> list[jax.Array]:
        try:
            with looking_for_special():
                return program(*inputs)
        except (TypeError, ValueError) as error:
            refuse_tracers(inputs)
            refuse_disabled_jit()
            # Raised by the check of the arguments, before anything runs; the text says which one and why.
            raise OtherTypes(
                "A fault-tolerant step was called with arrays of other types or shardings than it was compiled "
                f"for. Between two calls the state must keep its types.{_place_it(inputs)} {error}"
            ) from error
        except Exception as error:
            if (found := special(error)) is None:
                raise
            name = "apply" if part is self.cut.apply else "report" if part is self.cut.report else "compute"
            raise FloatingPointError(
                f"The step's program `{name}` makes {found}, and jax_debug_nans or jax_debug_infs is set. To find "
                "the operation, call the loss under jax.jit with this option."
            ) from None

    def _sibling(self, key: BatchKey, state: Sequence[jax.Array], batch: Any) -> "Programs":
        """The programs for a batch of another type, which make the same contribution and share `apply`."""
        if self.siblings is None:
            raise OtherTypes(
                "The batch has another structure, shape or dtype than this step was compiled for."
            )
        if key not in self._known:
            self._known[key] = self.siblings(self.unflatten(state), batch)
        return self._known[key]


def _place_it(inputs: Sequence[Any]) -> str:
    """What helps where a step brings a state that lies nowhere to the mesh of a `jax.shard_map`."""
    if all(len(array.sharding.device_set) < 2 for array in inputs if isinstance(array, jax.Array)):
        return ""
    return (
        " If the step computes on a mesh that the state does not lie on, as in a jax.shard_map, place the state "
        "on it before the first call: jax.device_put(state, jax.NamedSharding(mesh, jax.P()))."
    )


def batch_key(leaves: Sequence[Any], tree: PyTreeDef) -> BatchKey:
    return tree, tuple(map(jax.typeof, leaves))


def _unknown(aval: Any) -> jax.Array:
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return jnp.zeros(aval.shape, aval.dtype)
    # Not computed: jax_debug_nans would object.
    return jax.device_put(np.full(aval.shape, np.nan, aval.dtype))
