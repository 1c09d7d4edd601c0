"""Checks that a step is given the state that the last step returned, and makes edits of it.

The job knows the state only by the steps that it has committed. A state that user's code changes between two calls
is served by no donor, replayed by no joiner and held by no checkpoint.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft._arrays._lanes import Part
from jaxft._arrays._leaf_types import is_key
from jaxft._arrays._pieces import Spread
from jaxft._arrays._placement import place
from jaxft._errors import ConfigurationError
from jaxft._programs._compat import PyTreeDef
from jaxft._programs._leaves import first_difference, labels, refuse_tracers


def same_state(
    state: Any, leaves: Sequence[jax.Array], held: Sequence[jax.Array], step: int
) -> Sequence[jax.Array]:
    """Return the held leaves if `state` has the same arrays, or the same bits.

    Raises:
        ConfigurationError: the state was changed.
    """
    for index, (leaf, mine) in enumerate(zip(leaves, held, strict=True)):
        if leaf is not mine and not _equal(leaf, mine):
            raise ConfigurationError(
                f"The state's leaf {_name(state, index)} has other values than the step returned: it "
                f"was changed between two calls, at step {step}. Groups that join, checkpoints and perhaps the other "
                "groups do not know of that, so the run would not be the same for all. Make the change with "
                "`state = step.edit(state, function)` in a loop over `steps`: then it is part of the run. To train "
                "another state, make another step with jaxft.fault_tolerant, in a job with another Manager and "
                "another job name."
            )
    return held


def edited(before: PyTreeDef, after: Any, held: Sequence[jax.Array]) -> dict[int, jax.Array]:
    """The leaves that differ between two states, placed like the held ones, by number.

    Raises:
        ConfigurationError: they differ in structure, shapes or dtypes, or the function has consumed its argument.
    """
    if any(leaf.is_deleted() for leaf in held):
        raise ConfigurationError(
            "The function of an edit has donated the state that it was given. It must leave it intact, because other "
            "groups may still fetch it: jit it without donate_argnums. This group has to be started again."
        )
    leaves, tree = jax.tree.flatten(after)
    if tree != before:
        raise ConfigurationError(
            "The function of an edit returned a state with another structure than it was given: "
            f"{first_difference(before, after)}. Return a state with the same containers, "
            "settings and leaves."
        )
    refuse_tracers(leaves)
    return {
        index: _like(leaf, mine, after, index)
        for index, (leaf, mine) in enumerate(zip(leaves, held, strict=True))
        if leaf is not mine
    }


def _like(leaf: Any, mine: jax.Array, state: Any, index: int) -> jax.Array:
    """A copy of a leaf that is placed like the one it replaces, and shares memory with none."""
    if isinstance(leaf, bool | int | float | complex):
        leaf = jnp.asarray(leaf, mine.dtype) if np.result_type(leaf).kind == mine.dtype.kind else leaf
    aval = jax.typeof(leaf)
    if (aval.shape, aval.dtype) != (mine.shape, mine.dtype):
        raise ConfigurationError(
            f"An edit made the state's leaf {_name(state, index)} a {aval.dtype}{list(aval.shape)}, but it is a "
            f"{mine.dtype}{list(mine.shape)}. An edit must keep the types of the state; convert the leaf "
            "(`.astype(old.dtype)`)."
        )
    spread = Spread.of(mine.shape, mine.sharding)
    copies = [np.array(block) for block in _blocks(leaf, mine)]
    return spread.join(place(copies, spread.split(mine)))


def _equal(leaf: jax.Array, mine: jax.Array) -> bool:
    """Whether two leaves have the same type and bits."""
    if mine.is_deleted() or (leaf.shape, leaf.dtype) != (mine.shape, mine.dtype):
        return False
    pairs = zip(_blocks(leaf, mine), _blocks(mine, mine), strict=True)
    return all(one.tobytes() == other.tobytes() for one, other in pairs)


def _blocks(leaf: Any, like: jax.Array) -> list[np.ndarray]:
    """Of a leaf, the blocks that this process holds of `like`, which is of the same type; a key as its key data."""
    spread = Spread.of(like.shape, like.sharding)
    if spread.sharding is not None and isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return list(map(_on_host, spread.split(jax.device_put(leaf, like.sharding))))
    host = _on_host(leaf)
    return [host[Part(0, block).index] for block in spread.blocks]


def _on_host(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if isinstance(leaf, jax.Array) and is_key(leaf) else leaf)


def _name(state: Any, index: int) -> str:
    return labels(state)[index] or "(the state itself)"
