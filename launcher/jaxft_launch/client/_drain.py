"""`jaxft drain`: ask a group to finish its step, hand over its place, and end."""

import os
import sys
import time
import urllib.parse
from dataclasses import dataclass, field, replace
from typing import Annotated

import tyro

from jaxft._errors import ConfigurationError
from jaxft_launch.client._port import Authority, PortError, act, ask, default_url, job_path, jobs

_LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class DrainOptions:
    """Drain a group: it finishes its step, a spare or the others take over, and its process ends with status 0."""

    group: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="GROUP")]
    """The group."""
    job: str = ""
    """The job of that group; empty: the only one, or the one with the name `default`."""
    http: Annotated[str, tyro.conf.arg(metavar="URL")] = field(default_factory=default_url)
    """The coordinator's HTTP port, started with --http-actions. By default that of the variable JAXFT_HTTP."""
    tls_ca: Authority = None
    """CA of that port's certificate. By default that of the variable JAXFT_HTTP_CA, or those this machine trusts."""
    token: str | None = None
    """The job's token, or the operator's. By default that of the environment variable JAXFT_TOKEN."""
    reason: str = ""
    """For the coordinator's audit log."""
    wait_s: float = 60.0
    """Return when the group takes part no more, and end with status 1 if it still does after this; 0: do not wait."""


def run_drain(options: DrainOptions) -> int:
    """Drain a group; return 0 once it takes part no more.

    Raises:
        JaxftError: the coordinator cannot be asked, refuses it, or the group has not left in time.
    """
    if not options.wait_s >= 0:
        raise ConfigurationError(f"--wait-s must be at least 0, not {options.wait_s:g}")
    options = replace(options, job=options.job or _meant(options))
    token = options.token if options.token is not None else os.environ.get("JAXFT_TOKEN", "")
    group = urllib.parse.quote(options.group, safe="")
    path = f"{job_path(options.job)}/groups/{group}/drain"
    sys.stdout.write(act(options.http, path, token=token, reason=options.reason, ca=options.tls_ca) + "\n")
    deadline_s = time.monotonic() + options.wait_s
    while options.wait_s > 0:
        state = _state(options)
        if state in ("gone", "leaving"):
            sys.stdout.write(f"group {options.group!r} takes part no more\n")
            return 0
        if time.monotonic() >= deadline_s:
            raise PortError(
                f"group {options.group!r} of job {options.job!r} still takes part after {options.wait_s:g} s "
                f"({state}). It leaves when its step is committed: `jaxft status {options.job}` shows what the job "
                "waits for."
            )
        time.sleep(_LOOK_EVERY_S)
    return 0


def _meant(options: DrainOptions) -> str:
    """The job that is meant without --job."""
    names = [str(job["job"]) for job in jobs(options.http, ca=options.tls_ca)]
    if len(names) == 1:
        return names[0]
    if "default" not in names:
        known = ", ".join(map(repr, sorted(names)[:10])) or "none"
        raise PortError(
            f"the coordinator has {len(names)} jobs ({known}). Say which one group {options.group!r} belongs to: "
            "--job."
        )
    return "default"


def _state(options: DrainOptions) -> str:
    groups = ask(options.http, job_path(options.job), ca=options.tls_ca)["group_list"]
    return next((str(group["state"]) for group in groups if group["group"] == options.group), "gone")
