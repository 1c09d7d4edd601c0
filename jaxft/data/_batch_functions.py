"""The batch of each shard, from what a step is called with: a batch, a batch function, or a `FromState`."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxft._errors import ConfigurationError
from jaxft._programs._checks import refuse_iterator
from jaxft._programs._leaves import strong
from jaxft.data._from_state import FromState
from jaxft.data._pure import OF_STATE_INSTEAD, PureCheck

# Maps a step and a shard to that shard's batch.
BatchFor = Callable[[int, int], Any]


@dataclass(frozen=True, slots=True)
class OwnBatch:
    """The batch that a group brings itself, for any shard."""

    batch: Any

    def __call__(self, step: int, shard: int) -> Any:
        return self.batch


@dataclass(frozen=True, slots=True)
class StateBatches:
    """Batches that are made of the state, too: groups with different states make different ones.

    Attributes:
        ask: makes the batch of a shard, of the state that the next step starts from.
        leaves: returns the leaves of that state.
    """

    ask: BatchFor
    leaves: Callable[[], Sequence[Any]]

    def __call__(self, step: int, shard: int) -> Any:
        return self.ask(step, shard)

    def first_once(self) -> "StateBatches":
        """The same for a first call, which needs shard 0 for its type before it computes that shard."""
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
    """Makes the batch function of each call of one step, and checks now and then that it is pure.

    Args:
        shards: of the step; None: one for each group.
        alone: whether the step runs without a manager.
        held: returns the leaves of the state that is held; None before the first call.
    """

    def __init__(
        self, shards: int | None, *, alone: bool, held: Callable[[], Sequence[jax.Array] | None]
    ) -> None:
        self._shards = shards
        self._alone = alone
        self._held = held
        self._pure = PureCheck()

    def of(self, batch: Any, state: Any, whole: Callable[[Any], Any]) -> BatchFor:
        """Return the batch of each shard.

        Args:
            batch: what the step is called with.
            state: what the step is called with, without its static leaves.
            whole: puts the static leaves back.

        Raises:
            ConfigurationError: it is an iterator, or does not have the step's number of shards.
        """
        refuse_iterator(batch)
        if isinstance(batch, FromState):
            make = batch.of(lambda: self._current_state(state, whole))
            ask = self._pure.of(make, OF_STATE_INSTEAD) if batch.pure else make
            return StateBatches(ask, functools.partial(self._current_leaves, state))
        if callable(batch):
            self._check_shards(batch)
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


def asked_once(batch_for: BatchFor) -> BatchFor:
    """The same batches for a first call, which needs up to two for their types before it computes a shard."""
    match batch_for:
        case OwnBatch():
            return batch_for
        case StateBatches():
            return batch_for.first_once()
        case _:
            return functools.lru_cache(maxsize=2)(batch_for)
