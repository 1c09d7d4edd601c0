"""Which steps a run lost, and why: computed from the events alone.

A step is lost if work on it was done twice, or if it was committed and then undone. Any of these five observations
shows that:

* A group computed a shard of the step twice.
* Two groups both committed the step and both computed the same shard of it.
* The steps of one incarnation do not strictly increase: it went back and did them again.
* Two groups report different losses, or different states, for the step: they did not commit the same one.
* No group reports the step, although a later one was committed.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jaxft_launch.storm._record import History


@dataclass(frozen=True, slots=True, order=True)
class LostStep:
    """A reason to call a step lost. One step may have several."""

    step: int
    why: str


def lost_steps(histories: Iterable[History]) -> tuple[LostStep, ...]:
    """Return every reason why a step of this run counts as lost, in the order of the steps."""
    histories = tuple(histories)
    return tuple(
        sorted(
            {
                *_computed_twice_by_one(histories),
                *_computed_twice_by_two(histories),
                *_undone(histories),
                *_different_losses(histories),
                *_different_states(histories),
                *_missing(histories),
            }
        )
    )


def _computed_twice_by_one(histories: Iterable[History]) -> Iterator[LostStep]:
    for history in histories:
        for event in history.steps:
            for shard, times in Counter(event.shards).items():
                if times > 1:
                    yield LostStep(event.step, f"{_name(history)} computed shard {shard} {times} times")


def _computed_twice_by_two(histories: Iterable[History]) -> Iterator[LostStep]:
    owners: dict[tuple[int, int], list[str]] = defaultdict(list)
    for history in histories:
        for event in history.steps:
            for shard in set(event.shards) if event.live else ():
                owners[event.step, shard].append(_name(history))
    for (step, shard), names in owners.items():
        if len(set(names)) > 1:
            yield LostStep(step, f"shard {shard} was computed by {' and by '.join(sorted(set(names)))}")


def _undone(histories: Iterable[History]) -> Iterator[LostStep]:
    for history in histories:
        highest = 0
        for event in history.steps:
            for step in range(event.step, highest + 1):
                yield LostStep(
                    step, f"{_name(history)} was at step {highest} and then reported step {event.step}"
                )
            highest = max(highest, event.step)


def _different_losses(histories: Iterable[History]) -> Iterator[LostStep]:
    reported: dict[int, dict[str, str]] = defaultdict(dict)
    for history in histories:
        for event in history.steps:
            # A group that fetched the state of a step did not get its loss.
            if event.live or not math.isnan(event.loss):
                # Compared as text, which is exact, and for which NaN equals NaN.
                reported[event.step].setdefault(repr(event.loss), _name(history))
    for step, names in reported.items():
        if len(names) > 1:
            losses = ", ".join(f"{loss} ({name})" for loss, name in names.items())
            yield LostStep(step, f"groups report different losses: {losses}")


def _different_states(histories: Iterable[History]) -> Iterator[LostStep]:
    reported: dict[int, dict[str, str]] = defaultdict(dict)
    for history in histories:
        for event in history.steps:
            if event.digest:
                reported[event.step].setdefault(event.digest, _name(history))
    for step, names in reported.items():
        if len(names) > 1:
            states = ", ".join(f"{digest} ({name})" for digest, name in names.items())
            yield LostStep(step, f"groups report different states: {states}")


def _missing(histories: Iterable[History]) -> Iterator[LostStep]:
    seen = {event.step for history in histories for event in history.steps}
    for step in range(1, max(seen, default=0)):
        if step not in seen:
            yield LostStep(step, "no group reports it, although later steps were committed")


def _name(history: History) -> str:
    return f"{history.group} (incarnation {history.incarnation})"
