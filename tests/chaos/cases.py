"""Handmade records of runs for tests of the verdict, and a quick start for scripts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jaxft
from jaxft_launch.storm._events import FinishedEvent, StepEvent
from jaxft_launch.storm._record import History, Kill, RunRecord

# At the start of a script, this skips `jaxft/__init__.py` and so the seconds to import JAX.
WITHOUT_JAX = (
    "import sys, types\n"
    f"sys.path.append({str(Path(__file__).parent)!r})\n"
    "sys.modules['jaxft'] = types.ModuleType('jaxft')\n"
    f"sys.modules['jaxft'].__path__ = [{str(Path(jaxft.__file__).parent)!r}]\n"
)

GROUPS = ("group-0", "group-1", "group-2")
SHARDS_OF = {"group-0": (0, 1), "group-1": (2, 3), "group-2": (4, 5)}


def step_event(group: str, step: int, **changes: Any) -> StepEvent:
    """A step to which every group contributed: one per second, committed by all groups at the same time."""
    event = StepEvent(
        t_s=float(step), step=step, loss=10.0 / step, seconds=1.0, shards=SHARDS_OF[group], members=GROUPS
    )
    return replace(event, **changes)


def finished(step: int, digest: str | None = "d0") -> FinishedEvent:
    return FinishedEvent(t_s=step + 0.1, step=step, digest=digest)


def history(group: str, steps: range, *, incarnation: int = 0, end: FinishedEvent | None = None) -> History:
    events = tuple(step_event(group, step) for step in steps)
    return History(group=group, incarnation=incarnation, steps=events, finished=end)


def undisturbed(steps: int = 10, digest: str = "d0") -> RunRecord:
    """A run without failures."""
    histories = tuple(history(group, range(1, steps + 1), end=finished(steps, digest)) for group in GROUPS)
    return RunRecord(groups=GROUPS, planned_steps=steps, histories=histories)


def disturbed(steps: int = 10) -> RunRecord:
    """A run in which group-1 was killed 0.25 s after step 3 and, caught up with step 5, was back in step 6."""
    caught_up = step_event("group-1", 5, attempts=0, shards=(), loss=float("nan"))
    back = history("group-1", range(6, steps + 1), incarnation=1, end=finished(steps))
    survivors = {
        group: history(group, range(1, steps + 1), end=finished(steps)) for group in ("group-0", "group-2")
    }
    # In steps 4 and 5 the other two shared the work of group-1.
    for group, extra in (("group-0", 2), ("group-2", 3)):
        for step in (4, 5):
            shards = (*SHARDS_OF[group], extra)
            survivors[group] = with_step(
                survivors[group], step, shards=shards, members=("group-0", "group-2")
            )
    histories = (
        survivors["group-0"],
        history("group-1", range(1, 4)),
        replace(back, steps=(caught_up, *back.steps)),
        survivors["group-2"],
    )
    kill = Kill(group="group-1", incarnation=0, t_s=3.25, step=3)
    return RunRecord(groups=GROUPS, planned_steps=steps, planned_kills=1, kills=(kill,), histories=histories)


def with_step(of: History, step: int, **changes: Any) -> History:
    """The history with a changed event."""
    events = (replace(event, **changes) if event.step == step else event for event in of.steps)
    return replace(of, steps=tuple(events))


def without_step(of: History, step: int) -> History:
    return replace(of, steps=tuple(event for event in of.steps if event.step != step))


def with_history(record: RunRecord, changed: History) -> RunRecord:
    """The record with one incarnation's history changed."""
    key = (changed.group, changed.incarnation)
    return replace(
        record, histories=tuple(changed if (h.group, h.incarnation) == key else h for h in record.histories)
    )
