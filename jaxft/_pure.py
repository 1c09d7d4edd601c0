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
from jaxft._programs._checks import refuse_iterator, refuse_others
from jaxft._programs._structure import first_difference

# Of so many batches one is computed twice: at most a thousandth of the time that batches take.
EVERY = 1000


class PureCheck:
    """Counts the batches that one step asks for, whichever function it is given."""

    def __init__(self) -> None:
        self._asked = 0

    def of(self, batch_for: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        """Return `batch_for`, checked now and then.

        Raises (when called):
            ConfigurationError: two calls for the same step and shard return different batches.
        """
        return functools.partial(self._ask, batch_for)

    def _ask(self, batch_for: Callable[[int, int], Any], step: int, shard: int) -> Any:
        batch = batch_for(step, shard)
        if self._asked % EVERY == 0:
            refuse_iterator(batch)  # of a function with `yield`, which JAX will not take as a leaf
            _compare(batch, batch_for(step, shard), f"step {step} and shard {shard}")
        self._asked += 1
        return batch


def _compare(batch: Any, again: Any, of: str) -> None:
    if differing := difference(batch, again):
        raise ConfigurationError(
            f"The batch function is not pure: it was called twice for {of}, and {differing}. Any group may have to "
            "compute any shard, at any time and more than once; with this function a run with failures would train "
            "on other samples than one without. Let the batch depend on step and shard alone: read samples by number "
            "(jaxft.data.Batches), wrap an iterator in jaxft.data.from_iterator, and draw random numbers from a "
            "generator seeded with both (numpy.random.default_rng([seed, step, shard])). Without shards=, a step "
            "also takes the batch itself in place of a function."
        )


def difference(batch: Any, again: Any) -> str:
    """Say where two batches differ; "" if they have the same bits.

    Raises:
        ConfigurationError: a leaf is not an array or a number.
    """
    refuse_others("batch", batch)
    leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
    others, other_tree = jax.tree.flatten(again)
    if tree != other_tree:
        return f"the second batch has another structure: {first_difference(tree, again)}"
    for (path, leaf), other in zip(leaves, others, strict=True):
        if leaf is other or _digest(leaf) == _digest(other):
            continue
        name = jax.tree_util.keystr(path) or "the batch"
        types = f"{jax.typeof(leaf)}", f"{jax.typeof(other)}"
        if types[0] != types[1]:
            return f"{name} was {types[0]}, then {types[1]}"
        return f"{name} differs{_first_difference(leaf, other)}"
    return ""


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
