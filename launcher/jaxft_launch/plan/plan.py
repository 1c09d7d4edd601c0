"""The command `jaxft plan`: its options, its tables and its JSON."""

import io
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from jaxft_launch.plan.chart import chart
from jaxft_launch.plan.events import Measured, measure, read
from jaxft_launch.plan.forecast import Forecast, exact, forecast
from jaxft_launch.plan.job import Job, needs
from jaxft_launch.plan.targets import targets
from jaxft_launch.processes._checks import LaunchError

_MAY_BE_0 = ("return_s", "save_s")
MOST_FAILURES, LEAST_FAILURES, GROUP_FAILURES = 200, 10, 20_000  # to simulate: fewer of large jobs
Row = tuple[str, ...]


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
    shards_per_group: int = Job.shards_per_group
    """Shards of the batch for each group, such as microbatches. Many can be divided again evenly."""
    inner_steps: int = Job.inner_steps
    """Optimizer steps between two exchanges: more than one for DiLoCo."""
    bits: int = Job.bits
    """Bits of a value in the exchange: 32, 16, or fewer for quantised means."""
    mtbf_node_days: float = Job.mtbf_node_days
    """Mean time between failures of a node, in days. Published: 154 to 430 (Kokolis et al.), 264 (Llama 3)."""
    return_s: float = Job.return_s
    """Seconds from a failure until a replacement is ready: machine, start, compilation."""
    save_s: float = Job.save_s
    """Seconds for which a checkpoint stops the training."""
    link_gbits: float = Job.link_gbits
    """Gbit/s of a node's link to the other groups, in each direction."""
    simulate: Literal["no", "groups", "racks"] = "no"
    """Also simulate jaxft with its real cores, where single groups fail, or whole racks of eight nodes, too."""
    events: Annotated[tuple[Path, ...], tyro.conf.arg(name="from")] = ()
    """Take groups, steps and failures from a run's event files, and compare its goodput with the prediction."""
    plot: Path | None = None
    """Write goodput against scale and against the time between failures to this SVG file."""
    targets: bool = False
    """Compare with published numbers instead; the exit status is 1 if one is out of its bound."""
    json: bool = False
    """Write the result as JSON."""

    def job(self) -> Job:
        """Return the job that is planned.

        Raises:
            LaunchError: a number is out of its range.
        """
        numbers = {each.name: getattr(self, each.name) for each in fields(Job) if hasattr(self, each.name)}
        for name, number in numbers.items():
            if not 0 <= number < math.inf or (not number and name not in _MAY_BE_0):
                least = "0 or more" if name in _MAY_BE_0 else "more than 0"
                raise LaunchError(f"--{name.replace('_', '-')} must be {least}, not {number:g}.")
        return Job(**numbers)


def run_plan(options: PlanOptions) -> int:
    """Print a plan; return the exit status."""
    if options.targets:
        rows = targets()
        _write([asdict(each) | {"met": each.met} for each in rows], _targets_text, as_json=options.json)
        return 0 if all(each.met for each in rows) else 1
    job, run = options.job(), None
    if options.events:
        run = measure(read(options.events), job.shards_per_group)
        job = run.job(job)
    found = forecast(job)
    if options.plot is not None:
        _draw(options.plot, chart(found, None if run is None else run.goodput))
    plan = {
        **asdict(found),
        "needs": [asdict(need) for need in needs(replace(job, measured=False))],
        "simulated": [] if options.simulate == "no" else _simulated(found, racks=options.simulate == "racks"),
        "measured": None if run is None else _compared(run, job),
    }
    _write(plan, plan_text, as_json=options.json)
    return 0


def _draw(path: Path, drawing: str) -> None:
    try:
        path.write_text(drawing, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"--plot {path} cannot be written: {error}") from error


def _write(found: Any, text: Any, *, as_json: bool) -> None:
    sys.stdout.write((json.dumps(_finite(found), indent=1) if as_json else text(found)) + "\n")


def _simulated(found: Forecast, *, racks: bool) -> list[dict[str, Any]]:
    from jaxft_launch.plan.simulation import simulate

    rows: list[dict[str, Any]] = []
    failures = max(LEAST_FAILURES, min(MOST_FAILURES, GROUP_FAILURES // found.job.groups))
    for each in found.outcomes[2:]:
        began_s = time.process_time()
        row = asdict(simulate(found.job, each.spares, failures, seed=1, racks=racks))
        rows.append({"name": each.name, "predicted": each.time, "cpu_s": time.process_time() - began_s} | row)
    return rows


def _compared(run: Measured, job: Job) -> dict[str, Any]:
    return asdict(run) | {"goodput": run.goodput, "predicted": exact(replace(job, save_s=0.0), run.spares)}


def plan_text(plan: dict[str, Any]) -> str:
    """Return a plan as tables for people."""
    job, ways = plan["job"], plan["outcomes"]
    failures = job["groups"] * job["devices_per_group"] / 8 / job["mtbf_node_days"]
    fastest, cheapest = (max(ways, key=lambda each: each[by])["name"] for by in ("time", "cost"))
    evens = map(_break_even, plan["break_evens"])
    swings = [(e["name"], percent(e["less"]), percent(e["more"])) for e in plan["swings"][:5]]
    sizes = [
        (f"{e['groups']} groups of {e['devices']}", percent(e["time"]), percent(e["cost"]))
        for e in plan["sizes"]
    ]
    parts = [
        f"{job['groups']} groups of {job['devices_per_group']} devices, {job['params']:.3g} parameters, "
        f"steps of {job['step_s']:g} s; a failure every {duration(86400.0 / failures)}",
        _table(
            "|goodput|P10|P90|per device paid|device-hours for 1,000 steps|checkpoint every", map(_way, ways)
        ),
        f"Fastest: {fastest}. Cheapest: {cheapest}.",
        _table("overtakes, if a node fails every ... or sooner|in time|in cost", evens),
        _table("moves the cost most|25 % less|25 % more", swings),
        _table("the same devices|goodput|per device paid", sizes),
        _table(
            "a group needs||<|<",
            ((e["name"], figure(e["value"]), e["unit"], e["why"]) for e in plan["needs"]),
        ),
    ]
    if plan["simulated"]:
        head = "simulated|goodput|predicted|failures|lost all|of the job|messages/s|bytes/s|CPU time"
        parts.append(_table(head, map(_simulation, plan["simulated"])))
    if run := plan["measured"]:
        parts.append(
            f"measured: {percent(run['goodput'])} over {duration(run['lasted_s'])}, {run['failures']} failures, "
            f"{run['steps']} steps; predicted from its rates: {percent(run['predicted'])}"
        )
    return "\n\n".join(parts)


def _way(each: dict[str, Any]) -> Row:
    shares = [percent(each[name]) for name in ("time", "low", "high", "cost")]
    return (each["name"], *shares, figure(each["device_hours"]), duration(each["interval_s"]))


def _simulation(row: dict[str, Any]) -> Row:
    shares = (percent(row["goodput"]), percent(row["predicted"]), f"{row['failures']}", f"{row['all_lost']}")
    rates = (figure(row["messages"]), figure(row["bytes"]), duration(row["cpu_s"]))
    return (row["name"], *shares, duration(row["simulated_s"]), *rates)


def _targets_text(rows: list[dict[str, Any]]) -> str:
    def line(each: dict[str, Any]) -> Row:
        off = each["ours"] / each["published"] - 1.0
        ours = ("-", "-") if math.isnan(off) else (f"{each['ours']:.4g}", f"{100 * off:+.1f} %")
        bound = "shown" if each["bound"] is None else f"{100 * each['bound']:.0f} %"
        met = "" if each["met"] else "OUT"
        return (
            f"{each['row']}",
            each["source"],
            each["what"],
            f"{each['published']:.4g}",
            *ours,
            bound,
            met,
            each["why"],
        )

    checked, missed = (sum(each["bound"] is not None for each in rows), sum(not each["met"] for each in rows))
    table = _table("|<source|<what|published|ours|off|bound|<|<", map(line, rows))
    return f"{table}\n\n{checked} checked, {missed} out of their bounds"


def _break_even(each: dict[str, Any]) -> Row:
    days = (each["time_days"], each["cost_days"])
    texts = ("never" if d is None else "always" if math.isinf(d) else f"{figure(d)} days" for d in days)
    return (f"{each['winner']} over {each['loser']}", *texts)


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def figure(value: float) -> str:
    """Return a number with about three digits that count."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{figure(seconds / size)} {unit}"
    return f"{figure(seconds)} s"


def _table(heads: str, rows: Any) -> str:
    """Return rows as text, the first column and those with "<" on the left."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, head in enumerate(heads.split("|")):
        to_left = place == 0 or head.startswith("<")
        table.add_column(head.lstrip("<"), justify="left" if to_left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=1000, markup=False, emoji=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
