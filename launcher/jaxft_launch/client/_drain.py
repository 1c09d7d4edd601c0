"""`jaxft drain`: ask a group to finish its step, hand over its place, and end."""

import os
import sys
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import Annotated

import tyro
from jaxft_protocol.values import LongWait

from jaxft_launch.client._port import PortError, act, ask, default_url, job_path, jobs

_LOOK_EVERY_S = 0.2
# Of a step and a spare's start; Ctrl-C ends the wait, and the group leaves all the same.
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class DrainOptions:
    """Drain a group: it finishes its step, a spare or the others take over, and its process ends with status 0.

    Returns once the group takes no part any more; Ctrl-C returns before. The environment variable JAXFT_TOKEN holds
    the job's token, or the operator's.
    """

    group: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="GROUP")]
    """The group."""
    job: str = ""
    """The job of that group; empty: the only one, or the one with the name `default`."""
    http: Annotated[str, tyro.conf.arg(metavar="URL")] = field(default_factory=default_url)
    """The coordinator's HTTP port, started with --http-actions. By default the variable JAXFT_HTTP."""


def run_drain(options: DrainOptions) -> int:
    """Drain a group; return 0 once it takes part no more.

    Raises:
        JaxftError: the coordinator cannot be asked, refuses it, or the group has not left in time.
    """
    url, group = options.http, options.group
    job = options.job or _meant(url, group)
    path = f"{job_path(job)}/groups/{urllib.parse.quote(group, safe='')}/drain"
    sys.stdout.write(act(url, path, token=os.environ.get("JAXFT_TOKEN", "")) + "\n")
    sys.stdout.flush()
    wait = LongWait(time.monotonic())
    while (state := _state(url, job, group)) not in ("gone", "leaving"):
        now_s = time.monotonic()
        text = f"group {group!r} of job {job!r} still takes part after {now_s - wait.began_s:.0f} s ({state})"
        if now_s - wait.began_s >= TIMEOUT_S:
            raise PortError(
                f"{text}. It leaves when its step is committed: `jaxft status {job}` shows whom the job waits for."
            )
        if wait.to_say(now_s) is not None:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        time.sleep(_LOOK_EVERY_S)
    sys.stdout.write(f"group {group!r} takes part no more\n")
    return 0


def _meant(url: str, group: str) -> str:
    """The job that is meant without --job."""
    names = [str(job["job"]) for job in jobs(url)]
    if len(names) == 1:
        return names[0]
    if "default" not in names:
        known = ", ".join(map(repr, sorted(names)[:10])) or "none"
        raise PortError(
            f"the coordinator has {len(names)} jobs ({known}). Say which one group {group!r} belongs to: --job."
        )
    return "default"


def _state(url: str, job: str, group: str) -> str:
    groups = ask(url, job_path(job))["group_list"]
    return next((str(each["state"]) for each in groups if each["group"] == group), "gone")
