"""`jaxft status`: what the page shows, in a terminal."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from jaxft._launch._checks import check_installed
from jaxft._operate._port import PortError, ask, default_url, job_path

_EVENTS = 8
_COLOURS = {"member": "green", "healing": "yellow", "stale": "yellow", "ready": "blue", "gone": "red"}


@dataclass(frozen=True)
class StatusOptions:
    """Show the jobs of a coordinator; with JOB, its groups and what happened last."""

    job: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="JOB")] = ""
    """The job; empty: all jobs, or the only one."""
    http: Annotated[str, tyro.conf.arg(metavar="URL")] = field(default_factory=default_url)
    """The coordinator's HTTP port. By default that of the environment variable JAXFT_HTTP."""
    watch: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show it again every second, until Ctrl-C."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the API's JSON instead."""


def run_status(options: StatusOptions) -> int:
    """Show the status; return 0.

    Raises:
        JaxftError: the coordinator cannot be asked, or knows no such job.
    """
    if options.json:
        sys.stdout.write(json.dumps(_asked(options), indent=2) + "\n")
        return 0
    check_installed(["rich"], remedy='pip install "jaxft[status]"')
    from rich.console import Console
    from rich.live import Live

    console = Console()
    shown = _rendered(_asked(options))
    if not options.watch:
        console.print(shown)
        return 0
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(shown, console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        _watch(options, lambda told: live.update(_rendered(told), refresh=True))
    return 0


def _watch(options: StatusOptions, show: Callable[[Mapping[str, Any]], None]) -> None:
    """Show the status every second. A coordinator that is restarted is waited for."""
    while True:
        try:
            show(_asked(options))
        except PortError as error:
            show({"problem": str(error)})
        time.sleep(1.0)


def _asked(options: StatusOptions) -> Mapping[str, Any]:
    if options.job:
        return ask(options.http, job_path(options.job))[0]
    listed = ask(options.http, "jobs")[0]
    if len(listed["jobs"]) == 1:
        return ask(options.http, job_path(listed["jobs"][0]["job"]))[0]
    return listed


def _rendered(told: Mapping[str, Any]) -> Any:
    from rich.console import Group
    from rich.text import Text

    if "problem" in told:
        return Text(told["problem"])
    if "group_list" not in told:
        return _jobs_table(told["jobs"])
    lines = [Text(line) for line in headline(told)]
    return Group(*lines, _groups_table(told["group_list"]), *(Text(line) for line in events(told["events"])))


def headline(job: Mapping[str, Any]) -> list[str]:
    """Return the lines above the table of groups."""
    goodput = "none yet" if job["goodput"] is None else f"{job['goodput']:.1%}"
    values = "".join(f"  {name} {value:.4g}" for name, value in job["values"].items())
    first = (
        f"{job['job']}: {job['state']}  step {job['step']}{values}  {job['steps_per_s']:.2f} steps/s  groups "
        f"{job['members']}/{job['places']}  quorum {job['quorum_id']}  goodput {goodput}"
    )
    lost = ", ".join(
        f"{name} {seconds:.0f} s" for name, seconds in job["badput_seconds"].items() if seconds >= 1
    )
    retried = sum(job["steps_retried"].values())
    second = f"retried {retried} of {job['steps_committed']} steps; lost time: {lost or 'none'}"
    waits = job["halted"] or job["waiting"]
    return [first, second, *([f"{'halted' if job['halted'] else 'waiting'}: {waits}"] if waits else [])]


def events(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the last events as lines."""
    lines: list[str] = []
    for event in found[-_EVENTS:]:
        about = "  ".join(
            f"{name}={event[name]}"
            for name in ("group", "step", "quorum_id", "members", "reason")
            if name in event
        )
        at = time.strftime("%H:%M:%S", time.localtime(event["t"]))
        lines.append(f"{at}  {event['event']}  {about}")
    return lines


def _groups_table(groups: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "group", "state", "since", "step", "compute", "exchange", "losses", "why", box=None, pad_edge=False
    )
    for group in groups:
        note = "".join(f" ({name})" for name in ("spare", "away", "draining") if group.get(name))
        table.add_row(
            Text(group["group"]),
            Text(group["state"] + note, style=_COLOURS.get(group["state"], "")),
            f"{max(0.0, time.time() - group['since']):.0f} s",
            str(group.get("step", "")),
            _seconds(group.get("compute_s")),
            _seconds(group.get("exchange_s")),
            str(group["losses"]),
            Text(group.get("reason", "")),
        )
    return table


def _jobs_table(jobs: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    if not jobs:
        return Text("The coordinator has no job yet.")
    table = Table(
        "job", "state", "step", "groups", "steps/s", "goodput", "waiting for", box=None, pad_edge=False
    )
    for job in jobs:
        goodput = "" if job["goodput"] is None else f"{job['goodput']:.1%}"
        groups = f"{job['members']}/{job['places']}"
        rate = f"{job['steps_per_s']:.2f}"
        why = Text(job["halted"] or job["waiting"])
        table.add_row(Text(job["job"]), job["state"], str(job["step"]), groups, rate, goodput, why)
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} s"
