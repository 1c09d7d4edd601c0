"""Observers: they get each call of the step."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxft_protocol.replica.state import Identity

from jaxft._errors import ConfigurationError
from jaxft._report import StepReport
from jaxft._telemetry._call import Call, Observer

if TYPE_CHECKING:
    from jaxft._replica._config import GroupConfig

VARIABLE = "JAXFT_EVENTS"
COLLECTOR_VARIABLE = "JAXFT_OTLP"


class Observers:
    """All observers of a group."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._all = tuple(observers)

    @contextmanager
    def calling(self, before: int) -> Iterator[list[StepReport]]:
        """Tell of a call, which is the block. It puts its report into the list."""
        reports: list[StepReport] = []
        began_ns, error = time.time_ns(), None
        try:
            yield reports
        except BaseException as raised:
            error = raised
            raise
        finally:
            for report in reports if self._all else ():
                call = Call(report, before, began_ns, time.time_ns(), error)
                for each in self._all:
                    each.called(call)

    def close(self, reason: str) -> None:
        for each in self._all:
            each.close(reason)


def observers_of(config: "GroupConfig", identity: Identity, rank: int) -> Observers:
    """Return the observers that a group's settings ask for; none in any other rank than 0.

    Raises:
        ConfigurationError: the file of events cannot be written, or spans cannot be sent to the named collector.
    """
    found: list[Observer] = []
    if rank:
        return Observers()
    if (path := event_path(config.events, config.group)) is not None:
        from jaxft._telemetry._events import GroupEvents

        try:
            found.append(GroupEvents(path, config, identity))
        except OSError as error:
            raise ConfigurationError(
                f"the events of group {config.group!r} cannot be written to {str(path)!r}: {error}. Pass another "
                f"file as `events`, or set {VARIABLE} to one."
            ) from error
    if config.tracer is not None:
        from jaxft._telemetry._traces import Traces

        found.append(Traces(config.tracer, job=config.job, group=config.group))
    elif url := os.environ.get(COLLECTOR_VARIABLE, ""):
        found.append(_exported(url, config))
    return Observers(found)


def _exported(url: str, config: "GroupConfig") -> Observer:
    try:
        from jaxft._telemetry._otlp import ExportedTraces
    except ImportError as error:
        raise ConfigurationError(
            f"{COLLECTOR_VARIABLE} names the collector {url!r}, but what sends spans is not installed ({error}). Run "
            'pip install "jaxft[otlp]", or unset the variable.'
        ) from error
    return ExportedTraces(url, job=config.job, group=config.group)


def event_path(given: Any, group: str) -> Path | None:
    """Return the file for a group's events: the given one or that of the environment, with the group's name in it."""
    text = str(given) if given else os.environ.get(VARIABLE, "")
    return Path(text.replace("{group}", group)) if text else None
