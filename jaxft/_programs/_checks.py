"""The arguments of a step: refuses leaves that are not arrays, in the user's terms."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxft._errors import ConfigurationError, StepError
from jaxft._programs import _compat

_NUMBERS = (bool, int, float, complex)
_LONGEST_REPR = 60
_BATCH = "A batch is a pytree of arrays and numbers: convert the leaf, or leave it out."
_STATE = (
    "A state is a pytree of arrays and numbers. If it holds functions and settings too, say which leaves the step "
    "may change: `jaxft.fault_tolerant(..., arrays=equinox.is_array)`; the others are then part of the program. With "
    "flax, keep `apply_fn` out of the leaves."
)


def refuse_others(what: str, tree: Any) -> None:
    """Raise ConfigurationError if a leaf of the state or of the batch (`what`) is not an array or a number."""
    if found := other(what, tree):
        raise ConfigurationError(f"{found} {_BATCH if what == 'batch' else _STATE}")


def other(what: str, tree: Any) -> str:
    """Name the first leaf of a pytree (`what`) that is not an array or a number to JAX; "" if there is none."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not _is_array(leaf):
            where = jax.tree_util.keystr(path)
            return (
                f"{f'The leaf {where} of the {what}' if where else f'The {what}'} is {short(leaf)}, a "
                f"{type(leaf).__name__}, and not an array of numbers."
            )
    return ""


def refuse_too_large(state: Any) -> None:
    """Raise ConfigurationError for an integer that JAX's have too few bits for. It would keep the lower ones."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(leaf, int | np.integer | np.ndarray):
            continue
        if (kind := np.result_type(leaf).kind) not in "iuO":  # O: beyond 64 bits
            continue
        range_ = np.iinfo(jax.dtypes.canonicalize_dtype(np.uint64 if kind == "u" else np.int64))
        if not np.all((leaf >= range_.min) & (leaf <= range_.max)):
            where = jax.tree_util.keystr(path)
            raise ConfigurationError(
                f"{f'The leaf {where} of the state' if where else 'The state'} is {short(leaf)}, which JAX cannot "
                f"keep: its integers are {range_.dtype} here, {range_.min} to {range_.max}. Enable 64 bits "
                "(JAX_ENABLE_X64=1), or divide the number into two leaves."
            )


def refuse_iterator(batch: Any) -> None:
    """Raise ConfigurationError if the batch is an iterator over batches."""
    if (isinstance(batch, Iterator) and not callable(batch)) or takes_next(batch):
        raise ConfigurationError(
            f"The batch is {short(batch)}, a {type(batch).__name__}. A step with `shards=` is given a pure function "
            "`batch(step, shard)` that returns the batch of any shard, such as `jaxft.data.from_iterator(make, "
            "shards)`; without, also the batch itself, `next(batches)`. With an iterator, no other group could "
            "compute the batch of a group that is lost."
        )


def takes_next(function: Any) -> bool:
    """Whether a function is `functools.partial(next, iterator)`."""
    return isinstance(function, functools.partial) and function.func is next


def refuse_disabled_jit() -> None:
    """Raise ConfigurationError if `jax.disable_jit` is on: a step is cut and compiled, or it is nothing."""
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # options have no static types
        raise ConfigurationError(
            "A fault-tolerant step was called while jax.disable_jit (JAX_DISABLE_JIT) is on. The step is cut into "
            "compiled programs, so it cannot run without compiling. To debug it, call the parts of the train "
            "step before and after jaxft.pmean yourself, or use jax.debug.print and jax.debug.breakpoint in it."
        )


def check_signature(train_step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise StepError if a train step is pmapped, or cannot be called with a state, a batch and these statics."""
    if _compat.is_pmapped(train_step):
        raise StepError(
            "The train step is wrapped in jax.pmap, but jaxft compiles it, and shares the batch out among groups. "
            "Pass the function that pmap was given, and the name of its axis: "
            '`jaxft.fault_tolerant(train_step, manager, shards=8, axis_name="batch")`. Give the step the state of '
            "one device, without a leading axis for devices."
        )
    try:
        signature = inspect.signature(train_step)
    except (TypeError, ValueError):
        return  # written in C: it is called as it is
    try:
        signature.bind(None, None, *args, **kwargs)
    except TypeError as error:
        raise StepError(
            f"The train step takes ({', '.join(signature.parameters)}), but it is called with a state, a batch"
            f"{f' and {len(args) + len(kwargs)} static arguments' if args or kwargs else ''}: {error}. "
            "Put all that depends on the data into the batch, a tuple or a dict of arrays, and all that lasts "
            "from step to step, such as a key, into the state. An argument that selects the program is static: see "
            "static_argnames."
        ) from error


def refuse_swapped(state: Any, batch: Any) -> None:
    """Raise ConfigurationError if state and batch function are swapped."""
    if (inspect.isroutine(state) or type(state) is functools.partial) and not callable(batch):
        raise ConfigurationError(
            f"The step is called with the function {short(state)} as its state, and with a batch that is none. Did "
            "you swap state and batch? Write `step(state, batch_for)`, and `step.join(state, batch_for)`."
        )


def check_batch_function(batch_for: Any) -> None:
    """Raise ConfigurationError if a batch function cannot be called with a step and a shard."""
    check_function(
        "The batch function",
        batch_for,
        "the numbers of a step and of a shard",
        2,
        "Write `def batch_for(step, shard)`, which returns that shard of that step's batch; jaxft.data has some for "
        "samples by number and for iterators, and FromState for batches that are made of the state.",
    )


def check_function(
    what: str, function: Any, given: str, count: int, instead: str, *, seeks: bool = False
) -> None:
    """Raise ConfigurationError if `function` is no function, or cannot be called with `count` arguments."""
    if not callable(function):
        raise ConfigurationError(
            f"{what} is {short(function)}, a {type(function).__name__}, and not a function of {given}. {instead}"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # written in C: it is called as it is
    try:
        signature.bind(*range(count), **({"start": 0} if seeks else {}))
    except TypeError as error:
        raise ConfigurationError(
            f"{what} {short(function)} takes ({', '.join(signature.parameters)}), but it is called with {given}: "
            f"{error}. {instead}"
        ) from error


def short(value: Any) -> str:
    """How messages show a value: in one line, which is not long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_REPR else f"{text[: _LONGEST_REPR - 3]}..."


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, _NUMBERS):
        return True
    try:
        jax.typeof(leaf)
    except TypeError:  # a text, a tensor of another library, a numpy array of objects or of times
        return False
    return not isinstance(leaf, jax.ShapeDtypeStruct)
