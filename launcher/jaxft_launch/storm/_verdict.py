"""The verdict on the records of two runs. Pure functions."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxft_launch.storm._lost import LostStep, lost_steps
from jaxft_launch.storm._record import (
    Fault,
    History,
    Kill,
    RunRecord,
    again_s,
    back_s,
    participation,
    stall_s,
    standstill_s,
)


@dataclass(frozen=True, slots=True)
class KillOutcome:
    """The cost of a kill. None where it never happened."""

    kill: Kill
    stall_s: float | None
    back_s: float | None


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """The cost of a fault: how long the job stood still, and how long after its end each victim took part again.

    None where it never happened.
    """

    fault: Fault
    standstill_s: float | None
    again_s: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of two runs.

    Attributes:
        nproc: the number of processes of each group.
        planned_kills: the planned number of kills.
        kills: each with its cost, in order.
        planned_faults: the planned number of faults other than kills.
        faults: each of those with its cost, in order.
        participation: the share of time in which groups that could take part did so; None if unknown.
        planned_steps: the planned number of steps.
        steps_committed: in the run with kills.
        lost: every reason why a step counts as lost; `steps_lost` counts steps.
        digests: the final state of each group, after the kills; None for a group that did not finish.
        undisturbed_digests: the same for the run without kills; empty if there was none.
        first_difference: the first step whose loss (or state, if reported) differs between the two runs.
        tells_losses: whether the groups reported their losses.
        s_per_step: of the run with kills, from its first commit to its last.
        undisturbed_s_per_step: of the run without kills.
        problems: other reasons why this is not a success.
        too_short: what of the plan the job had no room for: in its steps, or in its data.
    """

    nproc: int
    planned_kills: int
    kills: tuple[KillOutcome, ...]
    planned_faults: int
    faults: tuple[FaultOutcome, ...]
    participation: float | None
    planned_steps: int
    steps_committed: int
    lost: tuple[LostStep, ...]
    digests: Mapping[str, str | None]
    undisturbed_digests: Mapping[str, str | None]
    first_difference: int | None
    tells_losses: bool
    s_per_step: float | None
    undisturbed_s_per_step: float | None
    problems: tuple[str, ...]
    too_short: tuple[str, ...]

    @property
    def steps_lost(self) -> int:
        return len({lost.step for lost in self.lost})

    @property
    def digests_equal(self) -> bool:
        """Whether all groups ended with the same bits."""
        return _one_value(self.digests)

    @property
    def matches_undisturbed(self) -> bool:
        """Whether all groups of both runs ended with the same bits."""
        both = {*self.digests.values(), *self.undisturbed_digests.values()}
        return self.digests_equal and _one_value(self.undisturbed_digests) and len(both) == 1

    @property
    def differs(self) -> bool:
        """Whether a group that finished, or a step, has other bits than the undisturbed run."""
        ends = {*self.digests.values(), *self.undisturbed_digests.values()} - {None}
        return self.first_difference is not None or len(ends) > 1

    @property
    def ok(self) -> bool:
        """Whether nothing was lost, all states are equal, and everything went as planned."""
        return self.matches_undisturbed and not (self.lost or self.problems or self.too_short)

    @property
    def incomplete(self) -> bool:
        """Whether this is no success only because the job had no room for the whole plan."""
        compared = bool(self.too_short and self.undisturbed_digests)
        return compared and not (self.lost or self.problems or self.differs)


def judge(disturbed: RunRecord, undisturbed: RunRecord | None) -> Verdict:
    """Return the verdict on the records. Without an undisturbed run, it cannot be a success."""
    kills = tuple(
        KillOutcome(
            kill, stall_s(kill, disturbed.histories, disturbed.kills), back_s(kill, disturbed.histories)
        )
        for kill in disturbed.kills
    )
    faults = tuple(
        FaultOutcome(fault, standstill_s(fault, disturbed.histories), _again(fault, disturbed))
        for fault in disturbed.faults
    )
    return Verdict(
        nproc=disturbed.nproc,
        planned_kills=disturbed.planned_kills,
        kills=kills,
        planned_faults=disturbed.planned_faults,
        faults=faults,
        participation=participation(disturbed),
        planned_steps=disturbed.planned_steps,
        steps_committed=len(disturbed.committed_steps),
        lost=lost_steps(disturbed.histories),
        digests=_digests(disturbed),
        undisturbed_digests={} if undisturbed is None else _digests(undisturbed),
        first_difference=None if undisturbed is None else first_difference(disturbed, undisturbed),
        tells_losses=any(not math.isnan(e.loss) for h in disturbed.histories for e in h.steps),
        s_per_step=s_per_step_of(disturbed),
        undisturbed_s_per_step=None if undisturbed is None else s_per_step_of(undisturbed),
        problems=_problems(disturbed, undisturbed, kills, faults),
        too_short=_too_short(disturbed, kills, faults),
    )


def _problems(
    disturbed: RunRecord,
    undisturbed: RunRecord | None,
    kills: tuple[KillOutcome, ...],
    faults: tuple[FaultOutcome, ...],
) -> tuple[str, ...]:
    if disturbed.problems:
        return disturbed.problems  # it was cut short, which explains whatever else is missing
    problems = [] if disturbed.too_short else [*_missing(disturbed, kills, faults)]
    for history in disturbed.histories:
        if history.finished is not None and history.finished.ledger is False:
            problems.append(f"the samples that {history.group} used: {history.finished.ledger_text}")
    if undisturbed is None:
        return (*problems, "the undisturbed run did not take place")
    problems += (f"undisturbed run: {problem}" for problem in undisturbed.problems)
    if lost := lost_steps(undisturbed.histories):
        problems.append(f"undisturbed run: step {lost[0].step}: {lost[0].why}")
    return tuple(problems)


def _missing(
    disturbed: RunRecord, kills: tuple[KillOutcome, ...], faults: tuple[FaultOutcome, ...]
) -> Iterator[str]:
    """Tell what did not happen in a run that was not cut short."""
    for outcome in kills:
        kill = outcome.kill
        if outcome.stall_s is None:
            yield f"a survivor did not commit again after {kill.group} was killed at step {kill.step}"
        if outcome.back_s is None and not _came_too_late(kill.group, disturbed):
            yield f"{kill.group}, killed at step {kill.step}, did not contribute again"
    yield from _fault_problems(faults, disturbed)
    if len(disturbed.committed_steps) != disturbed.planned_steps:
        committed = len(disturbed.committed_steps)
        yield f"{committed} steps were committed instead of {disturbed.planned_steps}"


def _too_short(
    disturbed: RunRecord, kills: tuple[KillOutcome, ...], faults: tuple[FaultOutcome, ...]
) -> tuple[str, ...]:
    if disturbed.problems:
        return ()
    undamaged = _undamaged(disturbed)
    if disturbed.too_short:
        return (disturbed.too_short, *undamaged)
    counts = (
        (len(disturbed.kills), disturbed.planned_kills, "kills", 0),
        (len(disturbed.faults), disturbed.planned_faults, "faults", disturbed.undamaged),
    )
    unplaced = (
        f"only {placed} of {planned} {what} could be placed before the job was over; give it more steps"
        for placed, planned, what, without_data in counts
        if placed + without_data < planned
    )
    return (*unplaced, *undamaged, *_late_returns(disturbed, kills, faults))


def _undamaged(disturbed: RunRecord) -> Iterator[str]:
    if count := disturbed.undamaged:
        what = "1 corruption" if count == 1 else f"{count} corruptions"
        yield (
            f"{what} found no piece of 4 KiB to damage: the program's state is too small for this fault, or the "
            "victim fetched too little of it; leave out corrupt from --faults"
        )


def _late_returns(
    disturbed: RunRecord, kills: tuple[KillOutcome, ...], faults: tuple[FaultOutcome, ...]
) -> Iterator[str]:
    away = [(o.kill.group, f"killed at step {o.kill.step}") for o in kills if o.back_s is None]
    away += [
        (group, f"away after the {o.fault.kind} at step {o.fault.step}")
        for o in faults
        for group, wait_s in o.again_s.items()
        if wait_s is None
    ]
    for group, why in away:
        if _came_too_late(group, disturbed):
            yield f"{group}, {why}, came back only after the last step; give the job more steps"


def _came_too_late(group: str, record: RunRecord) -> bool:
    """Whether a group fetched the state after the job's last step, instead of taking part in that step."""
    last = record.last(group)
    if last is None or last.finished is None or last.finished.digest is None:
        return False
    events = [event for event in last.steps if event.step == record.planned_steps]
    return last.finished.step == record.planned_steps and any(not event.live for event in events)


def _fault_problems(faults: tuple[FaultOutcome, ...], record: RunRecord) -> Iterator[str]:
    for outcome in faults:
        fault = outcome.fault
        where = f"{fault.kind} of {fault.group} at step {fault.step}"
        if outcome.standstill_s is None:
            yield f"no group committed a step after the {where}"
        for group, wait_s in outcome.again_s.items():
            if wait_s is None and not _came_too_late(group, record):
                yield f"{group} did not take part again after the {where}"


def _again(fault: Fault, record: RunRecord) -> dict[str, float | None]:
    names = [name for name in (fault.group, fault.other) if name in record.groups]
    return {name: again_s(fault, name, record.histories) for name in names}


def _digests(record: RunRecord) -> dict[str, str | None]:
    """Only the digest of a group that reached the job's last step counts."""

    def final(history: History | None) -> str | None:
        finished = None if history is None else history.finished
        return finished.digest if finished is not None and finished.step == record.planned_steps else None

    return {group: final(record.last(group)) for group in record.groups}


def _one_value(digests: Mapping[str, str | None]) -> bool:
    return len(set(digests.values())) == 1 and None not in digests.values()


def first_difference(one: RunRecord, other: RunRecord) -> int | None:
    """Return the first step after which two runs differ, or None."""
    ours, theirs = _told(one), _told(other)
    return min((step for step in ours.keys() & theirs.keys() if ours[step] != theirs[step]), default=None)


def _told(record: RunRecord) -> dict[int, tuple[str, str]]:
    return {e.step: (repr(e.loss), e.digest) for history in record.histories for e in history.steps if e.live}


def s_per_step_of(record: RunRecord) -> float | None:
    """Return the mean over the whole run, including kills, between the first and the last commit."""
    commits = sorted((e.t_s, e.step) for history in record.histories for e in history.steps if e.live)
    if not commits or commits[-1][1] <= commits[0][1]:
        return None
    return (commits[-1][0] - commits[0][0]) / (commits[-1][1] - commits[0][1])
