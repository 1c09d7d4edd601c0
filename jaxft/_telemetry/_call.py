"""A call of the step, and who sees it: observers."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from jaxft._report import StepReport

_log = logging.getLogger("jaxft")
# The phase in which a group waits for the job's next decision.
WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the step that has ended.

    Attributes:
        report: of the call.
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


class Observers:
    """All observers of a group. The training thread owns it."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._all = tuple(observers)
        self._of_phases = tuple(each for each in self._all if isinstance(each, PhaseObserver))

    def calling(self, before: int, *, shards: int | None = None, joins: bool = False) -> "Calling":
        """Tell of a call of the step, which is the block. `Calling.ended` reports its result."""
        return Calling(self, before, shards, joins=joins)

    def enters(self, phase: str, step: int, detail: str = "") -> None:
        """A phase of the call begins."""
        _log.debug("%s step %d%s", phase, step, detail)
        for each in self._of_phases:
            each.enters(phase, step)

    def begins(self, step: int) -> None:
        for each in self._of_phases:
            each.begins(step)

    def called(self, call: Call) -> None:
        for each in self._all:
            each.called(call)

    def close(self, reason: str) -> None:
        for each in self._all:
            each.close(reason)


class Calling:
    """A call of the step, as its context manager."""

    def __init__(self, observers: Observers, before: int, shards: int | None, *, joins: bool) -> None:
        self._observers = observers
        self._before = before
        self._shards = shards
        self._joins = joins
        self._began_ns = 0
        self._ended: tuple[StepReport, Sequence[Any]] | None = None

    def ended(self, report: StepReport, state: Sequence[Any] = ()) -> None:
        """Take the call's report, and the leaves of the state after it."""
        self._ended = report, state

    def __enter__(self) -> "Calling":
        self._began_ns = time.time_ns()
        self._observers.begins(self._before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended is not None:
            report, state = self._ended
            self._observers.called(
                Call(
                    report,
                    self._before,
                    self._began_ns,
                    time.time_ns(),
                    error,
                    self._joins,
                    state,
                    self._shards,
                )
            )
