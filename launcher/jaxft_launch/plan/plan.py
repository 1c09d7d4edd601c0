"""The command `jaxft plan`: its options, its tables and its JSON."""

import json
import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

from jaxft_launch.plan.forecast import BreakEven, Forecast, Outcome, forecast
from jaxft_launch.plan.job import Job, needs
from jaxft_launch.plan.targets import Target, targets
from jaxft_launch.processes._checks import LaunchError

_POSITIVE = (
    "params",
    "groups",
    "devices_per_group",
    "step_s",
    "shards_per_group",
    "inner_steps",
    "bits",
    "mtbf_node_days",
    "link_gbits",
)
# Heads of columns of text.
_WORDS = ("source", "what", " ")


@dataclass(frozen=True)
class PlanOptions:
    """Predict the goodput of a job, with jaxft and without, and what its groups need.

    A group is the devices that hold one copy of the model. docs/planning.md explains each number.
    """

    params: float = 8e9
    """Parameters of the model."""
    groups: int = 4
    """Replica groups that train."""
    devices_per_group: int = 8
    """Devices of a group. A node has eight."""
    step_s: float = 4.0
    """Seconds of a step's computation, without the exchange between groups."""
    shards_per_group: int = 8
    """Shards of the batch for each group, such as microbatches. Many can be divided again evenly."""
    inner_steps: int = 1
    """Optimizer steps between two exchanges: more than one for DiLoCo."""
    bits: int = 16
    """Bits of a value in the exchange: 32, 16, or fewer for quantised means."""
    mtbf_node_days: float = 154.0
    """Mean time between failures of a node, in days. Published: 154 to 430 (Kokolis et al.), 264 (Llama 3)."""
    return_s: float = 300.0
    """Seconds from a failure until a replacement is ready: machine, start, compilation."""
    save_s: float = 30.0
    """Seconds for which a checkpoint stops the training."""
    link_gbits: float = 400.0
    """Gbit/s of a node's link to the other groups, in each direction."""
    targets: bool = False
    """Compare with published numbers instead; the exit status is 1 if one is out of its bound."""
    json: bool = False
    """Write the result as JSON."""

    def job(self) -> Job:
        """Return the job that is planned.

        Raises:
            LaunchError: a number is out of its range.
        """
        for name in _POSITIVE:
            if not 0 < getattr(self, name) < math.inf:
                raise LaunchError(
                    f"--{name.replace('_', '-')} must be more than 0, not {getattr(self, name):g}."
                )
        for name in ("return_s", "save_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise LaunchError(
                    f"--{name.replace('_', '-')} must be 0 or more, not {getattr(self, name):g}."
                )
        names = (*_POSITIVE, "return_s", "save_s")
        return Job(**{name: getattr(self, name) for name in names})


def run_plan(options: PlanOptions) -> int:
    """Print a plan; return the exit status."""
    if options.targets:
        return _show_targets(as_json=options.json)
    found = forecast(options.job())
    if options.json:
        sys.stdout.write(json.dumps(plan_json(found), indent=1) + "\n")
    else:
        sys.stdout.write(plan_text(found) + "\n")
    return 0


def _show_targets(*, as_json: bool) -> int:
    found = targets()
    if as_json:
        rows = [{**asdict(each), "met": each.met} for each in found]
        sys.stdout.write(json.dumps(_finite(rows), indent=1) + "\n")
    else:
        sys.stdout.write(targets_text(found) + "\n")
    return 0 if all(each.met for each in found) else 1


def plan_json(found: Forecast) -> dict[str, Any]:
    """Return a plan as JSON; where there is no number, null."""
    return _finite(
        {
            "job": asdict(found.job),
            "needs": [asdict(need) for need in needs(found.job)],
            "strategies": [asdict(each) for each in found.outcomes],
            "swings": [asdict(each) for each in found.swings],
            "break_evens": [asdict(each) for each in found.break_evens],
            "sizes": [
                {
                    "groups": job.groups,
                    "devices_per_group": job.devices_per_group,
                    "time": each.time,
                    "cost": each.cost,
                }
                for job, each in found.sizes
            ],
        }
    )


def plan_text(found: Forecast) -> str:
    """Return a plan as tables for people."""
    job = found.job
    parts = [
        f"{job.groups} groups of {job.devices_per_group} devices, {job.params:.3g} parameters, "
        f"steps of {job.step_s:g} s; a failure every {duration(1.0 / job.failures)}",
        table(
            ("", "goodput", "P10-P90", "per device paid", "device-hours for 1,000 steps", "checkpoint every"),
            [_outcome_row(each) for each in found.outcomes],
        ),
        f"Fastest: {found.fastest.name}. Cheapest: {found.cheapest.name}.",
        table(
            ("overtakes, if a node fails every ... or sooner", "in time", "in cost"),
            [_break_even_row(each) for each in found.break_evens],
        ),
        table(
            ("moves the answer (cost) most", "25 % less", "25 % more"),
            [
                (each.name.replace("_", "-"), percent(each.less), percent(each.more))
                for each in found.swings[:5]
            ],
        ),
        table(
            ("the same devices as", "goodput", "per device paid"),
            [
                (f"{size.groups} groups of {size.devices_per_group}", percent(each.time), percent(each.cost))
                for size, each in found.sizes
            ],
        ),
        table(
            ("a group needs", "", "", ""),
            [(need.name, figure(need.value), need.unit, need.why) for need in needs(job)],
        ),
    ]
    return "\n\n".join(parts)


def targets_text(found: list[Target]) -> str:
    """Return the published numbers and ours."""
    missed = sum(not each.met for each in found)
    rows = [
        (
            str(each.row),
            each.source,
            each.what,
            f"{each.published:.4g}",
            "-" if math.isnan(each.ours) else f"{each.ours:.4g}",
            "-" if math.isnan(each.ours) else f"{100 * each.off:+.1f} %",
            "shown" if each.bound is None else f"{100 * each.bound:.0f} %",
            "" if each.met else "OUT",
            each.why,
        )
        for each in found
    ]
    head = ("", "source", "what", "published", "ours", "off", "bound", " ", "")
    checked = sum(each.bound is not None for each in found)
    return f"{table(head, rows)}\n\n{checked} checked, {missed} out of their bounds"


def _outcome_row(each: Outcome) -> tuple[str, ...]:
    return (
        each.name,
        f"{100 * each.time:.2f} %",
        f"{100 * each.low:.2f}-{100 * each.high:.2f} %",
        f"{100 * each.cost:.2f} %",
        figure(each.device_hours),
        duration(each.interval_s),
    )


def _break_even_row(each: BreakEven) -> tuple[str, ...]:
    return (f"{each.winner} over {each.loser}", _days(each.time_days), _days(each.cost_days))


def _days(days: float | None) -> str:
    if days is None:
        return "never"
    return "always" if math.isinf(days) else f"{figure(days)} days"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def figure(value: float) -> str:
    """Return a number with about three digits that count."""
    if not math.isfinite(value):
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{figure(seconds / size)} {unit}"
    return f"{figure(seconds)} s"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return rows as text: figures on the right, and words on the left."""
    lines = [head, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not head[place] or place == 0 or head[place] in _WORDS else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _finite(value: Any) -> Any:
    """Replace what JSON has no number for."""
    match value:
        case dict():
            return {name: _finite(each) for name, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value
