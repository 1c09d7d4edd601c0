"""The two runs of a storm, and the final report."""

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jaxft._supervised._phase_file import steps_beside
from jaxft_launch.processes._coordinator import Coordinator
from jaxft_launch.processes._processes import Processes
from jaxft_launch.storm._display import Display
from jaxft_launch.storm._faults import COORDINATOR
from jaxft_launch.storm._harms import Reach
from jaxft_launch.storm._job import Job, Program
from jaxft_launch.storm._network import Network
from jaxft_launch.storm._options import StormOptions
from jaxft_launch.storm._record import RunRecord
from jaxft_launch.storm._report import storm_json, storm_text
from jaxft_launch.storm._run import SILENCE_TIMEOUT_S, run_job
from jaxft_launch.storm._schedule import Strike
from jaxft_launch.storm._storm import FIRST_RETURN_S, MOST_PACE_S, Storm
from jaxft_launch.storm._verdict import Verdict


def run_storm(
    groups: Sequence[str],
    program: Program,
    strikes: Sequence[Strike],
    coordinator: Coordinator,
    processes: Processes,
    display: Display,
    *,
    nproc: int = 1,
    lasts_s: float | None = None,
    to_the_end: bool = True,
    return_s: float = FIRST_RETURN_S,
    most_pace_s: float = MOST_PACE_S,
    silence_timeout_s: float = SILENCE_TIMEOUT_S,
    silence_advice: str = "",
) -> RunRecord:
    """Train under the storm, through the fault-injecting network if a fault needs it. For the rest see `Storm`."""
    network: Network | None = None
    job: Job

    def where(name: str) -> int | None:
        if name == COORDINATOR:
            return coordinator.port
        return _port_in(steps_beside(job.current(name).events.path))

    with contextlib.ExitStack() as stack:
        if any(victim.kind.on_the_network for strike in strikes for victim in strike.victims):
            network = stack.enter_context(Network(groups, where))
        job = Job(
            "storm",
            groups,
            program,
            coordinator=coordinator.address,
            processes=processes,
            doors=network,
            nproc=nproc,
        )
        storm = Storm(
            display,
            strikes,
            Reach(network=network, coordinator=coordinator),
            lasts_s=lasts_s,
            to_the_end=to_the_end,
            return_s=return_s,
            most_pace_s=most_pace_s,
        )
        record = run_job(
            job,
            display,
            storm,
            title="storm",
            silence_timeout_s=silence_timeout_s,
            silence_advice=silence_advice,
        )
        return replace(record, planned_faults=storm.planned_faults, undamaged=storm.undamaged)


def conclude(options: StormOptions, verdict: Verdict, record: RunRecord) -> int:
    """Print the verdict and write it to the file in the options; return the exit status."""
    sys.stdout.write("\n" + storm_text(verdict, record, seed=options.seed) + "\n")
    if options.keep is None and not (verdict.ok or verdict.incomplete):
        sys.stdout.write(
            "To investigate, run the same command with --keep FOLDER, which keeps all logs and event files.\n"
        )
    if options.json is not None:
        result = storm_json(verdict, record, seed=options.seed)
        options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    return 0 if verdict.ok else 1


def _port_in(steps: Path) -> int | None:
    """Return the port on which the group with this event file listens, or None if it does not yet."""
    try:
        lines = steps.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return None
    entered = next((line for line in lines if line.endswith(b"\n")), None)
    return None if entered is None else json.loads(entered)["port"]
