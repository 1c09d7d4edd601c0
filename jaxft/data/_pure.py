"""Checks that a batch function is pure: asks it for the same batch twice, in the first call and rarely later.

An iterator behind a batch function, or augmentation without a seed, is not seen in a run without failures. After the
first one, groups have trained on other samples than were promised, and nothing says so.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft._arrays._digest import digest
from jaxft._arrays._pieces import Spread
from jaxft._errors import ConfigurationError
from jaxft._programs._checks import refuse_iterator, refuse_others, short
from jaxft._programs._leaves import first_difference

# Of so many batches one is computed twice: at most a thousandth of the time that batches take.
EVERY = 1000

_INSTEAD = (
    "Let the batch depend on step and shard alone: read samples by number (jaxft.data.Batches), wrap an iterator in "
    "jaxft.data.from_iterator, and draw random numbers from a generator seeded with both "
    "(numpy.random.default_rng([seed, step, shard])). One that is made of the current weights is made by "
    "jaxft.data.FromState. Without shards=, a step also takes the batch itself in place of a function."
)
OF_STATE_INSTEAD = (
    "Let the batch depend on step, shard and state alone, and draw random numbers from a key or a generator that is "
    "made of the first two (jax.random.fold_in(jax.random.fold_in(key, step), shard)). If it cannot, as with a "
    "reward that a service gives, write FromState(make, pure=False)."
)


class PureCheck:
    """Counts the batches that one step asks for, whichever function it is given."""

    def __init__(self) -> None:
        self._asked = 0

    def of(self, batch_for: Callable[[int, int], Any], instead: str = _INSTEAD) -> Callable[[int, int], Any]:
        """Return `batch_for`, checked now and then.

        Args:
            batch_for: the batch function.
            instead: what to write, in the message of an error.

        Raises (when called):
            ConfigurationError: two calls for the same step and shard return different batches.
        """
        return functools.partial(self._ask, batch_for, instead)

    def _ask(self, batch_for: Callable[[int, int], Any], instead: str, step: int, shard: int) -> Any:
        batch = batch_for(step, shard)
        if self._asked % EVERY == 0:
            refuse_iterator(batch)  # of a function with `yield`, which JAX will not take as a leaf
            refuse_others("batch", batch)
            if differing := difference(batch, batch_for(step, shard)):
                raise ConfigurationError(
                    f"The batch function is not pure: it was called twice for step {step} and shard {shard}, and "
                    f"{differing}. Any group may have to compute any shard, at any time and more than once; with "
                    f"this function a run with failures would train on other samples than one without. {instead}"
                )
        self._asked += 1
        return batch


def difference(batch: Any, again: Any) -> str:
    """Say where two batches differ; "" if they have the same bits.

    Texts may be among them, for a function that makes a batch of them.

    Raises:
        ConfigurationError: another leaf is not an array or a number.
    """
    refuse_others("batch", jax.tree.map(lambda leaf: 0 if _is_text(leaf) else leaf, batch))
    leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
    others, other_tree = jax.tree.flatten(again)
    if tree != other_tree:
        return f"the second batch has another structure: {first_difference(tree, again)}"
    for (path, leaf), other in zip(leaves, others, strict=True):
        name = jax.tree_util.keystr(path) or "the batch"
        if _is_text(leaf) or _is_text(other):
            if np.array_equal(np.asarray(leaf), np.asarray(other)):
                continue
            return f"{name} was {short(leaf)}, then {short(other)}"
        if leaf is other or _digest(leaf) == _digest(other):
            continue
        types = f"{jax.typeof(leaf)}", f"{jax.typeof(other)}"
        if types[0] != types[1]:
            return f"{name} was {types[0]}, then {types[1]}"
        return f"{name} differs{_first_difference(leaf, other)}"
    return ""


def _is_text(leaf: Any) -> bool:
    return isinstance(leaf, str | bytes) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "SU")


def _digest(leaf: Any) -> str:
    """Of what this process holds: batches of a group of several processes are not gathered."""
    return digest(_spread(leaf).split(leaf))


def _spread(leaf: Any) -> Spread:
    return Spread.of(np.shape(leaf), getattr(leaf, "sharding", None))


def _first_difference(leaf: Any, other: Any) -> str:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return ""
    if _spread(leaf).sharding is not None:
        return " in this process's part"
    one, two = np.atleast_1d(np.asarray(leaf)), np.atleast_1d(np.asarray(other))
    differs = np.argwhere(one != two)
    if not len(differs):
        return ""  # NaNs or zeros with other bits
    at = tuple(map(int, differs[0]))
    return f" in {len(differs)} of {one.size} elements, first at {list(at)}: {one[at]!s}, then {two[at]!s}"
