"""The batch of each shard, from the second argument of a step: a batch, a batch function, or a `FromState`.

A batch function is checked to be pure: it is asked for the same batch twice, in the first call and rarely later. An
iterator behind it, or augmentation without a seed, is not seen in a run without failures. After the first failure
groups have trained on other samples than were promised, unnoticed.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxft._arrays._digest import digest
from jaxft._arrays._pieces import Spread
from jaxft._errors import ConfigurationError
from jaxft._programs._checks import refuse_iterator, refuse_others, short
from jaxft._programs._leaves import first_difference, strong
from jaxft.data._from_state import FromState

# Maps a step and a shard to that shard's batch.
BatchFor = Callable[[int, int], Any]

# Recompute one batch in this many: at most 0.1 % of the time that batches take.
EVERY = 1000

_INSTEAD = (
    "Let the batch depend on step and shard alone: read samples by number (jaxft.data.Batches), wrap an iterator in "
    "jaxft.data.from_iterator, and draw random numbers from a generator seeded with both "
    "(numpy.random.default_rng([seed, step, shard])). A batch that is made of the current weights is made by "
    "jaxft.data.FromState. Without shards=, a step also takes the batch itself in place of a function."
)
OF_STATE_INSTEAD = (
    "Let the batch depend on step, shard and state alone, and draw random numbers from a key or a generator that is "
    "made of the first two (jax.random.fold_in(jax.random.fold_in(key, step), shard)). If it cannot, as with a "
    "reward that a service gives, write FromState(make, pure=False)."
)


@dataclass(frozen=True, slots=True)
class OwnBatch:
    """The batch that a group brings itself, for any shard."""

    batch: Any

    def __call__(self, _step: int, _shard: int) -> Any:
        return self.batch


@dataclass(frozen=True, slots=True)
class StateBatches:
    """Batches that are made of the state, too: groups with different states make different ones.

    Attributes:
        ask: makes the batch of a shard, of the state that the next step starts from.
        leaves: returns the leaves of that state.
        example: makes one of the same types at less cost. None: `ask` does.
        data: makes what all groups have in common of a batch. None: nothing is.
    """

    ask: BatchFor
    leaves: Callable[[], Sequence[Any]]
    example: BatchFor | None = None
    data: BatchFor | None = None

    def __call__(self, step: int, shard: int) -> Any:
        return self.ask(step, shard)

    def first_once(self) -> "StateBatches":
        """The same for a first call, which needs shard 0 for its type before it computes that shard."""
        if self.example is not None:
            return self
        known: dict[int, tuple[Sequence[Any], Any]] = {}

        def ask(step: int, shard: int) -> Any:
            if shard:
                return self.ask(step, shard)
            leaves = self.leaves()
            before, batch = known.get(step, ((), None))
            if step not in known or not _are_same(before, leaves):
                batch = self.ask(step, shard)
                known[step] = leaves, batch
            return batch

        return StateBatches(ask, self.leaves)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


class BatchFunctions:
    """Makes the batch function of each call of one step, and checks now and then that it is pure."""

    def __init__(
        self, shards: int | None, *, alone: bool, held: Callable[[], Sequence[jax.Array] | None]
    ) -> None:
        self._shards = shards
        self._alone = alone
        self._held = held
        self._pure = PureCheck()
        self._accepted: Any = None  # the last batch function that was checked

    def of(self, batch: Any, state: Any, whole: Callable[[Any], Any]) -> BatchFor:
        """Return the batch of each shard.

        Raises:
            ConfigurationError: it is an iterator, or does not have the step's number of shards.
        """
        if batch is not self._accepted:
            refuse_iterator(batch)
        if isinstance(batch, FromState):
            make = batch.of(lambda: self._current_state(state, whole))
            ask = self._pure.of(make, OF_STATE_INSTEAD) if batch.pure else make
            return StateBatches(ask, functools.partial(self._current_leaves, state))
        if callable(batch):
            if batch is not self._accepted:
                self._check_shards(batch)
            self._accepted = batch
            return self._pure.of(batch)
        if self._shards not in (None, 1):
            raise ConfigurationError(
                f"The step has {self._shards} shards, so each group must be able to compute any of them, but it was "
                "called with one batch. Give it a function `batch(step, shard) -> batch`, or leave out shards."
            )
        return OwnBatch(batch)

    def _current_leaves(self, given: Any) -> Sequence[Any]:
        """The leaves of the state that the next step starts from; in a first call the `given` state's."""
        held = self._held()
        return jax.tree.leaves(given) if held is None else held

    def _current_state(self, given: Any, whole: Callable[[Any], Any]) -> Any:
        """The state that the next step starts from, as the user knows it, in new containers.

        Its leaves are arrays of strong types. After a heal or a restore other leaves may be weak than in a group that
        has made the same state itself, and what user's code makes of them would have other types.
        """
        leaves = map(strong, self._current_leaves(given))
        return whole(jax.tree.structure(given).unflatten(leaves))

    def _check_shards(self, batch_for: Any) -> None:
        """Batches that know their number of shards, such as `jaxft.data.Batches`, must be read as a whole."""
        theirs = getattr(batch_for, "shards", None)
        ours = 1 if self._shards is None and self._alone else self._shards
        if theirs == ours or not isinstance(theirs, int | np.integer):
            return
        mine = "no shards=, so that each group computes one" if ours is None else f"shards={ours}"
        raise ConfigurationError(
            f"The step has {mine}, but its batches are divided into {theirs} shards: samples would be left "
            "out, or asked for that do not exist. Pass the same number to both: "
            f"`jaxft.fault_tolerant(..., shards=batches.shards)`, which is {theirs} here."
        )


def example_of(batch_for: BatchFor) -> BatchFor:
    """What makes batches of the same types, where their values do not count."""
    found = batch_for.example if isinstance(batch_for, StateBatches) else None
    return found or batch_for


def data_of(batch_for: BatchFor) -> BatchFor | None:
    """What makes the part of a batch that all groups have in common; None: there is none."""
    if isinstance(batch_for, OwnBatch):
        return None
    return batch_for.data if isinstance(batch_for, StateBatches) else batch_for


def asked_once(batch_for: BatchFor) -> BatchFor:
    """The same batches for a first call, which needs up to two for their types before it computes a shard."""
    match batch_for:
        case OwnBatch():
            return batch_for
        case StateBatches():
            return batch_for.first_once()
        case _:
            return functools.lru_cache(maxsize=2)(batch_for)


class PureCheck:
    """Counts the batches that one step asks for, whichever function it is given."""

    def __init__(self) -> None:
        self._asked = 0

    def of(self, batch_for: Callable[[int, int], Any], instead: str = _INSTEAD) -> Callable[[int, int], Any]:
        """Return `batch_for`, checked now and then.

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
    """Of this process's blocks: batches of a group of several processes are not gathered."""
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
