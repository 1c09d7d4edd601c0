"""The programs of a fault-tolerant step, compiled: `compute` before each exchange, `apply` after the vote."""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft._arrays._device_sums import DeviceSums, device_sums, free_bytes
from jaxft._arrays._layout import LeafSpec
from jaxft._errors import ConfigurationError
from jaxft._programs._checks import refuse_disabled_jit, refuse_others
from jaxft._programs._compat import PyTreeDef, special
from jaxft._programs._compile import Executables, Program
from jaxft._programs._leaves import (
    DonationGuard,
    Part,
    Picker,
    all_alive,
    first_difference,
    own,
    picker,
    refuse_tracers,
)
from jaxft._programs._partition import Cut
from jaxft._programs._stages import Stages
from jaxft._programs._trace import Traced

_log = logging.getLogger("jaxft")
_NOTHING = contextlib.nullcontext()

# The key of a batch's type: its structure and the abstract value of each leaf.
BatchKey = tuple[PyTreeDef, tuple[Any, ...]]


class OtherTypes(ConfigurationError):
    """The programs were called with a state or a batch of other types than they were compiled for."""


@dataclass(frozen=True, slots=True)
class Local:
    """Results of the stages so far for one shard besides contributions: for later stages, and for metrics."""

    programs: "Programs"
    program: int  # the last program that was run
    direct: Sequence[jax.Array]
    rest: Sequence[jax.Array | None]  # None: no later program reads it
    batch: Sequence[Any]  # its leaves, and the number of the shard; empty if no later program reads them
    spent: bool = False  # whether the values for later programs are dropped

    def sharing(self, others: Iterable["Local"]) -> "Local":
        """The same, with common values taken from another shard at the same stage, so that one copy is kept."""
        own, common = (self.programs, self.program, False), self.programs.cut.common
        if not common:
            return self
        like = next((local for local in others if (local.programs, local.program, local.spent) == own), None)
        if like is None:
            return self
        pairs = enumerate(zip(self.rest, like.rest, strict=True))
        return replace(self, rest=[theirs if at in common else mine for at, (mine, theirs) in pairs])

    def only_counts(self) -> "Local":
        """The same without the values for later programs, once these have been started."""
        return replace(self, rest=(), batch=(), spent=True)


@dataclass(frozen=True, eq=False)
class Programs:
    """A train step, cut and compiled for one type of state, and for one type of batch.

    All programs are pure. `compute` and `compute_next` consume nothing, so they may run again for other shards, and
    a step that is not committed has nothing to undo. `apply` consumes the state: the old arrays are deleted.

    `contribution` lists the exchanged values, in the order of the exchanges. Means are given in the same order.
    """

    contribution: tuple[LeafSpec, ...]
    fingerprint: Mapping[str, str]
    flops: float | None
    batch_key: BatchKey
    traced: Traced
    cut: Cut
    executables: Executables
    stages: Stages
    device: "DeviceSide"
    # Finds the programs for a batch of another type. None: such a batch is an error.
    siblings: "Callable[[Any, Any], Programs] | None" = None
    separate: DonationGuard = field(default_factory=DonationGuard)
    _known: "dict[BatchKey, Programs]" = field(default_factory=dict, init=False)

    def state_leaves(self, state: Any) -> list[jax.Array]:
        """The leaves of a state, as `compute` and `apply` take them. Numbers and numpy arrays are copied to a device.

        Raises:
            OtherTypes: the state has another structure.
            ConfigurationError: a leaf was consumed before, or is a tracer.
        """
        # Fast path: a sixth of the time that `jax.tree.flatten` takes. Errors are raised below.
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            leaves = self.traced.state_tree.flatten_up_to(state)
            if all_alive(leaves):
                return leaves
        leaves, tree = jax.tree.flatten(state)
        if tree != self.traced.state_tree:
            raise OtherTypes(
                "The state has another structure than this step was compiled for: "
                f"{first_difference(self.traced.state_tree, state)}.{self._remedy(state)}"
            )
        return own(leaves, state)

    def _remedy(self, given: Any) -> str:
        """The remedy for a state of another structure."""
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
        """The contribution of one shard to the first exchange, and the results that stay here.

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
        """The contribution of one shard to the next exchange, and the results that stay here.

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
        rest = [value if at in read else None for at, value in enumerate((*before.rest, *outputs[stop:]))]
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
        """Picks the new state out of the results of `apply` followed by the old state."""
        outputs = len(self.cut.apply.output_avals)
        index_of = {leaf: index for index, leaf in enumerate(self.cut.made)}
        index_of |= {new: outputs + old for new, old in self.cut.forwarded.items()}
        return picker([index_of[leaf] for leaf in range(len(index_of))])

    def blank_metrics(self) -> Any:
        """Unknown metrics: NaN, zero if they are integers."""
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
            with _looking_for_special():
                return program.call(*inputs)
        except (TypeError, ValueError) as error:
            refuse_tracers(inputs)
            refuse_disabled_jit()
            # Raised by the check of the arguments, before anything runs; its text names the argument.
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


@dataclass(frozen=True, eq=False)
class DeviceSide:
    """The devices' side of the exchanges of a step."""

    stages: Stages
    executables: Executables
    _sums: dict[int, DeviceSums | None] = field(default_factory=dict, init=False)

    def compile_sums(self) -> None:
        """Compile the programs that add contributions on an accelerator, before a step needs them."""
        for stage in range(self.stages.count):
            self.sums(stage)

    def sums(self, stage: int) -> DeviceSums | None:
        """The adder of this process's contributions to an exchange on an accelerator. The first call compiles."""
        if stage not in self._sums and self.stages.stage_pieces[stage].whole:
            self._compile_sums(stage, self.stages.shardings(stage))
        return self._sums.get(stage)

    def made(self, stage: int, contribution: Sequence[Any]) -> None:
        """Note where the parts of a first contribution are, in a group of several processes, and compile its sums."""
        if stage not in self._sums:
            self._compile_sums(stage, [part.sharding for part in contribution])

    def _compile_sums(self, stage: int, shardings: Sequence[Any]) -> None:
        programs = {self.stages.buckets[each].program for each in self.stages.run_of(stage)}
        self._sums[stage] = (
            device_sums(self.stages.layouts[stage], tuple(shardings), self._compute_bytes)
            if len(programs) == 1
            else None  # sums would wait for all programs of the run, which are started before
        )

    def has_room_ahead(self) -> bool:
        """Whether an accelerator has memory for one more `compute` while the results of the last are there."""
        return self.stages.on_accelerator and self._have_room(self._compute_bytes)

    def _have_room(self, size_bytes: int) -> bool:
        """Whether each device has this much memory left."""
        shardings = jax.tree.leaves(self.executables.computes[0].output_shardings)
        return all(free_bytes(device) >= size_bytes for device in shardings[0].addressable_devices)

    @functools.cached_property
    def _compute_bytes(self) -> int:
        """The memory that `compute` takes of each device, temporaries and results."""
        found = [program.memory_analysis() for program in self.executables.computes]
        if None in found:
            return sys.maxsize  # not known: there is no room to be sure of
        return sum(memory.temp_size_in_bytes + memory.output_size_in_bytes for memory in found)

    def to_devices(self, stage: int, means: Sequence[np.ndarray]) -> Sequence[Any]:
        """Start to bring the means of an exchange to the devices of an accelerator, ahead of `apply`.

        Returns them as `joined` takes them: unchanged on CPU, in a group of several processes, and where the devices
        have no room for them and for one more `compute`.
        """
        if not self.stages.on_accelerator or not self.stages.stage_pieces[stage].whole:
            return means
        start = sum(len(specs) for specs in self.stages.specs[:stage])
        shardings = [spec.sharding for spec in self.executables.means[start : start + len(means)]]
        if self.stages.devices and None in shardings:
            return means  # `apply` decides where they go
        if not self._have_room(self._compute_bytes + sum(mean.nbytes for mean in means)):
            return means
        try:
            return jax.device_put(list(means), shardings)
        except jax.errors.JaxRuntimeError as error:
            _log.warning("The means are brought to the devices later, by apply: %s", error)
            return means


@contextlib.contextmanager
def _looking(*, nans: bool, infs: bool) -> Iterator[None]:
    with jax.debug_nans(nans), jax.debug_infs(infs):
        yield


def _looking_for_special() -> contextlib.AbstractContextManager[None]:
    """A context in which programs look at their results if `jax_debug_nans` or `jax_debug_infs` is set.

    After the end of a `with jax.debug_nans(...)` anywhere in this thread, which JAX's own functions contain, programs
    no longer look, although the option is set for the whole process (JAX 0.10 to 0.12). A new context looks again.
    """
    nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs  # type: ignore[attr-defined]
    return _looking(nans=nans, infs=infs) if nans or infs else _NOTHING


def _place_it(inputs: Sequence[Any]) -> str:
    """The advice for a step that brings an unplaced state to the mesh of a `jax.shard_map`."""
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
