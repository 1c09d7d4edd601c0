"""`pmean`: the mark in a train step at which it is cut in two."""

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp

from jaxft import _compat
from jaxft._errors import StepError

T = TypeVar("T")

# The names along a leaf's path in the tree that was averaged, outermost first: ("0", "dense", "kernel").
Path = tuple[str, ...]


def pmean(tree: T) -> T:
    """Average a pytree over the shards of the job's global batch.

    Call it in a train step, once, on everything that must be the same in all groups: the gradients, and the
    metrics that should speak of the whole batch. `jaxft.fault_tolerant` cuts the step here. What stands before
    runs on each shard; then the groups exchange and vote; what stands after runs once the job has committed
    the step, in every group, on the same means. It is the counterpart of `jax.lax.pmean`, with failures.

    Several calls that do not depend on each other are one exchange. What does not depend on the batch is the
    same in all groups already and is returned as it is. Under `jax.vmap` it averages each element.

    If a group fails during the exchange, the others compute its shards and average again: the result is the
    mean over the same shards, in the same order of summation, with the same bits.

    Example:
        >>> import jax, jax.numpy as jnp, jaxft
        >>> def train_step(params, batch):
        ...     loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
        ...     grads, loss = jaxft.pmean((grads, loss))
        ...     return params - 0.1 * grads, {"loss": loss}
        >>> step = jaxft.fault_tolerant(train_step, manager=None)
        >>> params, metrics = step(jnp.ones(3), jnp.eye(3))

    Args:
        tree: a pytree of floating point arrays (float16, bfloat16, float32, float64) of any shapes. The half
            precisions are summed in float32 and rounded once.

    Returns:
        The means, as a pytree of the same structure, shapes, dtypes and shardings.

    Raises:
        StepError: the tree is empty or has a leaf that is not floating point; or pmean stands where it cannot
            be cut: outside a step given to `jaxft.fault_tolerant`, under `jax.grad`, or inside a control flow
            primitive, `jax.checkpoint`, a custom derivative or `jax.shard_map`.
    """
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    if not paths_and_leaves:
        raise StepError("jaxft.pmean was given an empty pytree: there is nothing to average.")
    for path, leaf in paths_and_leaves:
        _check_leaf(jax.tree_util.keystr(path), leaf)
    paths = tuple(path_names(path) for path, _ in paths_and_leaves)
    labels = tuple(jax.tree_util.keystr(path) for path, _ in paths_and_leaves)
    means = pmean_p.bind(*(leaf for _, leaf in paths_and_leaves), paths=paths, labels=labels)
    return jax.tree.unflatten(treedef, means)


def path_names(path: Sequence[Any]) -> Path:
    """The bare names along a path, so that an attribute `.w` and a key `['w']` compare as equal."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def _check_leaf(label: str, leaf: Any) -> None:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        dtype = (
            jnp.result_type(leaf) if isinstance(leaf, bool | int | float | complex) else type(leaf).__name__
        )
    name = getattr(dtype, "name", str(dtype))
    if name in ("float16", "bfloat16", "float32", "float64"):
        return
    raise StepError(
        f"jaxft.pmean was given a leaf of type {name} at {label or 'the top of its argument'}. Only floating "
        "point arrays have a mean: convert the leaf (`x.astype(jnp.float32)`), or leave it out if it is the "
        "same in all groups."
    )


def _refuse(where: str) -> NoReturn:
    raise StepError(
        f"jaxft.pmean was {where}. It is a mark for jaxft, not an operation: pass the step to "
        "`jaxft.fault_tolerant(train_step, manager)` and call what that returns (with manager=None it runs "
        "alone)."
    )


def _eagerly(*_: Any, **__: Any) -> NoReturn:
    _refuse("called outside of a traced step")


def _lowering(*_: Any, **__: Any) -> NoReturn:
    _refuse("reached by plain `jax.jit`")


def _jvp(*_: Any, **__: Any) -> NoReturn:
    raise StepError(
        "jaxft.pmean stands inside a function that is differentiated (jax.grad, jax.vjp, jax.jvp). Groups average "
        "gradients, they do not differentiate through the average: take the gradient first, then write "
        "`grads = jaxft.pmean(grads)`."
    )


pmean_p = _compat.make_primitive("jaxft_pmean", eagerly=_eagerly, lowering=_lowering, jvp=_jvp)
