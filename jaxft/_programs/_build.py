"""Builds the programs of a step: trace, cut, compile, and say what must agree between groups."""

from collections.abc import Callable, Hashable, Mapping, Sequence
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
from jaxft._programs._compat import PyTreeDef
from jaxft._programs._compile import SHARD_SPEC, Applies, Spec, compile_computes, compile_cut
from jaxft._programs._inline import inline
from jaxft._programs._leaves import DonationGuard, own, refuse_tracers
from jaxft._programs._overlap import Labels, overlapped
from jaxft._programs._partition import Cut, cut
from jaxft._programs._programs import DeviceSide, Programs, batch_key
from jaxft._programs._same_bits import check_same_bits
from jaxft._programs._shardings import Pins, apart, pins, placed, specs
from jaxft._programs._slice import Part
from jaxft._programs._stages import Stages
from jaxft._programs._trace import Traced, trace_step
from jaxft._programs._warnings import Warned


@dataclass(frozen=True)
class Shared:
    """What the programs of one step for several types of batch have in common."""

    applies: Applies = field(default_factory=dict)
    separate: DonationGuard = field(default_factory=DonationGuard)
    # How contributions left the first `compute`, by the types of the state and of the contributions: where
    # that was left to XLA, it must not choose again for each batch, or `apply` would differ.
    pins: dict[Hashable, Sequence[Sharding | None]] = field(default_factory=dict)
    # How an overlapped step was divided for the first batch, by the types of the state: the same for each batch.
    divisions: dict[Hashable, Labels] = field(default_factory=dict)
    warned: Warned = field(default_factory=Warned)
    # The types of the first state. A state that a step returns may differ from it in which types are weak: those of
    # Python's numbers are, and what a step makes of them need not be. Programs for it would have another `apply`.
    states: dict[Hashable, Sequence[Spec]] = field(default_factory=dict)
    closed_over: ClosedOver = field(default_factory=ClosedOver)

    def specs(
        self, leaves: Sequence[Any], batch_leaves: Sequence[Any], others: Sequence[Any] = ()
    ) -> tuple[Sequence[Spec], Sequence[Spec]]:
        """The types to compile for, of the leaves of the state and of the batch, beside what the step closes over."""
        state_specs, batch_specs = specs(leaves, batch_leaves, others)
        return self.states.setdefault(_types(state_specs), state_specs), batch_specs


def cut_programs(
    train_step: Callable[..., Any],
    state: Any,
    batch: Any,
    static_args: tuple[Any, ...] = (),
    static_kwargs: Mapping[str, Any] | None = None,
    *,
    shared: Shared | None = None,
    axis: Axis = NO_AXIS,
    overlap: int = 1,
) -> Programs:
    """Trace a train step once, cut it at its pmean and psum, and compile the parts.

    Args:
        train_step: `train_step(state, batch, *static_args, **static_kwargs) -> (new_state, metrics)`.
        state: a state of the types to compile for. Read for its types only, unless the step is overlapped.
        batch: a batch, read in the same way.
        static_args: further arguments, part of the program.
        static_kwargs: those that are given by name.
        shared: what to share with programs built before of the same step.
        axis: the axis of the shards.
        overlap: into how many parts to divide what comes before each exchange.

    Raises:
        StepError: the step cannot be cut as written, or not overlapped without other bits.
        ConfigurationError: the state was consumed before or is made of tracers, or leaves of the state and the batch
            lie on different devices.
    """
    shared = shared or Shared()
    leaves, state_tree = jax.tree.flatten(state)
    leaves = own(leaves, state)
    batch_leaves, batch_tree = jax.tree.flatten(batch)
    refuse_tracers(batch_leaves)
    traced, state_specs, batch_specs = _traced(
        *(train_step, (leaves, state_tree), (batch_leaves, batch_tree), static_args, static_kwargs or {}),
        shared,
        axis,
    )
    is_first = _types(state_specs) not in shared.divisions
    parts = _cut(traced, state_specs, axis, overlap, shared)
    shared.warned.of_draws(parts, axis)
    shared.warned.of_frozen(parts, state_specs)
    kind = tuple(spec.sharding for spec in state_specs), tuple(one.aval for one in parts.contributions)
    pinned = shared.pins.get(kind) or pins(parts.contributions, state_specs, traced.state_names)
    inputs = [*batch_specs, SHARD_SPEC]
    try:
        executables = compile_cut(parts, state_specs, inputs, pinned, shared.applies, shared.closed_over)
    except ValueError as error:  # of JAX, which knows the leaves by their numbers in a program
        if found := apart(_names(traced), [*leaves, *batch_leaves]):
            raise ConfigurationError(found) from error
        raise
    if overlap > 1 and is_first:
        whole = _cut(traced, state_specs, axis, 1, Shared())
        if len(whole.stages) == len(parts.stages):
            shared.warned.of_no_overlap(overlap)
        pinned = pins(whole.contributions, state_specs, traced.state_names)
        computes, _, _ = compile_computes(whole, state_specs, inputs, pinned, shared.closed_over)
        given = [*batch_leaves, np.int32(0)]
        check_same_bits((whole, computes), (parts, executables.computes), leaves, given)
    if any(spec.sharding is not None for spec in state_specs):
        shared.pins[kind] = executables.pins
    contribution = tuple(
        LeafSpec(one.label, tuple(one.aval.shape), one.aval.dtype.name, one.operation)
        for one in parts.contributions
    )
    stages = Stages.of(contribution, parts, state_specs, executables)
    return Programs(
        contribution=contribution,
        fingerprint={
            "overlap": _overlap_text(parts, overlap),
            **_describe(parts, contribution, traced.state_labels, state_specs, leaves, batch_leaves),
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
    train_step: Callable[..., Any],
    state: Any,
    batch: Any,
    static_args: tuple[Any, ...] = (),
    static_kwargs: Mapping[str, Any] | None = None,
    *,
    shared: Shared | None = None,
    axis: Axis = NO_AXIS,
    overlap: int = 1,
) -> Cut:
    """Trace and cut a step as `cut_programs` does, and compile nothing."""
    shared = shared or Shared()
    (leaves, state_tree), (batch_leaves, batch_tree) = jax.tree.flatten(state), jax.tree.flatten(batch)
    traced, state_specs, _ = _traced(
        *(
            train_step,
            (own(leaves, state), state_tree),
            (batch_leaves, batch_tree),
            static_args,
            static_kwargs or {},
        ),
        shared,
        axis,
    )
    return _cut(traced, state_specs, axis, overlap, shared)


def _traced(
    train_step: Callable[..., Any],
    state: tuple[Sequence[Any], PyTreeDef],
    batch: tuple[Sequence[Any], PyTreeDef],
    static_args: tuple[Any, ...],
    static_kwargs: Mapping[str, Any],
    shared: Shared,
    axis: Axis,
) -> tuple[Traced, Sequence[Spec], Sequence[Spec]]:
    """A step, traced for leaves of these types, and the types. If only what it closes over is on a mesh, all is."""
    (leaves, state_tree), (batch_leaves, batch_tree) = state, batch

    def trace(state_specs: Sequence[Spec], batch_specs: Sequence[Spec]) -> Traced:
        return trace_step(
            *(
                train_step,
                (state_specs, state_tree),
                (batch_specs, batch_tree),
                static_args,
                static_kwargs,
                axis,
            )
        )

    types = shared.specs(leaves, batch_leaves)
    traced = trace(*types)
    if any(spec.sharding is not None for some in types for spec in some):
        return traced, *types  # the arrays are brought there
    others = [value for value in inline(traced.jaxpr, axis).consts.values() if placement(value) is not None]
    on_mesh = shared.specs(leaves, batch_leaves, others)
    if _types(on_mesh[0]) == _types(types[0]):
        return traced, *types
    return trace(*on_mesh), *on_mesh


def _names(traced: Traced) -> list[str]:
    """What messages call the leaves of the state and of the batch."""
    return [
        f"the leaf {label} of the {what}" if label else f"the {what}"
        for what, labels in (("state", traced.state_labels), ("batch", traced.batch_labels))
        for label in labels
    ]


def _cut(traced: Traced, state_specs: Sequence[Spec], axis: Axis, overlap: int, shared: Shared) -> Cut:
    def may_forward(old: int, new: int) -> bool:
        return state_specs[old].sharding == state_specs[new].sharding

    parts = cut(
        *(traced.jaxpr, traced.state_labels, traced.batch_labels, may_forward, axis),
        overlap=overlap,
        is_whole=Pins(state_specs, traced.state_names).is_whole,
    )
    if overlap == 1:
        return parts
    kind = _types(state_specs)
    parts = overlapped(parts, overlap, shared.divisions.get(kind, ()))
    shared.divisions.setdefault(kind, parts.labels)
    return parts


def _types(state_specs: Sequence[Spec]) -> Hashable:
    return tuple((spec.shape, str(spec.dtype), spec.sharding) for spec in state_specs)


def _overlap_text(parts: Cut, overlap: int) -> str:
    """What must be equal for groups to exchange part by part."""
    leaves = " + ".join(str(len(labels)) for labels in parts.labels)
    return "1" if overlap == 1 else f"{overlap}, {leaves} leaves"


def program_settings(parts: Sequence[Part], closed_over: ClosedOver) -> dict[str, str]:
    """What of a fingerprint depends on the programs."""
    return {
        "program": _fingerprint.program_digest(parts),
        "program on any mesh": _fingerprint.program_digest(parts, meshes=False),
        "closed-over arrays": closed_over.text(value for part in parts for value in part.closed_over),
    }


def _describe(
    parts: Cut,
    contribution: Sequence[LeafSpec],
    state_labels: Sequence[str],
    state_specs: Sequence[Spec],
    leaves: Sequence[jax.Array],
    batch_leaves: Sequence[Any],
) -> Mapping[str, str]:
    """The fingerprint: compared between groups, key by key, before a group may join."""
    committed = [sharding for leaf in (*leaves, *batch_leaves) if (sharding := placed(leaf)) is not None]
    widest = max(committed, key=lambda sharding: len(sharding.device_set), default=None)
    some = widest.device_set if widest is not None else leaves[0].sharding.device_set if leaves else set()
    devices = sorted(some, key=lambda device: device.id) or jax.devices()[:1]
    return {
        "state": _fingerprint.leaves_digest(state_labels, state_specs),
        "sharding": _fingerprint.shardings_digest(state_specs),
        "contribution": _fingerprint.leaves_digest([one.path for one in contribution], contribution),
        **_environment.environment(devices),
    }
