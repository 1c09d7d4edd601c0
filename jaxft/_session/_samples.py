"""A group's work since its last sample, for the people who watch its job.

The training thread adds each step, and the session's thread takes the sum once per heartbeat: steps of any length
cost one small message a second.
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxft_protocol.messages import Sample, Step
from jaxft_protocol.wire import MAX_VALUE_NAME_LENGTH, MAX_VALUES

from jaxft._errors import ConfigurationError
from jaxft._programs._checks import short
from jaxft._report import StepReport


class Samples:
    """Adds up reports of steps. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum: Sample | None = None
        self._values: Mapping[str, float] = {}

    def add(self, report: StepReport) -> None:
        """Add one call of the step."""
        heal = report.heal
        with self._lock:
            so_far = self._sum or Sample(Step(0))
            self._sum = Sample(
                Step(report.step),
                so_far.steps + 1,
                so_far.attempts + report.attempts,
                so_far.shards + len(report.shards),
                so_far.shards_again + len(report.shards) - len(set(report.shards)),
                so_far.compute_s + report.compute_s,
                so_far.exchange_s + report.exchange_s,
                so_far.vote_s + report.vote_s,
                so_far.apply_s + report.apply_s,
                so_far.heals + (heal is not None),
                so_far.heal_s + (0.0 if heal is None else heal.seconds),
                so_far.heal_bytes + (0 if heal is None else heal.transferred_bytes),
            )

    def show(self, values: Mapping[str, float]) -> None:
        """Replace the shown values, without those not finite.

        Raises:
            ConfigurationError: one is not a number.
        """
        numbers = {name: _number(name, value) for name, value in values.items()}
        with self._lock:
            self._values = {name: number for name, number in numbers.items() if math.isfinite(number)}

    def take(self) -> Sample | None:
        """Return the additions since the last call; None if there are none."""
        with self._lock:
            taken, self._sum = self._sum, None
            if taken is None:
                return None
            return replace(taken, values=self._values)


def check_shown(values: Mapping[str, float]) -> None:
    """Raise ConfigurationError if these values cannot be shown."""
    if len(values) > MAX_VALUES:
        raise ConfigurationError(
            f"show got {len(values)} values, and the maximum is {MAX_VALUES}: show the most important ones"
        )
    for name in values:
        if not 0 < len(name) <= MAX_VALUE_NAME_LENGTH or not name.isprintable():
            raise ConfigurationError(
                f"the name of a shown value must have 1 to {MAX_VALUE_NAME_LENGTH} printable characters, unlike "
                f"{name!r}"
            )


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"show got {name}={short(value)}, a {type(value).__name__}, which is not a number ({error}). Show one "
            "number of it, such as its mean."
        ) from error
