"""A run's own events (`jaxft-coordinator --events`, `Manager(events=...)`): its measurements, as inputs of a plan."""

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxft_launch.plan import forms
from jaxft_launch.plan.job import DETECT_S, DEVICES_PER_NODE, Job
from jaxft_launch.processes._checks import LaunchError

Event = dict[str, Any]
# The kernel closes a dead process's connections at once.
NOTICED_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run, from its first full quorum on; `step_s`: an undisturbed step, with its exchange."""

    groups: int
    spares: int
    shards_per_group: int
    steps: int
    step_s: float
    lasted_s: float
    failures: int
    return_s: float
    detect_s: float

    @property
    def goodput(self) -> float:
        return self.steps * self.step_s / self.lasted_s

    def job(self, planned: Job) -> Job:
        """Return a job with the run's numbers; its steps and returns include exchanges and heals."""
        group_mtbf_s = self.groups * self.lasted_s / max(1, self.failures)
        return replace(
            planned,
            groups=self.groups,
            shards_per_group=self.shards_per_group,
            step_s=self.step_s,
            mtbf_node_days=group_mtbf_s / forms.DAY_S * planned.devices_per_group / DEVICES_PER_NODE,
            return_s=self.return_s,
            detect_s=self.detect_s,
        )


def read(paths: Iterable[Path]) -> list[Event]:
    """Return the events of files, in the order of their times.

    Raises:
        LaunchError: a file cannot be read, or a line is no event.
    """
    found: list[Event] = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"The events of {path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                event = json.loads(line)
                if not isinstance(event["t"] + 0, float | int) or not isinstance(event["event"], str):
                    raise ValueError("no event")
            except (ValueError, TypeError, KeyError) as error:
                raise LaunchError(f"{path}, line {number}, is no event of jaxft: {line[:60]!r}") from error
            found.append(event)
    return sorted(found, key=lambda each: each["t"])


def measure(events: Sequence[Event], shards_per_group: int) -> Measured:
    """Measure a run by its events.

    Raises:
        LaunchError: they hold too little.
    """
    quorums = [each for each in events if each["event"] == "quorum_changed"]
    groups = max((len(each["members"]) for each in quorums), default=0)
    full = [each["t"] for each in quorums if len(each["members"]) == groups]
    marks = [each for each in events if full and "step" in each and each["t"] >= full[0] and _is_of_job(each)]
    if len(marks) < 2 or marks[-1]["step"] <= marks[0]["step"]:
        raise LaunchError(
            "The events show no steps of a full quorum: give the file of jaxft-coordinator --events."
        )
    lost = [each for each in marks if each["event"] in ("group_lost", "group_evicted")]
    done = [each for each in events if each["event"] == "step_done"]
    step_s = _step_s(done, groups) or _quiet_step_s(marks, groups)
    if not step_s:
        raise LaunchError(
            "The events show no undisturbed steps: add the groups' own files, of Manager(events=...)."
        )
    names = {name for each in quorums for name in each["members"]}
    heartbeats = sum("heartbeat" in each.get("reason", "") for each in lost)
    returns = [back_s for each in lost if (back_s := _back_s(each, quorums)) is not None]
    shards = {each["shards"] for each in done if each["members"] == groups and each["attempts"] == 1}
    return Measured(
        groups=groups,
        spares=max(0, len(names) - groups),
        shards_per_group=max(shards, default=shards_per_group),
        steps=marks[-1]["step"] - marks[0]["step"],
        step_s=step_s,
        lasted_s=marks[-1]["t"] - marks[0]["t"],
        failures=len(lost),
        return_s=statistics.mean(returns) if returns else 0.0,
        detect_s=NOTICED_S + (DETECT_S - NOTICED_S) * heartbeats / max(1, len(lost)),
    )


def _is_of_job(event: Event) -> bool:
    """Whether `step` is the job's, and not a group's own."""
    return event["event"] in (
        "quorum_changed",
        "quorum_ended",
        "step_done",
        "group_lost",
        "group_evicted",
        "job_finished",
    )


def _step_s(done: Sequence[Event], groups: int) -> float:
    """Return the median time from one step to the next in the same group, undisturbed."""
    last: dict[str, Event] = {}
    times: list[float] = []
    for each in done:
        before = last.get(each["group"])
        last[each["group"]] = each
        calm = each["members"] == groups and each["attempts"] == 1
        if (
            before
            and calm
            and before["quorum_id"] == each["quorum_id"]
            and before["step"] == each["step"] - 1
        ):
            times.append(each["t"] - before["t"])
    return statistics.median(times) if times else 0.0


def _quiet_step_s(marks: Sequence[Event], groups: int) -> float:
    """Return the time of a step between changes of the membership, under full quorums."""
    times: list[float] = []
    for before, after in itertools.pairwise(marks):
        full = before["event"] == "quorum_changed" and len(before["members"]) == groups
        if full and (steps := after["step"] - before["step"]) > 1:
            times += [(after["t"] - before["t"]) / steps] * steps
    return statistics.median(times) if times else 0.0


def _back_s(lost: Event, quorums: Sequence[Event]) -> float | None:
    later = (each["t"] for each in quorums if each["t"] > lost["t"] and lost["group"] in each["joined"])
    return next((back_t - lost["t"] for back_t in later), None)
