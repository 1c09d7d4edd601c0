"""Builds the programs of a step: trace, cut, compile, and say what must agree between groups."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxft._arrays._layout import LeafSpec
from jaxft._errors import ConfigurationError
from jaxft._programs import _environment, _fingerprint
from jaxft._programs._axis import NO_AXIS, Axis
from jaxft._programs._closed_over import ClosedOver, placement
from jaxft._programs._compile import SHARD_SPEC, Applies, Executables, Spec, compile_computes, compile_cut
from jaxft._programs._inline import inline
from jaxft._programs._leaves import DonationGuard, Part, own, refuse_tracers
from jaxft._programs._overlap import Labels, overlapped
from jaxft._programs._partition import Cut, Division, cut
from jaxft._programs._programs import DeviceSide, Programs, batch_key
from jaxft._programs._same_bits import check_same_bits
from jaxft._programs._shardings import Pins, apart, pins, placed, specs
from jaxft._programs._stages import Stages
from jaxft._programs._statics import NOTHING, Given
from jaxft._programs._trace import Traced, trace_step
from jaxft._programs._warnings import Warned


@dataclass(frozen=True)
class Shared:
    """State that the programs of one step for several types of batch share.

    Attributes:
        axis: the axis of the shards.
        overlap: into how many parts to divide the program before each exchange.
    """

    axis: Axis = NO_AXIS
    overlap: int = 1
    applies: Applies = field(default_factory=dict)
    separate: DonationGuard = field(default_factory=DonationGuard)
    # How contributions left the first `compute`, by the types of the state and of the contributions: where
    # that was left to XLA, it must not choose again for each batch, or `apply` would differ.
    pins: dict[Hashable, Sequence[Sharding | None]] = field(default_factory=dict)
    # How an overlapped step was divided for the first batch, by the types of the state: the same for each batch.
    divisions: dict[Hashable, Labels] = field(default_factory=dict)
    warned: Warned = field(default_factory=Warned)
    # The types of the first state. Types of Python's numbers are weak, and the step's results of them need not be:
    # programs for a later state would have another `apply`.
    states: dict[Hashable, Sequence[Spec]] = field(default_factory=dict)
    closed_over: ClosedOver = field(default_factory=ClosedOver)

    def specs(
        self, leaves: Sequence[Any], batch_leaves: Sequence[Any], others: Sequence[Any] = ()
    ) -> tuple[Sequence[Spec], Sequence[Spec]]:
        """The types to compile for, of the leaves of the state and of the batch; `others` are closed over."""
        state_specs, batch_specs = specs(leaves, batch_leaves, others)
        return self.states.setdefault(_types(state_specs), state_specs), batch_specs


def cut_programs(
    train_step: Callable[..., Any],
    state: Any,
    batch: Any,
    shared: Shared | None = None,
    given: Given = NOTHING,
) -> Programs:
    """Trace a train step once, cut it at its pmean and psum, and compile the parts.

    Args:
        train_step: `train_step(state, batch, *static) -> (new_state, metrics)`.
        state: a state of the types to compile for. Read for its types only, unless the step is overlapped.
        batch: a batch, read in the same way.
        shared: what to share with programs built before of the same step.
        given: the static arguments.

    Raises:
        StepError: the step cannot be cut as written, or not overlapped without other bits.
        ConfigurationError: the state was consumed before or is made of tracers, or leaves of the state and the batch
            lie on different devices.
    """
    shared = shared or Shared()
    leaves = own(jax.tree.leaves(state), state)
    batch_leaves, batch_tree = jax.tree.flatten(batch)
    refuse_tracers(batch_leaves)
    traced, *types = _traced(train_step, (state, leaves), batch, given, shared)
    parts, executables = _compiled(traced, types, (leaves, batch_leaves), shared)
    contribution = tuple(
        LeafSpec(made.label, tuple(made.aval.shape), made.aval.dtype.name, made.operation)
        for made in parts.contributions
    )
    state_specs = types[0]
    stages = Stages.of(contribution, parts, state_specs, executables)
    return Programs(
        contribution=contribution,
        fingerprint={
            "overlap": _overlap_text(parts, shared.overlap),
            "state": _fingerprint.leaves_digest(traced.state_labels, state_specs),
            "sharding": _fingerprint.shardings_digest(state_specs),
            "contribution": _fingerprint.leaves_digest([spec.path for spec in contribution], contribution),
            **_environment.environment(_devices(leaves, batch_leaves)),
            **program_settings(parts.programs, shared.closed_over),
        },
        flops=executables.flops,
        batch_key=batch_key(batch_leaves, batch_tree),
        traced=traced,
        cut=parts,
        executables=executables,
        stages=stages,
        device=DeviceSide(stages, executables),
        separate=shared.separate,
    )


def cut_only(
    train_step: Callable[..., Any], state: Any, batch: Any, shared: Shared, given: Given = NOTHING
) -> Cut:
    """Trace and cut a step as `cut_programs` does, and compile nothing."""
    leaves = own(jax.tree.leaves(state), state)
    traced, state_specs, _ = _traced(train_step, (state, leaves), batch, given, shared)
    return _cut(traced, state_specs, shared)


def _compiled(
    traced: Traced,
    types: Sequence[Sequence[Spec]],
    values: tuple[Sequence[Any], Sequence[Any]],
    shared: Shared,
) -> tuple[Cut, Executables]:
    """Cut and compile a traced step; `types` and `values` have an entry for the state and an entry for the batch."""
    (state_specs, batch_specs), (leaves, batch_leaves) = types, values
    is_first = _types(state_specs) not in shared.divisions
    parts = _cut(traced, state_specs, shared)
    shared.warned.of_draws(parts, shared.axis)
    shared.warned.of_frozen(parts, state_specs)
    kind = tuple(spec.sharding for spec in state_specs), tuple(made.aval for made in parts.contributions)
    pinned = shared.pins.get(kind) or pins(parts.contributions, state_specs, traced.state_names)
    inputs = [*batch_specs, SHARD_SPEC]
    try:
        executables = compile_cut(parts, state_specs, inputs, pinned, shared.applies, shared.closed_over)
    except ValueError as error:  # of JAX, which knows the leaves by their numbers in a program
        if found := apart(_names(traced), [*leaves, *batch_leaves]):
            raise ConfigurationError(found) from error
        raise
    if shared.overlap > 1 and is_first:
        whole = _cut(traced, state_specs, Shared(shared.axis))
        if len(whole.stages) == len(parts.stages):
            shared.warned.of_no_overlap(shared.overlap)
        pinned = pins(whole.contributions, state_specs, traced.state_names)
        computes, _, _ = compile_computes(whole, state_specs, inputs, pinned, shared.closed_over)
        given = [*batch_leaves, np.int32(0)]
        check_same_bits((whole, computes), (parts, executables.computes), leaves, given)
    if any(spec.sharding is not None for spec in state_specs):
        shared.pins[kind] = executables.pins
    return parts, executables


def _traced(
    train_step: Callable[..., Any], state: tuple[Any, Sequence[Any]], batch: Any, given: Given, shared: Shared
) -> tuple[Traced, Sequence[Spec], Sequence[Spec]]:
    """A step, traced for leaves of these types, and the types.

    `state` is the state and its leaves as arrays. If only closed-over arrays are on a mesh, all leaves are brought
    there.
    """
    (whole, leaves), (batch_leaves, batch_tree) = state, jax.tree.flatten(batch)
    state_tree = jax.tree.structure(whole)

    def trace(state_specs: Sequence[Spec], batch_specs: Sequence[Spec]) -> Traced:
        return trace_step(
            train_step, (state_specs, state_tree), (batch_specs, batch_tree), given, shared.axis
        )

    types = shared.specs(leaves, batch_leaves)
    traced = trace(*types)
    if any(spec.sharding is not None for some in types for spec in some):
        return traced, *types  # the arrays are brought there
    others = [
        value for value in inline(traced.jaxpr, shared.axis).consts.values() if placement(value) is not None
    ]
    on_mesh = shared.specs(leaves, batch_leaves, others)
    if _types(on_mesh[0]) == _types(types[0]):
        return traced, *types
    return trace(*on_mesh), *on_mesh


def _names(traced: Traced) -> list[str]:
    """The names of the leaves of the state and of the batch in messages."""
    return [
        f"the leaf {label} of the {what}" if label else f"the {what}"
        for what, labels in (("state", traced.state_labels), ("batch", traced.batch_labels))
        for label in labels
    ]


def _cut(traced: Traced, state_specs: Sequence[Spec], shared: Shared) -> Cut:
    def may_forward(old: int, new: int) -> bool:
        return state_specs[old].sharding == state_specs[new].sharding

    labels = traced.state_labels, traced.batch_labels
    if shared.overlap == 1:
        return cut(traced.jaxpr, labels, may_forward, shared.axis)
    is_whole = Pins(state_specs, traced.state_names).is_whole
    parts = cut(traced.jaxpr, labels, may_forward, shared.axis, Division(shared.overlap, is_whole))
    kind = _types(state_specs)
    parts = overlapped(parts, shared.overlap, shared.divisions.get(kind, ()))
    shared.divisions.setdefault(kind, parts.labels)
    return parts


def _types(state_specs: Sequence[Spec]) -> Hashable:
    return tuple((spec.shape, str(spec.dtype), spec.sharding) for spec in state_specs)


def _overlap_text(parts: Cut, overlap: int) -> str:
    """The number of leaves of each part, which groups must agree on to exchange part by part."""
    leaves = " + ".join(str(len(labels)) for labels in parts.labels)
    return "1" if overlap == 1 else f"{overlap}, {leaves} leaves"


def program_settings(parts: Sequence[Part], closed_over: ClosedOver) -> dict[str, str]:
    """The entries of a fingerprint that depend on the programs."""
    return {
        "program": _fingerprint.program_digest(parts),
        "program on any mesh": _fingerprint.program_digest(parts, meshes=False),
        "closed-over arrays": closed_over.text(value for part in parts for value in part.closed_over),
    }


def _devices(leaves: Sequence[jax.Array], batch_leaves: Sequence[Any]) -> Sequence[Any]:
    """The devices that a step computes on."""
    committed = [sharding for leaf in (*leaves, *batch_leaves) if (sharding := placed(leaf)) is not None]
    widest = max(committed, key=lambda sharding: len(sharding.device_set), default=None)
    some = widest.device_set if widest is not None else leaves[0].sharding.device_set if leaves else set()
    return sorted(some, key=lambda device: device.id) or jax.devices()[:1]
