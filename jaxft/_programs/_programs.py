"""The two programs of a fault-tolerant step, compiled: `compute` before the exchange, `apply` after the vote."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._errors import ConfigurationError
from jaxft._programs._compat import PyTreeDef
from jaxft._programs._compile import Executables, Program
from jaxft._programs._leaves import DonationGuard, all_alive, own, refuse_tracers
from jaxft._programs._partition import Cut
from jaxft._programs._slice import Picker, picker
from jaxft._programs._trace import Traced

# What tells batches apart: their structure and the abstract value of each leaf.
BatchKey = tuple[PyTreeDef, tuple[Any, ...]]


class OtherTypes(ConfigurationError):
    """The programs were called with a state or a batch of other types than they were compiled for."""


@dataclass(frozen=True, slots=True)
class Local:
    """What `compute` made of a shard besides its contribution. It may reach metrics only."""

    programs: "Programs"
    direct: Sequence[jax.Array]
    rest: Sequence[jax.Array]


@dataclass(frozen=True, eq=False)
class Programs:
    """A train step, cut and compiled for one type of state, and for one type of batch.

    Both programs are pure. `compute` consumes nothing, so it may run again for other shards, and a step that
    is not committed has nothing to undo. `apply` consumes the state: the arrays of the old one are deleted.
    """

    contribution: tuple[LeafSpec, ...]
    fingerprint: Mapping[str, str]
    flops: float | None
    batch_key: BatchKey
    traced: Traced
    cut: Cut
    executables: Executables
    # Finds the programs for a batch of another type. None: such a batch is an error.
    siblings: "Callable[[Any, Any], Programs] | None" = None
    separate: DonationGuard = field(default_factory=DonationGuard)
    _known: "dict[BatchKey, Programs]" = field(default_factory=dict, init=False)

    @functools.cached_property
    def layout(self) -> Layout:
        """Where the elements of the contribution lie in an exchange."""
        return Layout.of(self.contribution)

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
                f"The state has another structure than the one that this step was compiled for: {tree} is not "
                f"{self.traced.state_tree}."
            )
        return own(leaves, tree)

    def unflatten(self, leaves: Sequence[jax.Array]) -> Any:
        """The state of these leaves."""
        return self.traced.state_tree.unflatten(leaves)

    def compute(self, state: Sequence[jax.Array], batch: Any) -> tuple[list[jax.Array], Local]:
        """The contribution of one shard, in the order of `contribution`, and what stays here.

        Args:
            state: its leaves, from `state_leaves`.
            batch: the batch of the shard.

        Raises:
            OtherTypes: state or batch are of other types.
        """
        leaves, tree = jax.tree.flatten(batch)
        key = batch_key(leaves, tree)
        if key != self.batch_key:
            return self._sibling(key, state, batch).compute(state, batch)
        try:
            outputs = self._call(self.executables.compute, self.cut.compute.inputs(state, batch=leaves))
        except OtherTypes:
            # A batch of the same type, but placed elsewhere: that is another program too.
            found = self if self.siblings is None else self.siblings(self.unflatten(state), batch)
            if found.executables.apply is not self.executables.apply or found is self:
                raise
            return found.compute(state, batch)
        count = len(self.contribution)
        direct = count + len(self.cut.direct)
        return outputs[:count], Local(self, outputs[count:direct], outputs[direct:])

    def apply(
        self, state: Sequence[jax.Array], means: Sequence[np.ndarray | jax.Array], local: Local | None
    ) -> tuple[Sequence[jax.Array], Any]:
        """The leaves of the new state and the metrics, from the old state and the means and sums over all shards.

        Runs asynchronously. Means given as numpy arrays may be read until the new state is ready: do not write
        to them before. They are never written to.

        Args:
            state: the leaves of the state of the step; consumed.
            means: one for each leaf of `contribution`, in that order; sums where it was given to psum.
            local: from `compute` of this step; None if this group computed no shard. The metrics that need it
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
        outputs = self._call(self.executables.apply, self.cut.apply.inputs(apart, means=means))
        leaves = self._new_leaves([*outputs, *state])
        self.separate.made(leaves)
        metrics.update(zip(self.cut.applied, outputs[len(self.cut.made) :], strict=True))
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
        metrics.update(zip(cut.reported, self._call(report, inputs), strict=True))
        return metrics

    def _call(self, program: Program, inputs: Sequence[Any]) -> list[jax.Array]:
        try:
            return program(*inputs)
        except (TypeError, ValueError) as error:
            refuse_tracers(inputs)
            # Raised by the check of the arguments, before anything runs; the text says which one and why.
            raise OtherTypes(
                "A fault-tolerant step was called with arrays of other types or shardings than it was compiled "
                f"for. Between two calls the state must keep its types. {error}"
            ) from error

    def _sibling(self, key: BatchKey, state: Sequence[jax.Array], batch: Any) -> "Programs":
        """The programs for a batch of another type, which make the same contribution and share `apply`."""
        if self.siblings is None:
            raise OtherTypes(
                "The batch has another structure, shape or dtype than this step was compiled for."
            )
        if key not in self._known:
            self._known[key] = self.siblings(self.unflatten(state), batch)
        return self._known[key]


def batch_key(leaves: Sequence[Any], tree: PyTreeDef) -> BatchKey:
    return tree, tuple(map(jax.typeof, leaves))


def _unknown(aval: Any) -> jax.Array:
    inexact = jnp.issubdtype(aval.dtype, jnp.inexact)
    return jnp.full(aval.shape, np.nan, aval.dtype) if inexact else jnp.zeros(aval.shape, aval.dtype)
