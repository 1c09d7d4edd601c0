"""A run's own events (`jaxft-coordinator --events`, `Manager(events=...)`): its measurements, as inputs of a plan."""

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxft_launch.plan.forms import DAY_S
from jaxft_launch.plan.job import DETECT_S, DEVICES_PER_NODE, Job
from jaxft_launch.processes._checks import LaunchError

Event = dict[str, Any]
NOTICED_S = 0.1  # the kernel closes a dead process's connections at once
LOST = ("group_lost", "group_evicted")
OF_THE_JOB = (*LOST, "quorum_changed", "quorum_ended", "step_done", "job_finished")  # their step is the job's


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
        names = ("groups", "shards_per_group", "step_s", "return_s", "detect_s")
        ran_s = (self.groups + self.spares) * self.lasted_s - self.failures * self.return_s
        days = ran_s / max(1, self.failures) / DAY_S * planned.devices_per_group / DEVICES_PER_NODE
        return replace(
            planned, measured=True, mtbf_node_days=days, **{name: getattr(self, name) for name in names}
        )


def read(paths: Iterable[Path]) -> list[Event]:
    """Return the events of files, by time.

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
                found.append({**event, "t": float(event["t"]), "event": str(event["event"])})
            except (ValueError, TypeError, KeyError) as error:
                raise LaunchError(f"{path}, line {number}, is no event of jaxft: {line[:60]!r}") from error
    return sorted(found, key=lambda each: each["t"])


def measure(events: Sequence[Event], shards_per_group: int) -> Measured:
    """Measure a run by its events.

    Raises:
        LaunchError: they hold too little.
    """
    quorums = [each for each in events if each["event"] == "quorum_changed"]
    groups = max((each["members"] for each in quorums), default=0)
    began = next((each["t"] for each in quorums if each["members"] == groups), float("inf"))
    marks = [each for each in events if each["event"] in OF_THE_JOB and "step" in each and each["t"] >= began]
    if len(marks) < 2 or marks[-1]["step"] <= marks[0]["step"]:
        raise LaunchError(
            "The events show no steps of a full quorum: give the file of jaxft-coordinator --events."
        )
    done = [each for each in events if each["event"] == "step_done"]
    calm = [each for each in done if each["members"] == groups and each["attempts"] == 1]
    times = _step_times_s(calm) or _quiet_times_s(marks, groups)
    if not times:
        raise LaunchError(
            "The events show no undisturbed steps: add the groups' own files, of Manager(events=...)."
        )
    lost = [each for each in marks if each["event"] in LOST]
    returns_s = _returns_s(lost, quorums)
    silent = sum("heartbeat" in each.get("reason", "") for each in lost) / max(1, len(lost))
    return Measured(
        groups=groups,
        spares=max(0, len({each["group"] for each in events if "group" in each}) - groups),
        shards_per_group=max((len(each["shards"]) for each in calm), default=shards_per_group),
        steps=marks[-1]["step"] - marks[0]["step"],
        step_s=statistics.median(times),
        lasted_s=marks[-1]["t"] - marks[0]["t"],
        failures=len(lost),
        return_s=statistics.mean(returns_s or [0.0]),
        detect_s=NOTICED_S + (DETECT_S - NOTICED_S) * silent,
    )


def _step_times_s(calm: Sequence[Event]) -> list[float]:
    """Return the times from one undisturbed step to the next in the same group."""
    ended = {(each["group"], each["quorum_id"], each["step"]): each["t"] for each in calm}
    last = ((t, ended.get((group, quorum, step - 1))) for (group, quorum, step), t in ended.items())
    return [t - before for t, before in last if before is not None]


def _quiet_times_s(marks: Sequence[Event], groups: int) -> list[float]:
    """Return the times of steps between two changes of the membership, under full quorums."""
    times: list[float] = []
    for before, after in itertools.pairwise(marks):
        full = before["event"] == "quorum_changed" and before["members"] == groups
        if full and (steps := after["step"] - before["step"]) > 1:
            times += [(after["t"] - before["t"]) / steps] * steps
    return times


def _returns_s(lost: Sequence[Event], quorums: Sequence[Event]) -> list[float]:
    joined = [(each["t"], name) for each in quorums for name in each.get("joined", ())]
    later = ([t for t, name in joined if name == each["group"] and t > each["t"]] for each in lost)
    return [min(times) - each["t"] for each, times in zip(lost, later, strict=True) if times]
