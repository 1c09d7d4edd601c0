"""`jaxft status`: what the page shows, in a terminal."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from jaxft._errors import ConfigurationError
from jaxft_launch.client._port import Authority, PortError, ask, check_url, default_url, job_path, jobs
from jaxft_launch.client._status_view import rendered

LEAST_INTERVAL_S = 0.1


@dataclass(frozen=True)
class StatusOptions:
    """Show the jobs of a coordinator; with JOB, its groups and what happened last."""

    job: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="JOB")] = ""
    """The job; empty: all jobs, or the only one."""
    http: Annotated[str, tyro.conf.arg(metavar="URL")] = field(default_factory=default_url)
    """The coordinator's HTTP port. By default that of the environment variable JAXFT_HTTP."""
    tls_ca: Authority = None
    """CA of that port's certificate. By default that of the variable JAXFT_HTTP_CA, or those this machine trusts."""
    watch: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show it again and again, until Ctrl-C. A coordinator that does not answer is asked again."""
    interval_s: float = 1.0
    """With --watch: how long to wait before the next look."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the API's JSON instead; with --watch, one line for each look."""


def run_status(options: StatusOptions) -> int:
    """Show the status; return 0.

    Raises:
        JaxftError: the coordinator cannot be asked or knows no such job, and it is not watched.
    """
    check_url(options.http)
    if not options.interval_s >= LEAST_INTERVAL_S:
        raise ConfigurationError(
            f"--interval-s must be at least {LEAST_INTERVAL_S:g}, not {options.interval_s:g}"
        )
    if options.watch:
        return _watch(options)
    if options.json:
        sys.stdout.write(json.dumps(_asked(options), indent=2) + "\n")
        return 0
    from rich.console import Console

    Console().print(rendered(_asked(options)))
    return 0


def _watch(options: StatusOptions) -> int:
    try:
        (_write_lines if options.json else _show)(options)
    except KeyboardInterrupt:
        pass  # the usual end
    except BrokenPipeError:
        # The reader, such as `head`, has enough. Python would flush the pipe once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _write_lines(options: StatusOptions) -> None:
    for told, problem in _looks(options):
        sys.stdout.write(json.dumps({"problem": problem} if problem else told) + "\n")
        sys.stdout.flush()


def _show(options: StatusOptions) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        for told, problem in _looks(options):
            console.print(rendered(told, note=_note(options, problem, told)))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for told, problem in _looks(options):
            note = _note(options, problem, told)
            # A long note takes further lines.
            height = console.height - len(note) // console.width
            live.update(rendered(told, note=note, height=height), refresh=True)


def _looks(options: StatusOptions) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield forever what the coordinator tells, or has told last ({} for nothing), and why it does not answer now."""
    told: Mapping[str, Any] = {}
    while True:
        try:
            told, problem = _asked(options), ""
        except PortError as error:
            problem = str(error)
        yield told, problem
        time.sleep(options.interval_s)


def _note(options: StatusOptions, problem: str, told: Mapping[str, Any]) -> str:
    """Return the line above a look, so that a reader sees how old it is."""
    now = time.strftime("%H:%M:%S")
    if not problem:
        return f"{now}, again every {options.interval_s:g} s until Ctrl-C"
    older = " Below is what it said last." if told else ""
    return f"{now}: {problem} It is asked again every {options.interval_s:g} s.{older}"


def _asked(options: StatusOptions) -> Mapping[str, Any]:
    if options.job:
        return ask(options.http, job_path(options.job), ca=options.tls_ca)
    listed = jobs(options.http, ca=options.tls_ca)
    if len(listed) == 1:
        return ask(options.http, job_path(listed[0]["job"]), ca=options.tls_ca)
    return {"jobs": listed}
