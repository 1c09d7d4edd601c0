"""The result of a storm: the verdict on its runs, where the kills really fell, and the cost of each kind of fault.

As text, and as JSON.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxft_launch.storm._faults import FAULTS, PHASES, STEP_PHASES
from jaxft_launch.storm._record import RunRecord
from jaxft_launch.storm._verdict import FaultOutcome, Verdict
from jaxft_launch.storm._verdict_text import (
    digests_text,
    lost_text,
    ms,
    or_else,
    rounded,
    undisturbed_text,
    verdict_json,
    verdict_lines,
)


def storm_json(verdict: Verdict, record: RunRecord, *, seed: int) -> dict[str, Any]:
    """Return the verdict as JSON: the demo's keys, followed by a storm's."""
    stalls_ms, backs_s, lasted_s = member_stalls_ms(verdict), returns_s(verdict), duration_s(record)
    return {
        **verdict_json(verdict, seed=seed),
        "hit_phases": hit_phases(verdict),
        "aimed_phases": dict(Counter(outcome.kill.aim for outcome in verdict.kills)),
        "hit_groups": hit_groups(verdict, record),
        "hit_ranks": hit_ranks(verdict),
        "hit_steps": hit_steps(verdict),
        "double_deaths": double_deaths(verdict),
        "hits": [
            {
                "group": o.kill.group,
                "rank": o.kill.rank,
                "aim": o.kill.aim,
                "phase": o.kill.phase,
                "strike": o.kill.strike,
            }
            for o in verdict.kills
        ],
        "stall_ms_median": rounded(median(stalls_ms), 1),
        "stall_ms_p99": rounded(p99(stalls_ms), 1),
        "stall_ms_max": rounded(max(stalls_ms, default=None), 1),
        "back_s_median": rounded(median(backs_s), 3),
        "back_s_max": rounded(max(backs_s, default=None), 3),
        "faults_planned": verdict.planned_faults,
        "faults": [_fault_json(outcome) for outcome in verdict.faults],
        "faults_by_kind": {kind: costs.as_json() for kind, costs in costs_by_kind(verdict).items()},
        "participation": rounded(verdict.participation, 4),
        "ledger": ledgers(record),
        "duration_s": rounded(lasted_s, 1),
        "s_per_kill": rounded(per_fault_s(verdict, lasted_s), 2),
    }


def storm_text(verdict: Verdict, record: RunRecord, *, seed: int) -> str:
    """Return the verdict as aligned lines, the conclusion first."""
    stalls_ms, backs_s, lasted_s = member_stalls_ms(verdict), returns_s(verdict), duration_s(record)
    with_kills, without = (
        or_else(value_s, "{:.3f}", "-") for value_s in (verdict.s_per_step, verdict.undisturbed_s_per_step)
    )
    what = "fault" if verdict.planned_faults else "kill"
    alone = "process" if verdict.nproc == 1 else f"group of {verdict.nproc} processes"
    fields = {
        "kills": f"{len(verdict.kills)} of {verdict.planned_kills}, --seed {seed}; "
        f"two groups at once: {double_deaths(verdict)}",
        "fell in": ", ".join(f"{phase} {count}" for phase, count in hit_phases(verdict).items()) or "-",
        "hit": ", ".join(f"{group} {count}" for group, count in hit_groups(verdict, record).items()),
        **_rank_field(verdict),
        "at steps": _hit_steps_text(verdict),
        "steps committed": f"{verdict.steps_committed} of {verdict.planned_steps}",
        "steps lost": lost_text(verdict),
        "survivors stalled": _spread(
            (("median", median(stalls_ms)), ("p99", p99(stalls_ms))), stalls_ms, "ms", 0
        ),
        "victims back in": _spread((("median", median(backs_s)),), backs_s, "s", 1),
        **_fault_fields(verdict),
        "participation": or_else(
            verdict.participation, "{:.1%} of the time that groups could take part", "-"
        ),
        "lasted": f"{lasted_s:.0f} s, {or_else(per_fault_s(verdict, lasted_s), '{:.1f}', '-')} s for each {what}",
        "seconds per step": f"{with_kills} with {what}s, {without} undisturbed in one {alone}",
        **_ledger_field(record),
        "final state": digests_text(verdict.digests),
        "undisturbed run": undisturbed_text(verdict),
    }
    return verdict_lines(verdict, fields)


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of the faults of one kind: how long the job stood still for each, and how long after the fault's end
    each victim took part again."""

    count: int
    standstills_s: tuple[float, ...]
    returns_s: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "standstill_s_median": rounded(median(self.standstills_s), 3),
            "standstill_s_max": rounded(max(self.standstills_s, default=None), 3),
            "back_s_median": rounded(median(self.returns_s), 3),
            "back_s_max": rounded(max(self.returns_s, default=None), 3),
        }


def costs_by_kind(verdict: Verdict) -> dict[str, Costs]:
    """Return the costs of each kind of fault that took place, other than kills.

    Costs that the next strike has affected are left out.
    """
    hits = [(o.kill.strike, o.kill.t_s) for o in verdict.kills]
    hits += [(o.fault.strike, o.fault.t_s) for o in verdict.faults]

    def undisturbed(outcome: FaultOutcome, after_end_s: float) -> bool:
        fault = outcome.fault
        until_s = fault.end_s + after_end_s
        return not any(strike != fault.strike and fault.t_s < t_s < until_s for strike, t_s in hits)

    found: dict[str, Costs] = {}
    for kind in FAULTS:
        outcomes = [o for o in verdict.faults if o.fault.kind == kind]
        if outcomes:
            backs_s = tuple(
                back_s
                for o in outcomes
                for back_s in o.again_s.values()
                if back_s is not None and undisturbed(o, back_s)
            )
            # The stall ends with a commit soon after the fault's end, or long before it.
            standstills_s = tuple(
                o.standstill_s
                for o in outcomes
                if o.standstill_s is not None and undisturbed(o, o.standstill_s - o.fault.seconds)
            )
            found[kind] = Costs(len(outcomes), standstills_s, backs_s)
    return found


def _fault_json(outcome: FaultOutcome) -> dict[str, Any]:
    fault = outcome.fault
    return {
        "kind": fault.kind,
        "group": fault.group,
        "rank": fault.rank,
        "other": fault.other,
        "how": fault.how,
        "t_s": rounded(fault.t_s, 3),
        "seconds": rounded(fault.seconds, 3),
        "step": fault.step,
        "strike": fault.strike,
        "standstill_s": rounded(outcome.standstill_s, 3),
        "back_s": {group: rounded(back_s, 3) for group, back_s in outcome.again_s.items()},
    }


def _fault_fields(verdict: Verdict) -> dict[str, str]:
    """Return a line for each kind of fault other than kills: the count and the cost."""
    fields: dict[str, str] = {}
    if verdict.planned_faults:
        fields["other faults"] = f"{len(verdict.faults)} of {verdict.planned_faults}"
    for kind, costs in costs_by_kind(verdict).items():
        text = f"{costs.count}; the job stood still for "
        text += _spread((("median", median(costs.standstills_s)),), costs.standstills_s, "s", 1)
        if costs.returns_s:
            text += "; back in after its end: "
            text += _spread((("median", median(costs.returns_s)),), costs.returns_s, "s", 1)
        fields[f"  {kind}"] = text
    return fields


def hit_phases(verdict: Verdict) -> dict[str, int]:
    """Return how many kills really occurred in each phase."""
    counts = Counter(outcome.kill.phase for outcome in verdict.kills)
    return {phase: counts[phase] for phase in PHASES if counts[phase]}


def hit_groups(verdict: Verdict, record: RunRecord) -> dict[str, int]:
    """Return how many kills each group suffered."""
    counts = Counter(outcome.kill.group for outcome in verdict.kills)
    return {group: counts[group] for group in record.groups}


def hit_ranks(verdict: Verdict) -> dict[int, int]:
    """Return how many kills hit the process of each number."""
    counts = Counter(outcome.kill.rank for outcome in verdict.kills)
    return {rank: counts[rank] for rank in range(verdict.nproc)}


def _rank_field(verdict: Verdict) -> dict[str, str]:
    if verdict.nproc == 1:
        return {}
    return {"hit ranks": ", ".join(f"rank {rank} {count}" for rank, count in hit_ranks(verdict).items())}


def hit_steps(verdict: Verdict) -> list[int]:
    """Return the steps at which kills and other faults fell, in order."""
    return sorted([o.kill.step for o in verdict.kills] + [o.fault.step for o in verdict.faults])


def _hit_steps_text(verdict: Verdict) -> str:
    steps = hit_steps(verdict)
    return f"{steps[0]} to {steps[-1]}, of {verdict.planned_steps}" if steps else "-"


def double_deaths(verdict: Verdict) -> int:
    """Return how many strikes killed two groups together."""
    strikes = Counter(outcome.kill.strike for outcome in verdict.kills)
    return sum(1 for victims in strikes.values() if victims > 1)


def member_stalls_ms(verdict: Verdict) -> list[float]:
    """Return the stalls after kills of groups that took part. The death of a joiner delays no group."""
    found = [ms(o.stall_s) for o in verdict.kills if o.kill.phase in STEP_PHASES]
    return [stall_ms for stall_ms in found if stall_ms is not None]


def returns_s(verdict: Verdict) -> list[float]:
    """Return the times from a kill to the victim's next contribution, except for victims struck again before."""
    at_work = {(o.kill.group, o.kill.incarnation) for o in verdict.kills if o.kill.phase in STEP_PHASES}
    last = {o.kill.group: o.kill.incarnation for o in verdict.kills}
    return [
        o.back_s
        for o in verdict.kills
        if o.back_s is not None
        and ((o.kill.group, o.kill.incarnation + 1) in at_work or last[o.kill.group] == o.kill.incarnation)
    ]


def ledgers(record: RunRecord) -> dict[str, bool | None]:
    """Return whether each group that finished reports that every sample was used as often as it should be."""
    return {h.group: h.finished.ledger for h in record.histories if h.finished is not None}


def _ledger_field(record: RunRecord) -> dict[str, str]:
    texts = sorted({text for text in ledger_texts(record) if text})
    return {"samples": "; ".join(texts)} if texts else {}


def ledger_texts(record: RunRecord) -> list[str]:
    """Return the groups' reports about their samples."""
    return [h.finished.ledger_text for h in record.histories if h.finished is not None]


def duration_s(record: RunRecord) -> float:
    """Return the time from the first reported step to the last, in the run with the kills."""
    times_s = [event.t_s for history in record.histories for event in history.steps]
    return max(times_s, default=0.0) - min(times_s, default=0.0)


def per_fault_s(verdict: Verdict, lasted_s: float) -> float | None:
    """Return the run's time per kill or other fault."""
    placed = len(verdict.kills) + len(verdict.faults)
    return lasted_s / placed if placed else None


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def p99(values: Sequence[float]) -> float | None:
    """Return the smallest value that at least 99 % of the values do not exceed."""
    return sorted(values)[-(-99 * len(values) // 100) - 1] if values else None


def _spread(
    named: Sequence[tuple[str, float | None]], values: Sequence[float], unit: str, digits: int
) -> str:
    if not values:
        return "-"
    named = (*named, ("max", max(values)))
    return ", ".join(f"{name} {value:.{digits}f} {unit}" for name, value in named if value is not None)
