"""A call of the step, and who sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxft._report import StepReport


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the step that has ended.

    Attributes:
        report: what it did.
        before: the committed steps before it.
        began_ns: when it began, in nanoseconds since 1970.
        ended_ns: when it ended.
        error: the exception that it raised, if it did.
        joins: a call of `step.join`, which takes no step.
        state: the leaves of the state after it.
        shards: the step's number of shards; None: one per member of the quorum.
    """

    report: StepReport
    before: int
    began_ns: int
    ended_ns: int
    error: BaseException | None = None
    joins: bool = False
    state: Sequence[Any] = ()
    shards: int | None = None


class Observer(Protocol):
    """Sees each call of the step, in the training thread. It must not wait."""

    def called(self, call: Call) -> None: ...

    def close(self, reason: str) -> None:
        """The group ends; `reason`: the exception that ends it, or empty."""
        ...


@runtime_checkable
class PhaseObserver(Observer, Protocol):
    """Sees the phases of a call, too: wait, compute, exchange, vote, apply, heal and replay."""

    def begins(self, step: int) -> None:
        """A call begins, with the state after `step` committed steps."""
        ...

    def enters(self, phase: str, step: int) -> None:
        """A phase begins."""
        ...
