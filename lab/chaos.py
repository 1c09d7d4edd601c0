"""The command `make chaos`: an example under a storm of faults, the same training undisturbed, and a verdict."""

import sys
from dataclasses import dataclass, replace

from jaxft_launch.processes._checks import LaunchError, check_json_file
from jaxft_launch.processes._coordinator import COORDINATOR, Coordinator
from jaxft_launch.processes._processes import Processes
from jaxft_launch.storm._display import Display
from jaxft_launch.storm._job import Program
from jaxft_launch.storm._options import StormOptions
from jaxft_launch.storm._record import RunRecord
from jaxft_launch.storm._runs import (
    SILENCE_TIMEOUT_S,
    conclude,
    job_of,
    run_folder,
    run_job,
    run_storm,
    signals_as_exit,
)
from jaxft_launch.storm._schedule import FIRST_STEP, Strike
from jaxft_launch.storm._storm import Storm
from jaxft_launch.storm._verdict import Verdict, judge
from lab._examples import (
    EXAMPLES,
    RANK_CACHES,
    ROOT,
    Example,
    ExampleName,
    check_example,
    flags_of,
    own_flags_of,
    program_of,
)

# The steps of this many kills remain after the last strike, for the last victims to return.
TAIL_KILLS = 3
PLAIN_LINES = 50
# In a storm with a set duration: the length of a step, and the average time between faults.
TIMED_STEP_S = 0.5
TIMED_FAULT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class LabChaosOptions(StormOptions):
    """Repeatedly kill -9 the replica groups of a job by a seeded plan, or inject other faults, and compare with an
    undisturbed run.

    Exit status 0 if every fault was placed, no step was lost and all final states are equal, bit for bit; 1 if not.
    """

    kills: int = 100
    """How many processes to kill; with --faults, how many faults of all kinds in total."""
    minutes: float | None = None
    """How long the storm lasts, with a fault every 20 s, instead of --kills and --steps."""
    example: ExampleName = "mlp"
    """The example that the groups train."""
    steps: int | None = None
    """Steps that the job commits. None: as many as the kills need."""
    rate: float | None = None
    """Kills per hundred steps. None: a rate at which one victim is usually back before the next is struck."""
    overlap: int = 1
    """Into how many parts the groups of the storm divide the gradients. The undisturbed run has them in one."""
    devices: tuple[int, ...] = ()
    """Numbers of simulated devices of the groups, in turn, for groups with different meshes. Only for mlp."""


def run_chaos(
    options: LabChaosOptions, *, example: Example | None = None, coordinator: tuple[str, ...] = COORDINATOR
) -> int:
    """Run the storm and print its verdict; return the exit status. Tests pass other examples.

    Raises:
        LaunchError: it cannot run here, there is no such plan, or the coordinator does not start.
    """
    options = timed(options)
    verdict, record = compare(options, name="jaxft chaos", example=example, coordinator=coordinator)
    return conclude(options, verdict, record)


def compare(
    options: LabChaosOptions, *, name: str, example: Example | None, coordinator: tuple[str, ...]
) -> tuple[Verdict, RunRecord]:
    """Train under the storm and undisturbed; return the verdict, and the record of the storm. `name`: for the lines.

    Raises:
        LaunchError: as `run_chaos`.
    """
    example = at_rate(example or EXAMPLES[options.example], options.rate)
    steps = default_steps(options.kills, example) if options.steps is None else options.steps
    strikes = plan(options, example, steps)
    own_flags = own_flags_of(example, options.group_names, options.devices)
    if options.json is not None:
        check_json_file(options.json)
        options.json.unlink(missing_ok=True)  # a failure must not leave an old verdict
    check_example(example.needs)
    display = Display(sys.stdout, name=name, every_steps=max(10, steps // PLAIN_LINES))
    with (
        signals_as_exit(),
        run_folder(options.keep, name=f"{name.replace(' ', '-')}-") as folder,
        display,
        Processes(folder, cwd=ROOT) as processes,
    ):
        flags = flags_of(example, groups=options.groups, folder=folder, nproc=options.nproc)
        flags |= timeout_flags(options)
        overlapped = {**flags, "--overlap": str(options.overlap)} if options.overlap > 1 else flags
        program = program_of(
            example.trainer,
            steps,
            overlapped,
            own_flags=own_flags,
            takes_orders=True,
            preload=(*example.needs, RANK_CACHES),
        )
        started = Coordinator(processes, (*coordinator, *options.coordinator_flags(folder / "coordinator")))
        display.say(f"coordinator at {started.address} (pid {started.child.pid}); logs in {folder}")
        display.say(
            f"{steps} steps of {example.module} in {options.groups} groups, {options.kills} {options.what}, --seed "
            f"{options.seed}"
        )
        record = run_storm(
            options.group_names,
            program,
            strikes,
            started,
            processes,
            display,
            nproc=options.nproc,
            lasts_s=None if options.minutes is None else 60 * options.minutes,
            silence_timeout_s=options.nproc * SILENCE_TIMEOUT_S,  # every process compiles
        )
        alone = program_of(example.trainer, steps, flags, alone=True)
        undisturbed = None if record.problems else _run_alone(alone, processes, display, options.nproc)
    return judge(record, undisturbed), record


def timed(options: LabChaosOptions) -> LabChaosOptions:
    """Return the options with the number of faults and steps that fill the given minutes, if any.

    Raises:
        LaunchError: the time is not valid, or steps are given too.
    """
    if options.minutes is None:
        return options
    if not options.minutes > 0 or options.steps is not None:
        raise LaunchError(
            f"--minutes must be more than 0, and replaces --steps: not {options.minutes:g} with "
            f"{options.steps} steps"
        )
    lasts_s = 60 * options.minutes
    steps = max(2 * FIRST_STEP, round(lasts_s / TIMED_STEP_S))
    return replace(options, kills=max(1, round(lasts_s / TIMED_FAULT_S)), steps=steps)


def timeout_flags(options: LabChaosOptions) -> dict[str, str]:
    """Return the flags for the storm's timeouts that differ from the examples' defaults."""
    changed = options.failure_timeout_s != StormOptions.failure_timeout_s
    return {"--failure-timeout-s": f"{options.failure_timeout_s:g}"} if changed else {}


def at_rate(example: Example, rate: float | None) -> Example:
    """Return the example with another rate of kills.

    Raises:
        LaunchError: it is not between 0 and 100 kills in a hundred steps.
    """
    if rate is None:
        return example
    if not 0 < rate <= 100:
        raise LaunchError(f"--rate is in kills per hundred steps, more than 0 and at most 100, not {rate:g}")
    return replace(example, steps_per_kill=max(1, round(100 / rate)))


def default_steps(kills: int, example: Example) -> int:
    """Return the number of steps that this many kills need."""
    return FIRST_STEP + (kills + TAIL_KILLS) * example.steps_per_kill


def plan(options: LabChaosOptions, example: Example, steps: int) -> tuple[Strike, ...]:
    """Return the strikes of the plan. Raises LaunchError if there is none for these options."""
    return options.plan(last_step=steps - min(TAIL_KILLS * example.steps_per_kill, steps // 3))


def _run_alone(program: Program, processes: Processes, display: Display, nproc: int) -> RunRecord:
    """Train undisturbed, in one group that computes all shards: the same bits by design, and faster."""
    display.say("the same steps, undisturbed, in one group")
    alone = job_of(
        "undisturbed",
        ("alone",),
        program,
        processes=processes,
        display=display,
        coordinator=None,
        nproc=nproc,
    )
    with alone as job:
        return run_job(job, display, Storm(display, ()), title="undisturbed run")
