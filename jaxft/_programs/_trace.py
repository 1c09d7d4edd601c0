"""Traces a train step over flat leaves, and checks that it has the signature that jaxft needs."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxft._errors import StepError
from jaxft._programs import _compat
from jaxft._programs._axis import NO_AXIS, Axis
from jaxft._programs._compat import AnyJaxpr, PyTreeDef
from jaxft._programs._leaves import labels

Spec = jax.ShapeDtypeStruct
_UNBOUND = re.compile(r"unbound axis name:? '?(\w+)")


@dataclass(frozen=True)
class Traced:
    """A step as a jaxpr from the leaves of (state, batch) to the leaves of (new state, metrics)."""

    jaxpr: AnyJaxpr
    state_tree: PyTreeDef
    batch_tree: PyTreeDef
    metrics_tree: PyTreeDef


def trace_step(
    train_step: Callable[..., Any],
    state: tuple[Sequence[Spec], PyTreeDef],
    batch: tuple[Sequence[Spec], PyTreeDef],
    static_args: tuple[Any, ...],
    static_kwargs: Mapping[str, Any],
    axis: Axis = NO_AXIS,
) -> Traced:
    """Trace a step once.

    Raises:
        StepError: it does not return (state, metrics), changes the structure, shapes or dtypes of the state, or uses
            a named axis other than `axis`.
    """
    (state_specs, state_tree), (batch_specs, batch_tree) = state, batch
    trees: list[PyTreeDef] = []

    def flat_step(*leaves: Any) -> tuple[list[Any], list[Any]]:
        count = len(state_specs)
        result = train_step(
            jax.tree.unflatten(state_tree, leaves[:count]),
            jax.tree.unflatten(batch_tree, leaves[count:]),
            *static_args,
            **static_kwargs,
        )
        new_state, metrics = _pair(result)
        new_leaves, new_tree = jax.tree.flatten(new_state)
        if new_tree != state_tree:
            raise StepError(_other_structure(state_tree, new_tree))
        metric_leaves, metrics_tree = jax.tree.flatten(metrics)
        trees.append(metrics_tree)
        return new_leaves, metric_leaves

    try:
        jaxpr = _compat.trace(flat_step, *state_specs, *batch_specs, axis_sizes=axis.sizes)
    except NameError as error:
        raise _unbound_axis(error) or error from error
    _check_types(_compat.open_jaxpr(jaxpr).outvars, state_specs, state_tree)
    return Traced(jaxpr, state_tree, batch_tree, trees[-1])


def _unbound_axis(error: NameError) -> StepError | None:
    found = _UNBOUND.search(str(error))
    if found is None:
        return None
    line = _compat.raising_line(error)
    return StepError(
        f"The step uses the named axis {found[1]!r}, which is not bound{f' ({line})' if line else ''}. For a step "
        "that was written for jax.pmap or jax.shard_map, pass "
        f"`axis_name={found[1]!r}` to jaxft.fault_tolerant, with the number of shards: lax.pmean, lax.psum and "
        "lax.axis_index over it then mean those of jaxft. Or write jaxft.pmean, jaxft.psum and jaxft.shard_index."
    )


def _pair(result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    what = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
    raise StepError(
        f"The train step returned {what}, but it must return a pair: `return new_state, metrics`, where metrics can "
        "be any pytree, such as {}."
    )


def _other_structure(old: PyTreeDef, new: PyTreeDef) -> str:
    had, has = labels(old), labels(new)
    missing = [path or "the state itself" for path in had if path not in has]
    extra = [path or "the state itself" for path in has if path not in had]
    parts = [
        f"{what}: {', '.join(paths[:5])}" for what, paths in (("missing", missing), ("new", extra)) if paths
    ]
    difference = "; ".join(parts) or f"the same leaves in different containers: {old} became {new}"
    return (
        f"The train step returned a state with a different structure than it was given ({difference}). The new "
        "state must have the same containers and leaves as the old one."
    )


def _check_types(outvars: Sequence[Any], specs: Sequence[Spec], tree: PyTreeDef) -> None:
    for index, (var, spec) in enumerate(zip(outvars, specs, strict=False)):
        if var.aval.shape == spec.shape and var.aval.dtype == spec.dtype:
            continue
        raise StepError(
            f"The new state's leaf {labels(tree)[index] or 'state'} has type {var.aval.str_short()}, but the old "
            f"one has {spec.dtype}{list(spec.shape)}. A step must keep the types of its state; convert the leaf "
            "(`.astype(old.dtype)`) or start from a state of the new type."
        )
