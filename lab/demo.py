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
    """Train a small Llama 3 in three replica groups, kill -9 each process, and compare with an undisturbed run.

    Exit status 0 if no step was lost and all final states are equal, bit for bit; 1 if not.
    """

    nproc: int = 1
    """Processes of each group."""
    seed: int | None = None
    """Seed for the order of victims and the times. None draws one and prints it."""
    keep: Path | None = None
    """Keep logs, event files and the verdict (verdict.json) in this new folder."""


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
        steps=STEPS + STEPS // 2 * (options.nproc - 1),
        kills=GROUPS * options.nproc,
        seed=secrets.randbelow(10**6) if options.seed is None else options.seed,
        keep=options.keep,
    )
