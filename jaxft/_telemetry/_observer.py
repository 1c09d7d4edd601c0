"""Observers: they see each call of the step."""

import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxft_protocol.replica.state import Identity

from jaxft._errors import ConfigurationError
from jaxft._report import StepReport
from jaxft._telemetry._call import Call, Observer, PhaseObserver

VARIABLE = "JAXFT_EVENTS"

_log = logging.getLogger("jaxft")


class Observers:
    """All observers of a group. The training thread owns it."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._all = tuple(observers)
        self._of_phases = tuple(each for each in self._all if isinstance(each, PhaseObserver))

    def calling(self, before: int, *, shards: int | None = None, joins: bool = False) -> "Calling":
        """Tell of a call of the step, which is the block. It says at its end what it did: `Calling.ended`."""
        return Calling(self, before, shards, joins)

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

    def __init__(self, observers: Observers, before: int, shards: int | None, joins: bool) -> None:
        self._observers = observers
        self._before = before
        self._shards = shards
        self._joins = joins
        self._began_ns = 0
        self._ended: tuple[StepReport, Sequence[Any]] | None = None

    def ended(self, report: StepReport, state: Sequence[Any] = ()) -> None:
        """Say what the call did, and the leaves of the state after it."""
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


def observers_of(
    identity: Identity, *, events: str | Path | None, tracer: Any, step: int, spare: bool
) -> list[Observer]:
    """Return the observers that a group's settings ask for. `step`: with which the group begins.

    Raises:
        ConfigurationError: the file of events cannot be written.
    """
    found: list[Observer] = []
    if (path := event_path(events, identity.group)) is not None:
        from jaxft._telemetry._events import GroupEvents

        try:
            found.append(GroupEvents(path, identity, step=step, spare=spare))
        except OSError as error:
            raise ConfigurationError(
                f"the events of group {identity.group!r} cannot be written to {str(path)!r}: {error}. Pass another "
                f"file as `events`, or set {VARIABLE} to one."
            ) from error
    if tracer is not None:
        from jaxft._telemetry._traces import Traces

        found.append(Traces(tracer, job=identity.job, group=identity.group))
    return found


def event_path(given: Any, group: str) -> Path | None:
    """Return the file for a group's events: the given one or that of the environment, with the group's name in it."""
    text = str(given) if given else os.environ.get(VARIABLE, "")
    return Path(text.replace("{group}", group)) if text else None
