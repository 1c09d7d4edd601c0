"""Traces a train step over flat leaves, and checks that it has the signature that jaxft needs."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax

from jaxft._errors import StepError
from jaxft._programs import _compat
from jaxft._programs._axis import NO_AXIS, Axis
from jaxft._programs._checks import other
from jaxft._programs._compat import AnyJaxpr, PyTreeDef
from jaxft._programs._leaves import first_difference, labels
from jaxft._programs._primitive import Path, path_names, pmean
from jaxft._programs._statics import NOTHING, Given

Spec = jax.ShapeDtypeStruct
KeyPath: TypeAlias = tuple[Any, ...]
_UNBOUND = re.compile(r"unbound axis name:? '?(\w+)")


@dataclass(frozen=True)
class Traced:
    """A step as a jaxpr from the leaves of (state, batch) to the leaves of (new state, metrics)."""

    jaxpr: AnyJaxpr
    state_tree: PyTreeDef
    batch_tree: PyTreeDef
    metrics_tree: PyTreeDef
    state_paths: Sequence[KeyPath]
    batch_labels: Sequence[str]

    @property
    def state_names(self) -> list[Path]:
        return list(map(path_names, self.state_paths))

    @property
    def state_labels(self) -> list[str]:
        return list(map(jax.tree_util.keystr, self.state_paths))


def trace_step(
    train_step: Callable[..., Any],
    state: tuple[Sequence[Spec], PyTreeDef],
    batch: tuple[Sequence[Spec], PyTreeDef],
    given: Given = NOTHING,
    axis: Axis = NO_AXIS,
) -> Traced:
    """Trace a step once.

    Raises:
        StepError: it does not return (state, metrics), returns other things than arrays and numbers in them, changes
            the structure, shapes or dtypes of the state, or uses a named axis other than `axis`.
    """
    (state_specs, state_tree), (batch_specs, batch_tree) = state, batch
    seen: list[_Seen] = []

    def flat_step(*state_and_batch: Any) -> tuple[list[Any], list[Any]]:
        count = len(state_specs)
        state_given = jax.tree.unflatten(state_tree, state_and_batch[:count])
        batch_given = jax.tree.unflatten(batch_tree, state_and_batch[count:])
        # Now, because the step may change its arguments.
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state_given)]
        batch_labels = labels(batch_given)
        new_state, metrics = _pair(train_step(state_given, batch_given, *given.args, **given.kwargs))
        new_leaves, new_tree = jax.tree.flatten(new_state)
        if new_tree != state_tree:
            had = list(map(jax.tree_util.keystr, paths))
            raise StepError(_other_structure(had, state_tree, new_state))
        _check_arrays(new_state, metrics)
        metric_leaves, metrics_tree = jax.tree.flatten(metrics)
        seen.append(_Seen(metrics_tree, paths, batch_labels))
        return new_leaves, metric_leaves

    _name_in_errors(flat_step, train_step)
    try:
        jaxpr = _compat.trace(flat_step, *state_specs, *batch_specs, axis_sizes=axis.sizes)
    except NameError as error:
        raise _unbound_axis(error) or error from error
    metrics_tree, paths, batch_labels = seen[-1]
    traced = Traced(jaxpr, state_tree, batch_tree, metrics_tree, paths, batch_labels)
    _check_types(_compat.open_jaxpr(jaxpr).outvars, state_specs, traced.state_labels)
    return traced


def _name_in_errors(flat_step: Callable[..., Any], train_step: Callable[..., Any]) -> None:
    """Let JAX's errors about tracers name the user's function and its line, with our arguments."""
    while isinstance(train_step, functools.partial):
        train_step = train_step.func
    vars(flat_step).update(__wrapped__=train_step, __signature__=inspect.signature(flat_step))


class _Seen(NamedTuple):
    """What only the trees themselves tell, which exist while the step is traced."""

    metrics_tree: PyTreeDef
    state_paths: Sequence[KeyPath]
    batch_labels: Sequence[str]


def _unbound_axis(error: NameError) -> StepError | None:
    found = _UNBOUND.search(str(error))
    if found is None:
        return None
    line = _compat.raising_line(error)
    return StepError(
        f"The step uses the named axis {found[1]!r}, which is not bound{f' ({line})' if line else ''}. For a step "
        "that was written for jax.pmap or jax.shard_map, pass "
        f"`axis_name={found[1]!r}` to jaxft.fault_tolerant, with the number of shards: lax.pmean, lax.psum and "
        "lax.axis_index over it then mean jaxft's own. Or write jaxft.pmean, jaxft.psum and jaxft.shard_index."
    )


def _pair(result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise StepError(
        f"The train step returned {described(result)}, but it must return a pair: `return new_state, metrics`, "
        "where metrics can be any pytree, such as {}."
    )


def described(result: Any) -> str:
    """What messages call the result of a function that is traced, if it is not the pair that it should be."""
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    if isinstance(result, jax.Array):  # a tracer, whose class means nothing to the user
        return f"one array, {jax.typeof(result).str_short()}"
    return f"a {type(result).__name__}"


def joined(
    grad_fn: Callable[[Any, Any], tuple[Any, Any]],
    update_fn: Callable[[Any, Any, Any], tuple[Any, Any]],
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """One step out of two functions. Cutting it gives them back, with every check of a step on top."""

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        made = grad_fn(state, batch)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise StepError(
                f"grad_fn returned {described(made)}, but it must return a pair: `return contribution, local`, where "
                "local can be any pytree, such as {}."
            )
        contribution, local = made
        return update_fn(state, pmean(contribution), local)

    return train_step


def _check_arrays(new_state: Any, metrics: Any) -> None:
    if found := other("new state", new_state) or other("metrics", metrics):
        raise StepError(
            f"{found} A step returns pytrees of arrays and numbers, which its programs compute: leave the leaf out, "
            "or add it to the metrics outside of the step."
        )


def _other_structure(had: list[str], before: PyTreeDef, new_state: Any) -> str:
    has = labels(new_state)
    missing = [path or "the state itself" for path in had if path not in has]
    extra = [path or "the state itself" for path in has if path not in had]
    parts = [
        f"{what}: {', '.join(paths[:5])}" for what, paths in (("missing", missing), ("new", extra)) if paths
    ]
    difference = "; ".join(parts) or first_difference(before, new_state)
    return (
        f"The train step returned a state with a different structure than it was given ({difference}). The new "
        "state must have the same containers, settings and leaves as the old one."
    )


def _check_types(outvars: Sequence[Any], specs: Sequence[Spec], paths: Sequence[str]) -> None:
    for index, (var, spec) in enumerate(zip(outvars, specs, strict=False)):
        if var.aval.shape == spec.shape and var.aval.dtype == spec.dtype:
            continue
        raise StepError(
            f"The new state's leaf {paths[index] or 'state'} has type {var.aval.str_short()}, but the old "
            f"one has {spec.dtype}{list(spec.shape)}. A step must keep the types of its state; convert the leaf "
            "(`.astype(old.dtype)`) or start from a state of the new type."
        )
