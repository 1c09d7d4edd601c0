"""What `jaxft status` shows, as rich renders it."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxft_protocol.names import natural_key

_EVENTS = 8
_COLOURS = {"member": "green", "healing": "yellow", "stale": "yellow", "ready": "blue", "gone": "red"}
# However small the terminal is.
_LEAST_GROUPS = 3


def rendered(facts: Mapping[str, Any], *, note: str = "", height: int = 0) -> Any:
    """Return what rich prints: a note, and the API's answer about one job or all of them (empty: none yet).

    `height`: how many lines there are; 0: as many as it takes.
    """
    from rich.console import Group
    from rich.text import Text

    above = [Text(note, style="dim")] if note else []
    if not facts:
        return Group(*above)
    if "group_list" not in facts:
        return Group(*above, _jobs_table(facts["jobs"]))
    # What does not fit into a screen's width is cut, so that each line takes one.
    line = {"no_wrap": True, "overflow": "ellipsis"} if height else {}
    heads = [Text(text, **line) for text in headline(facts)]
    last = [Text(text, **line) for text in events(facts["events"])]
    most = max(_LEAST_GROUPS, height - len(above) - len(heads) - len(last) - 2) if height else None
    shown, rest = chosen(facts["group_list"], most)
    return Group(*above, *heads, _groups_table(shown), *map(Text, rest), *last)


def chosen(
    groups: Sequence[Mapping[str, Any]], most: int | None
) -> tuple[Sequence[Mapping[str, Any]], list[str]]:
    """Return the groups to show, sorted by name, and a line that counts the others. If there are more than fit, those
    that do not take part come first."""
    ordered = sorted(groups, key=lambda group: natural_key(group["group"]))
    if most is None or len(ordered) <= most:
        return ordered, []
    ordered.sort(key=lambda group: group["state"] == "member")
    states = Counter(str(group["state"]) for group in ordered[most:])
    counted = ", ".join(f"{count} {state}" for state, count in states.most_common())
    return ordered[:most], [f"... and {len(groups) - most} more groups: {counted}"]


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
            for name in ("action", "status", "group", "step", "quorum_id", "members", "reason")
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
    for job in sorted(jobs, key=lambda job: natural_key(job["job"])):
        goodput = "" if job["goodput"] is None else f"{job['goodput']:.1%}"
        groups = f"{job['members']}/{job['places']}"
        rate = f"{job['steps_per_s']:.2f}"
        why = Text(job["halted"] or job["waiting"])
        table.add_row(Text(job["job"]), job["state"], str(job["step"]), groups, rate, goodput, why)
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} s"
