"""The command `make demo`: a short storm over Llama 3 that kills each group once, and its verdict."""

import secrets
from dataclasses import dataclass
from pathlib import Path

from jaxft_launch.processes._coordinator import COORDINATOR
from jaxft_launch.storm._faults import ANY
from jaxft_launch.storm._runs import report
from jaxft_launch.storm._verdict_text import verdict_json, verdict_text
from lab._examples import Example
from lab.chaos import LabChaosOptions, compare

GROUPS = 3
STEPS = 80


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Train a small Llama 3 in three replica groups, kill -9 each of them, and compare with an undisturbed run.

    Exit status 0 if no step was lost and all final states are equal, bit for bit; 1 if not.
    """

    nproc: int = 1
    """Processes of each group."""
    steps: int | None = None
    """Steps that the job commits, with kills and without. None: 80, and 40 more for every further process."""
    kills: int | None = None
    """How many processes to kill. None: as many as there are. No group is struck twice before each is struck once."""
    seed: int | None = None
    """Seed for the order of victims and the times. None draws one and prints it."""
    json: Path | None = None
    """Also write the verdict to this file."""
    keep: Path | None = None
    """Keep the event files and logs in this new folder."""


def run_demo(
    options: DemoOptions, *, example: Example | None = None, coordinator: tuple[str, ...] = COORDINATOR
) -> int:
    """Run the demo and print its verdict; return the exit status. Tests pass another example.

    Raises:
        LaunchError: it cannot run here, there is no such plan, or its coordinator does not start.
    """
    storm = storm_of(options)
    verdict, _ = compare(storm, name="jaxft demo", example=example, coordinator=coordinator)
    text = verdict_text(verdict, seed=storm.seed)
    return report(storm, verdict, text=text, result=verdict_json(verdict, seed=storm.seed))


def storm_of(options: DemoOptions) -> LabChaosOptions:
    """Return the demo as a storm."""
    return LabChaosOptions(
        example="llama3",
        groups=GROUPS,
        nproc=options.nproc,
        phases=ANY,
        steps=STEPS + STEPS // 2 * (options.nproc - 1) if options.steps is None else options.steps,
        kills=GROUPS * options.nproc if options.kills is None else options.kills,
        seed=secrets.randbelow(10**6) if options.seed is None else options.seed,
        json=options.json,
        keep=options.keep,
    )
