"""The interface that runs the steps of a group, in a job or alone."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

from jaxft._arrays._device_sums import DeviceSums
from jaxft._programs._nonfinite import Policy
from jaxft._programs._programs import Programs
from jaxft._replica._steps import Steps

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


class Call(NamedTuple):
    """One call of a step, without its state."""

    programs: Programs
    batch_for: BatchFor
    shards: int | None  # None: one per member of the quorum
    nonfinite: Policy

    def sums(self, stage: int) -> DeviceSums | None:
        """What adds a group's shards on an accelerator; None: it has one, or the host adds them."""
        return self.programs.sums(stage) if self._adds else None

    def made(self, stage: int, contribution: Sequence[Any]) -> None:
        """Note where the parts of a contribution are, which decides what adds them."""
        if self._adds:
            self.programs.made(stage, contribution)

    @property
    def _adds(self) -> bool:
        """Whether a group may have several shards to add."""
        return (self.shards or 1) > 1


class Engine(Steps, Protocol):
    """Runs the steps of a group."""

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """Within this context, the group does not count as hung."""
        ...

    def join(self, call: Call, state: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Join the job without taking a step; return the leaves of its newest state.

        Args:
            call: the step to take later.
            state: as in `run`; not consumed unless this group heals.
        """
        ...

    def edit(self, changes: Mapping[int, jax.Array]) -> None:
        """Replace leaves of the state before the next step, as part of that step."""
        ...

    def run(self, call: Call, state: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Any]:
        """Commit at least one more step; return the leaves of the state after it, and its metrics.

        Args:
            call: the step to take.
            state: the leaves of the state before it, from `Programs.state_leaves`; consumed.

        Raises:
            OtherTypes: the call's programs do not match this state. It has not been consumed.
            NonFinite: the means are not finite, and the policy is "raise".
        """
        ...


class AnyManager(Protocol):
    """A group's membership of a job, as its step sees it: `jaxft.Manager`."""

    @property
    def step(self) -> int: ...
    def steps(self, total: int | None) -> Iterator[int]: ...
    @property
    def _engine(self) -> Engine: ...
    def _compare_ranks(self, settings: Mapping[str, str]) -> None: ...
