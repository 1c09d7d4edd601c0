"""The command `make demo`: two trainings of the same job, one with kills and one without, and a verdict."""

import json
import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from jaxft_launch.processes._checks import LaunchError, check_json_file
from jaxft_launch.processes._coordinator import COORDINATOR, Coordinator
from jaxft_launch.processes._processes import Processes
from jaxft_launch.storm._display import Display
from jaxft_launch.storm._job import Job
from jaxft_launch.storm._run import SILENCE_TIMEOUT_S, run_job
from jaxft_launch.storm._session import run_folder, signals_as_exit
from jaxft_launch.storm._verdict import Verdict, judge
from jaxft_launch.storm._verdict_text import verdict_json, verdict_text
from lab._examples import RANK_CACHES, ROOT, check_example, devices_of, program_of
from lab._killer import plan_strikes
from lab._live import make_display
from lab._watcher import DemoWatcher

GROUPS = ("group-0", "group-1", "group-2")
SHARDS = 6  # two per group, or three with two groups: equal work for all
# A restarted group costs as much processor time as about 7 such steps. On a machine with five times as much to do as
# it has cores, a return took 18 to 32 of them: three still fit.
SEQUENCES_PER_SHARD = 8
TRAINER = (sys.executable, "-m", "examples.llama3.train")
NEEDED = ("flax", "grain", "optax", "rich")
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
    """How many processes to kill. None: each one once. Every one is killed once before any is killed twice."""
    seed: int | None = None
    """Seed for the order of victims and the times. None draws one and prints it."""
    json: Path | None = None
    """Also write the verdict to this file."""
    keep: Path | None = None
    """Keep the event files and logs in this new folder."""


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands to start, which tests replace with faster ones."""

    coordinator: tuple[str, ...] = COORDINATOR
    trainer: tuple[str, ...] = TRAINER


def run_demo(options: DemoOptions, commands: Commands | None = None) -> int:
    """Run the demo and print its verdict; return the exit status.

    Raises:
        LaunchError: it cannot run here, or its coordinator does not start.
    """
    options = filled_in(options)
    if options.json is not None:
        check_json_file(options.json)
        options.json.unlink(missing_ok=True)  # a failure must not leave an old verdict
    check_example(NEEDED)
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    display = make_display(sys.stdout, name="jaxft demo")
    with signals_as_exit(), run_folder(options.keep, name="jaxft-demo-") as folder:
        with display, Processes(folder, cwd=ROOT) as processes:
            verdict = _train_twice(
                options, commands or Commands(), seed=seed, processes=processes, display=display
            )
    sys.stdout.write("\n" + verdict_text(verdict, seed=seed) + "\n")
    if not verdict.ok and options.keep is None:
        sys.stdout.write(
            f"To investigate, run python -m lab demo --seed {seed} --keep FOLDER, which keeps logs and event files.\n"
        )
    if options.json is not None:
        options.json.write_text(
            json.dumps(verdict_json(verdict, seed=seed), indent=2, allow_nan=False) + "\n"
        )
    return 0 if verdict.ok else 1


def filled_in(options: DemoOptions) -> DemoOptions:
    """Return the options with numbers of steps and kills.

    Raises:
        LaunchError: a number is too small.
    """
    nproc = options.nproc
    steps = STEPS + STEPS // 2 * (nproc - 1) if options.steps is None else options.steps
    kills = nproc * len(GROUPS) if options.kills is None else options.kills
    if nproc < 1 or steps < 1 or kills < 0:
        raise LaunchError(
            f"--nproc and --steps must be 1 or more and --kills 0 or more, not {nproc}, {steps} and {kills}"
        )
    return replace(options, steps=steps, kills=kills)


def _train_twice(
    options: DemoOptions, commands: Commands, *, seed: int, processes: Processes, display: Display
) -> Verdict:
    """The run with kills comes first, so that recoveries are visible soon. Then the undisturbed run."""
    coordinator = Coordinator(processes, commands.coordinator)
    address = coordinator.address
    display.say(f"coordinator at {address} (pid {coordinator.child.pid}); logs in {processes.folder}")
    assert options.steps is not None
    assert options.kills is not None
    nproc = options.nproc
    flags = trainer_flags(processes.folder, nproc)
    program = program_of(commands.trainer, options.steps, flags, preload=(*NEEDED, RANK_CACHES))
    strikes = plan_strikes(GROUPS, kills=options.kills, seed=seed, nproc=nproc)
    order = ", ".join(
        strike.group if nproc == 1 else f"{strike.group} rank {strike.rank}" for strike in strikes
    )
    display.say(f"first run: {options.steps} steps with {options.kills} kills ({order}); --seed {seed}")
    job = Job("disturbed", GROUPS, program, coordinator=address, processes=processes, nproc=nproc)
    silence_s = nproc * SILENCE_TIMEOUT_S  # every process compiles
    watcher = DemoWatcher(display, strikes)
    disturbed = run_job(job, display, watcher, title="run with kills", silence_timeout_s=silence_s)
    if disturbed.problems:
        return judge(disturbed, None)
    display.say(f"second run: the same {options.steps} steps, undisturbed")
    job = Job("undisturbed", GROUPS, program, coordinator=address, processes=processes, nproc=nproc)
    watcher = DemoWatcher(display)
    undisturbed = run_job(job, display, watcher, title="undisturbed run", silence_timeout_s=silence_s)
    return judge(disturbed, undisturbed)


def trainer_flags(folder: Path, nproc: int = 1) -> dict[str, str]:
    return {
        "--size": "debug",
        "--shards": str(SHARDS),
        "--batch-per-shard": str(SEQUENCES_PER_SHARD),
        **devices_of(nproc),
        "--compilation-cache": str(folder / "compilation"),
    }
