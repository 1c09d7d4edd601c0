"""The interface that runs the steps of a group, in a job or alone."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax

from jaxft._replica._call import Call
from jaxft._replica._steps import Steps


class Engine(Steps, Protocol):
    """Runs the steps of a group."""

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """Within this context, the group does not count as hung."""
        ...

    def join(self, call: Call, state: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Join the job without taking a step; return the leaves of its newest state."""
        ...

    def edit(self, changes: Mapping[int, jax.Array]) -> None:
        """Replace leaves of the state before the next step, as part of that step."""
        ...

    def run(self, call: Call, state: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Any]:
        """Commit at least one more step; return the leaves of the state after it, and its metrics.

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
