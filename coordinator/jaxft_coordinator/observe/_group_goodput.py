"""Goodput of one group: the productive part of its time, and the sources of loss.

While a group takes part, its time is booked as its job's is: each step's productive and lost seconds count for each
member. Its other states name the source of loss. The time in a step that a group leaves before the commit is lost
progress. A spare that stands by, a group that ended on purpose, and the time in which the
job is paused or has finished are not counted: nothing is lost to them.
"""

import enum

from jaxft_protocol.coordinator.job import GroupPhase

from jaxft_coordinator.observe._goodput import Account, Source, Standing


class Spends(enum.Enum):
    """How a group spends time, where that is not simply lost."""

    TRAINING = "training"  # as its job does
    UNCOUNTED = "uncounted"


def spends(state: str, standing: Standing, *, spare: bool, ended: bool) -> Spends | Source:
    """Return how a group spends its time."""
    if ended or standing in (Standing.PAUSED, Standing.FINISHED):
        return Spends.UNCOUNTED
    if state == GroupPhase.MEMBER.value:
        return Spends.TRAINING
    if state == GroupPhase.READY.value and spare:
        return Spends.UNCOUNTED
    if state == GroupPhase.LEAVING.value:
        return Source.OTHER
    if state == GroupPhase.PRESENT.value or standing is Standing.STARTING:
        return Source.STARTUP
    return Source.RECOVERY


class GroupAccount:
    """One group's account of time, in seconds."""

    def __init__(self, now_s: float) -> None:
        self._how: Spends | Source = Spends.UNCOUNTED
        self._since_s = now_s
        self._good_s = 0.0
        self._lost_s = dict.fromkeys(Source, 0.0)
        self._job_s: tuple[float, dict[Source, float]] = (0.0, {})  # the job's account when training began

    def moves_to(self, how: Spends | Source, job: Account, now_s: float) -> None:
        """The group spends its time in this way from now on."""
        if how is self._how:
            return
        good_s, lost_s = self.seconds(job, now_s)
        if self._how is Spends.TRAINING:
            booked_s = good_s - self._good_s + sum(lost_s.values()) - sum(self._lost_s.values())
            lost_s[Source.WASTED] += max(0.0, now_s - self._since_s - booked_s)  # the step that it was in
        self._good_s, self._lost_s = good_s, lost_s
        self._how, self._since_s = how, now_s
        self._job_s = job.seconds(now_s)

    def seconds(self, job: Account, now_s: float) -> tuple[float, dict[Source, float]]:
        """Return productive and lost seconds up to now. A step in progress is not counted before its commit."""
        good_s, lost_s = self._good_s, dict(self._lost_s)
        passed_s = max(0.0, now_s - self._since_s)
        if isinstance(self._how, Source):
            lost_s[self._how] += passed_s
        elif self._how is Spends.TRAINING:
            job_good_s, job_lost_s = job.seconds(now_s)
            began_good_s, began_lost_s = self._job_s
            booked_s = job_good_s - began_good_s + sum(job_lost_s.values()) - sum(began_lost_s.values())
            # A spare that enters in the middle of a step was not there for all of it.
            part = min(1.0, passed_s / booked_s) if booked_s > 0 else 0.0
            good_s += part * (job_good_s - began_good_s)
            for source, seconds in job_lost_s.items():
                lost_s[source] += part * (seconds - began_lost_s[source])
        return good_s, lost_s

    def ratio(self, job: Account, now_s: float) -> float | None:
        """Return the productive part of the counted time so far, 0 to 1; None before any time has passed."""
        good_s, lost_s = self.seconds(job, now_s)
        total_s = good_s + sum(lost_s.values())
        return good_s / total_s if total_s > 0 else None
