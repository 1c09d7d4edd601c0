"""`pmean`, `psum` and `shard_index`: the primitives of a train step at which it is partitioned."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeVar

import jax
import jax.numpy as jnp

from jaxft._arrays._layout import DTYPES, Operation
from jaxft._errors import StepError
from jaxft._programs import _compat
from jaxft._programs._compat import Eqn

T = TypeVar("T")

# How `pmean` quantises: all large leaves, or those that a function chooses by path and leaf.
Quantize = Literal["int8"] | Callable[[str, jax.Array], Literal["int8"] | None]
# The dtypes that can be quantised, and the fewest elements of a leaf that is unless a function chooses it.
_QUANTISED_DTYPES = ("float16", "bfloat16", "float32")
_LEAST_ELEMENTS = 1 << 16

# The names along a leaf's path in the argument, outermost first: ("0", "dense", "kernel").
Path = tuple[str, ...]


def pmean(tree: T, *, quantize: Quantize | None = None) -> T:
    """Average a pytree over the shards of the job's global batch.

    Call it in a train step on everything that must be the same in all groups: the gradients, and metrics over the
    whole batch. `jaxft.fault_tolerant` cuts the step here. The code before it runs on each shard; then the groups
    exchange and vote; the code after it runs once the job has committed the step, in every group, on the same means.
    It is the fault-tolerant counterpart of `jax.lax.pmean`.

    Several calls that do not depend on each other are one exchange. A call with a value that depends on earlier means
    and on the batch is another exchange of the same step. A value that does not depend on the batch is
    already the same in all groups and is returned unchanged, whatever its dtype. Under `jax.vmap` it averages each
    element. A call in a `jax.lax.scan` is one exchange in each round. A call in a branch of a `jax.lax.cond` takes
    place in every step, with zeros where another branch is taken; the batch may not decide that.

    If a group fails during the exchange, the others compute its shards and average again: the result is the
    mean over the same shards, in the same order of summation, with the same bits.

    With `quantize="int8"`, groups exchange large leaves in 8 bits: an element leaves a shard as one byte, and its sum
    comes back as two. First all shards agree on an exponent for each block of up to 256 elements, in a
    separate exchange; then integers are added, which is exact. So the bits still do not depend on members or order.
    Each shard's value is rounded to a multiple of a step, which is between 1/127 and 1/63 of the block's largest
    absolute value in any shard. A value that is not finite makes its whole block NaN. Leaves of fewer than 65,536
    elements, float64 and complex leaves are exchanged as they are.

    Example:
        >>> import jax, jax.numpy as jnp, jaxft
        >>> def train_step(params, batch):
        ...     loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
        ...     grads, loss = jaxft.pmean((grads, loss))
        ...     return params - 0.1 * grads, {"loss": loss}
        >>> step = jaxft.fault_tolerant(train_step, manager=None)
        >>> params, metrics = step(jnp.ones(3), jnp.eye(3))

    Args:
        tree: a pytree of arrays of any shapes. Leaves that depend on the batch must be floating point (float16,
            bfloat16, float32, float64) or complex. The half precisions are summed in float32 and rounded once.
        quantize: None, "int8", or a function that chooses each leaf's format: it takes the leaf's path, such as
            "['dense']['kernel']", and the leaf, and returns "int8" or None. Small leaves are then its choice, too.

    Returns:
        The means, as a pytree of the same structure, shapes, dtypes and shardings.

    Raises:
        StepError: the tree is empty, or has a leaf that is not an array, or depends on the batch and is neither
            floating point nor complex; or `quantize` has another value, chooses a leaf that is not float16,
            bfloat16 or float32, or meets more than 258 shards; or the step cannot be cut at this pmean: it is outside
            a step given to `jaxft.fault_tolerant`, under `jax.grad`, or inside a `while_loop`, scans of more than 64
            rounds, or `jax.shard_map`.
    """
    return _mark(tree, "mean", quantize)


def psum(tree: T) -> T:
    """Sum a pytree over the shards of the job's global batch.

    The counterpart of `jax.lax.psum`, and otherwise like `jaxft.pmean`: the step is cut here, `pmean` and
    `psum` in one step are one exchange, and the bits do not depend on which group computed which shard.

    Use it if shards have different weights. For example, if shards have different numbers of tokens, the mean over
    all tokens is the sum over shards divided by the count over shards.

    Example:
        >>> import jax, jax.numpy as jnp, jaxft
        >>> def train_step(params, batch):
        ...     def total(p):
        ...         return jnp.sum(batch["weight"] * (batch["x"] @ p - batch["y"]) ** 2)
        ...     grads, count = jaxft.psum((jax.grad(total)(params), jnp.sum(batch["weight"])))
        ...     return params - 0.1 * grads / count, {}
        >>> step = jaxft.fault_tolerant(train_step, manager=None)
        >>> batch = {"x": jnp.eye(3), "y": jnp.ones(3), "weight": jnp.array([1.0, 1.0, 0.0])}
        >>> params, metrics = step(jnp.ones(3), batch)

    Args:
        tree: a pytree of arrays of any shapes: floating point or complex as in `jaxft.pmean`, or int32, int64 or
            uint32, which are exact and wrap around. The sum of a leaf that does not depend on the batch is that leaf
            times the number of shards, so it needs `shards` in `jaxft.fault_tolerant`.

    Returns:
        The sums, as a pytree of the same structure, shapes, dtypes and shardings.

    Raises:
        StepError: as for `jaxft.pmean`; or a leaf does not depend on the batch, and the number of shards is unknown.
    """
    return _mark(tree, "sum")


def shard_index() -> jax.Array:
    """The number of the shard that a train step computes: 0 to `shards` - 1.

    Call it in a train step, before the means are taken, to give each shard its own random numbers. A key from the
    state alone gives all shards the same ones: the noise of dropout or augmentation would then not average out.

    It counts as part of the batch, so it cannot reach the new state except through `jaxft.pmean` or `jaxft.psum`.
    It is the counterpart of `jax.lax.axis_index`. Without `shards` it is the group's place in the quorum.

    Example:
        >>> import jax, jax.numpy as jnp, jaxft
        >>> def train_step(state, batch):
        ...     key, use = jax.random.split(state["key"])
        ...     noise = jax.random.normal(jax.random.fold_in(use, jaxft.shard_index()), batch.shape)
        ...     return {"key": key, "mean": jaxft.pmean(jnp.mean(batch + noise))}, {}
        >>> step = jaxft.fault_tolerant(train_step, manager=None, shards=2)
        >>> state = {"key": jax.random.key(0), "mean": jnp.zeros(())}
        >>> state, metrics = step(state, lambda step, shard: jnp.ones(3))

    Returns:
        An int32 scalar.

    Raises:
        StepError: it is called outside a step given to `jaxft.fault_tolerant`, or inside a `jax.shard_map`
            or a solver, such as `lax.custom_linear_solve`.
    """
    (index,) = shard_index_p.bind()
    return index


def call_name(eqn: Eqn) -> str:
    """The call that the user wrote."""
    if eqn.primitive is shard_index_p:
        return "jaxft.shard_index"
    return "jaxft.psum" if eqn.params["operation"] == "sum" else "jaxft.pmean"


def _mark(tree: T, operation: Operation, quantize: Quantize | None = None) -> T:
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    if not paths_and_leaves:
        verb = "average" if operation == "mean" else "sum"
        raise StepError(f"jaxft.p{operation} was given an empty pytree: there is nothing to {verb}.")
    parts = [part for path, leaf in paths_and_leaves for part in _parts(path, leaf, operation)]
    chosen = [_is_quantised(label, leaf, quantize) for leaf, _, label in parts]
    found: dict[int, Any] = {}
    for quantises in sorted(set(chosen)):
        numbers = [number for number, choice in enumerate(chosen) if choice == quantises]
        leaves, paths, labels = zip(*(parts[number] for number in numbers), strict=True)
        more = {"quantize": "int8"} if quantises else {}
        means = pmean_p.bind(*leaves, operation=operation, paths=paths, labels=labels, **more)
        found |= zip(numbers, means, strict=True)
    results = iter(found[number] for number in range(len(parts)))
    joined = [
        jax.lax.complex(next(results), next(results)) if _is_complex(leaf) else next(results)
        for _, leaf in paths_and_leaves
    ]
    return jax.tree.unflatten(treedef, joined)


def _parts(path: tuple[Any, ...], leaf: Any, operation: Operation) -> list[tuple[Any, Path, str]]:
    """The arrays to exchange for a leaf, two if it is complex, each with its path and label."""
    label, names = jax.tree_util.keystr(path), path_names(path)
    found = [(leaf, names, label)]
    if _is_complex(leaf):
        found = [(jnp.real(leaf), names, f"{label}.real"), (jnp.imag(leaf), names, f"{label}.imag")]
    for part, _, name in found:
        _check_leaf(name, part, operation)
    return found


def _is_quantised(label: str, leaf: Any, quantize: Quantize | None) -> bool:
    if quantize is None:
        return False
    name = getattr(getattr(leaf, "dtype", None), "name", "")
    if quantize == "int8":
        return name in _QUANTISED_DTYPES and leaf.size >= _LEAST_ELEMENTS
    choice = quantize(label, leaf) if callable(quantize) else quantize
    if choice is None:
        return False
    if choice != "int8":
        raise StepError(
            f"jaxft.pmean was given quantize={choice!r}{f' for {label}' if callable(quantize) else ''}. It takes "
            '"int8", None, or a function of a path and a leaf that returns one of these. Fewer bits lose too much of '
            "a gradient without a memory of errors, which a group that dies would take with it."
        )
    if name not in _QUANTISED_DTYPES:
        raise StepError(
            f"The function `quantize` of jaxft.pmean chose {label or 'its argument'}, of type {name or type(leaf)}. "
            f"Only leaves of {', '.join(_QUANTISED_DTYPES)} can be quantised: return None for this leaf."
        )
    return leaf.size > 0


def _is_complex(leaf: Any) -> bool:
    return isinstance(leaf, complex) or jnp.issubdtype(getattr(leaf, "dtype", float), jnp.complexfloating)


def path_names(path: Sequence[Any]) -> Path:
    """The bare names along a path, so that an attribute `.w` and a key `['w']` compare as equal."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def check_dtype(dtype: Any, operation: Operation, label: str, line: str = "") -> None:
    """Raise StepError if an operation does not accept a dtype, or a thing that has none."""
    name = getattr(dtype, "name", str(dtype))
    if name in DTYPES[operation]:
        return
    if name.startswith("complex"):  # of a collective over a named axis
        rule = f"Write jaxft.p{operation} in place of lax.p{operation}: it takes complex arrays"
    else:
        exact = operation == "sum" and not name.startswith("float")
        wide = "int32" if exact else "float32"
        rule = f"It takes {', '.join(DTYPES[operation])}: convert the leaf (`x.astype(jnp.{wide})`)"
    raise StepError(
        f"jaxft.p{operation} was given a leaf of type {name} at {label or 'the top of its argument'}{line}. "
        f"{rule}, or leave it out if it is the same in all groups."
    )


def _check_leaf(label: str, leaf: Any, operation: Operation) -> None:
    if getattr(leaf, "dtype", None) is None and not isinstance(leaf, bool | int | float | complex):
        check_dtype(type(leaf).__name__, operation, label)
    # Whether the leaf depends on the batch, and so must have a mean, is known when the step is cut.
    if operation == "sum":
        check_dtype(jnp.result_type(leaf), operation, label)


def _refuse(call: str, where: str) -> NoReturn:
    raise StepError(
        f"jaxft.{call} was {where}. It has a meaning only where jaxft cuts the step, and none on its own: pass the "
        "step to `jaxft.fault_tolerant(train_step, manager)` and call the result (with manager=None it runs alone)."
    )


def _eagerly(*_: Any, operation: Operation, **__: Any) -> NoReturn:
    _refuse(f"p{operation}", "called outside a traced step")


def _lowering(*_: Any, operation: Operation, **__: Any) -> NoReturn:
    _refuse(f"p{operation}", "reached by plain `jax.jit`")


def _jvp(*_: Any, operation: Operation, **__: Any) -> NoReturn:
    raise StepError(
        f"jaxft.p{operation} is inside a function that is differentiated (jax.grad, jax.vjp, jax.jvp). Groups "
        "exchange gradients and do not differentiate through the exchange: take the gradient first, then write "
        f"`grads = jaxft.p{operation}(grads)`."
    )


def _index_eagerly(*_: Any, **__: Any) -> NoReturn:
    _refuse("shard_index", "called outside a traced step")


def _index_lowering(*_: Any, **__: Any) -> NoReturn:
    _refuse("shard_index", "reached by plain `jax.jit`")


# The primitive of `pmean` and `psum`, which differ in its parameter `operation`.
pmean_p = _compat.make_primitive("jaxft_pmean", eagerly=_eagerly, lowering=_lowering, jvp=_jvp)
shard_index_p = _compat.make_source("jaxft_shard_index", eagerly=_index_eagerly, lowering=_index_lowering)
