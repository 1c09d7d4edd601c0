"""`jaxft status`: the facts of the page, in a terminal."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from jaxft_launch.client._port import PortError, ask, check_url, default_url, job_path, jobs
from jaxft_launch.client._status_view import rendered

LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class StatusOptions:
    """Show the jobs of a coordinator; with JOB, its groups and what happened last."""

    job: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="JOB")] = ""
    """The job; empty: all jobs, or the only one."""
    http: Annotated[str, tyro.conf.arg(metavar="URL")] = field(default_factory=default_url)
    """The coordinator's HTTP port. By default the environment variable JAXFT_HTTP."""
    watch: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show it every second, until Ctrl-C. A coordinator that does not answer is asked again."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the API's JSON instead; with --watch, one line for each look."""


def run_status(options: StatusOptions) -> int:
    """Show the status; return 0.

    Raises:
        JaxftError: the coordinator cannot be asked or knows no such job, and it is not watched.
    """
    check_url(options.http)
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
    for facts, problem in _looks(options):
        sys.stdout.write(json.dumps({"problem": problem} if problem else facts) + "\n")
        sys.stdout.flush()


def _show(options: StatusOptions) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        for facts, problem in _looks(options):
            console.print(rendered(facts, note=_note(problem, facts)))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for facts, problem in _looks(options):
            note = _note(problem, facts)
            # A long note takes further lines.
            height = console.height - len(note) // console.width
            live.update(rendered(facts, note=note, height=height), refresh=True)


def _looks(options: StatusOptions) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield forever the coordinator's last answer ({} for none), and why it does not answer now."""
    facts: Mapping[str, Any] = {}
    while True:
        try:
            facts, problem = _asked(options), ""
        except PortError as error:
            problem = str(error)
        yield facts, problem
        time.sleep(LOOK_EVERY_S)


def _note(problem: str, facts: Mapping[str, Any]) -> str:
    """Return the line above a look, so that a reader sees how old it is."""
    now = time.strftime("%H:%M:%S")
    if not problem:
        return f"{now}, again every {LOOK_EVERY_S:g} s until Ctrl-C"
    older = " Below is its last answer." if facts else ""
    return f"{now}: {problem} It is asked again every {LOOK_EVERY_S:g} s.{older}"


def _asked(options: StatusOptions) -> Mapping[str, Any]:
    if options.job:
        return ask(options.http, job_path(options.job))
    listed = jobs(options.http)
    if len(listed) == 1:
        return ask(options.http, job_path(listed[0]["job"]))
    return {"jobs": listed}
