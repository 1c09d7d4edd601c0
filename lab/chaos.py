"""The command `make chaos`: an example under a storm of faults, the same training undisturbed, and a verdict."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.processes._coordinator import COORDINATOR, Coordinator
from jaxft_launch.processes._devices import words_of
from jaxft_launch.processes._processes import Processes
from jaxft_launch.storm._display import Display
from jaxft_launch.storm._faults import PHASES, SHIPPED, Timeouts
from jaxft_launch.storm._job import Place, Program
from jaxft_launch.storm._options import StormOptions
from jaxft_launch.storm._record import RunRecord
from jaxft_launch.storm._runs import (
    conclude,
    job_of,
    run_folder,
    run_job,
    run_storm,
    signals_as_exit,
)
from jaxft_launch.storm._schedule import FIRST_STEP, Strike
from jaxft_launch.storm._storm import Storm, Times
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
    phases: str = ",".join(PHASES)
    """Kill only in these phases, separated by commas."""
    heartbeat_timeout_ms: int = 5000
    """Silence after which the coordinator considers a group dead. The lengths of faults depend on it."""
    failure_timeout_s: float = SHIPPED.failure_s
    """How long any one failure may last before a group gives up; an exchange waits for half of it. The lengths of
    faults on links depend on it."""
    overlap: int = 1
    """Into how many parts the groups of the storm divide the gradients. The undisturbed run has them in one."""
    devices: tuple[int, ...] = ()
    """Numbers of simulated devices of the groups, in turn, for groups with different meshes. Only for mlp."""

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(heartbeat_s=self.heartbeat_timeout_ms / 1000, failure_s=self.failure_timeout_s)

    def coordinator_flags(self, memory: Path) -> tuple[str, ...]:
        timeout = ("--heartbeat-timeout-ms", str(self.heartbeat_timeout_ms))
        return (*super().coordinator_flags(memory), *(timeout if self.timeouts != SHIPPED else ()))


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
    example = example or EXAMPLES[options.example]
    steps = default_steps(options.kills, example) if options.steps is None else options.steps
    strikes = plan(options, example, steps)
    own_flags = own_flags_of(example, options.group_names, options.devices)
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
            preload=(*example.needs, RANK_CACHES),
        )
        started = Coordinator(processes, (*coordinator, *options.coordinator_flags(folder / "coordinator")))
        display.say(f"coordinator at {started.address} (pid {started.child.pid}); logs in {folder}")
        display.say(
            f"{steps} steps of {example.module} in {options.groups} groups, {options.kills} {options.what}, --seed "
            f"{options.seed}"
        )
        place = Place(processes, display, options.nproc)
        times = Times(
            lasts_s=None if options.minutes is None else 60 * options.minutes,
            silence_s=options.nproc * Times().silence_s,  # every process compiles
        )
        record = run_storm(options.group_names, program, strikes, started, place, times)
        alone = program_of(example.trainer, steps, flags, alone=True)
        undisturbed = None if record.problems else _run_alone(alone, place)
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
    changed = options.failure_timeout_s != SHIPPED.failure_s
    return {"--failure-timeout-s": f"{options.failure_timeout_s:g}"} if changed else {}


def default_steps(kills: int, example: Example) -> int:
    """Return the number of steps that this many kills need."""
    return FIRST_STEP + (kills + TAIL_KILLS) * example.steps_per_kill


def plan(options: LabChaosOptions, example: Example, steps: int) -> tuple[Strike, ...]:
    """Return the strikes of the plan. Raises LaunchError if there is none for these options."""
    last_step = steps - min(TAIL_KILLS * example.steps_per_kill, steps // 3)
    return options.plan(last_step=last_step, phases=words_of(options.phases), timeouts=options.timeouts)


def _run_alone(program: Program, place: Place) -> RunRecord:
    """Train undisturbed, in one group that computes all shards: the same bits by design, and faster."""
    place.display.say("the same steps, undisturbed, in one group")
    with job_of("undisturbed", ("alone",), program, place) as job:
        return run_job(job, place.display, Storm(place.display, ()), title="undisturbed run")
