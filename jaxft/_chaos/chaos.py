"""The command `jaxft chaos`: a training under a storm of kills, the same training undisturbed, and a verdict."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from jaxft._chaos._examples import EXAMPLES, Example, ExampleName, flags_of, own_flags_of
from jaxft._chaos._phases import PHASES
from jaxft._chaos._report import storm_json, storm_text
from jaxft._chaos._schedule import FIRST_STEP, Strike, plan_strikes
from jaxft._chaos._storm import Storm
from jaxft._launch._checks import LaunchError, check_installed, check_json_file, find_clone
from jaxft._launch._coordinator import COORDINATOR, start_coordinator
from jaxft._launch._display import Display, make_display
from jaxft._launch._job import Job, Training
from jaxft._launch._processes import Processes
from jaxft._launch._record import RunRecord
from jaxft._launch._run import run_job
from jaxft._launch._session import run_folder, signals_as_exit
from jaxft._launch._verdict import judge

# After the last strike so many kills' worth of steps remain, for the last victims to come back in.
TAIL_KILLS = 3
PLAIN_LINES = 50


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """Kill -9 the replica groups of a job again and again by a seeded plan, and compare with an undisturbed run.

    Exit status 0 if every kill was placed, no step was lost and all final states are equal, bit for bit; 1 if not.
    """

    kills: int = 100
    """How many processes to kill."""
    groups: int = 3
    """Replica groups of the job."""
    seed: int = 1
    """Names the plan: the same order of victims and phases for the same seed."""
    example: ExampleName = "mlp"
    """What the groups train."""
    steps: int | None = None
    """Steps that the job commits. None takes as many as the kills need."""
    rate: float | None = None
    """Kills in a hundred steps. None takes a rate at which one victim is mostly back before the next is struck."""
    only: str = ""
    """Kill only these groups, named with commas between them. Empty for all."""
    phases: str = ",".join(PHASES)
    """Kill only in these phases, named with commas between them."""
    devices: tuple[int, ...] = ()
    """Simulated devices of the groups, in turn: groups of different meshes. Only for mlp."""
    json: Path | None = None
    """Write the verdict to this file as well."""
    keep: Path | None = None
    """Keep the event files and logs in this new folder."""

    @property
    def group_names(self) -> tuple[str, ...]:
        return tuple(f"group-{number}" for number in range(self.groups))


def run_chaos(
    options: ChaosOptions, *, example: Example | None = None, coordinator: tuple[str, ...] = COORDINATOR
) -> int:
    """Run the storm and print its verdict; return the exit status. Tests name an example of their own.

    Raises:
        LaunchError: it cannot run here, there is no such plan, or the coordinator does not start.
    """
    example = at_rate(example or EXAMPLES[options.example], options.rate)
    steps = default_steps(options.kills, example) if options.steps is None else options.steps
    strikes = plan(options, example, steps)
    own_flags = own_flags_of(example, options.group_names, options.devices)
    if options.json is not None:
        check_json_file(options.json)
        options.json.unlink(missing_ok=True)  # a failure must not leave an older verdict
    clone = find_clone(example.module)
    check_installed(example.needs)
    display = make_display(sys.stdout, name="jaxft chaos", every_steps=max(10, steps // PLAIN_LINES))
    with signals_as_exit(), run_folder(options.keep, name="jaxft-chaos-") as folder:
        with display, Processes(folder, cwd=clone) as processes:
            training = Training(
                steps=steps,
                flags=flags_of(example, groups=options.groups, folder=folder),
                own_flags=own_flags,
                trainer=example.victim,
                takes_orders=True,
            )
            groups = options.group_names
            child, address = start_coordinator(processes, coordinator)
            display.say(f"coordinator at {address} (pid {child.pid}); logs in {processes.folder}")
            display.say(
                f"{steps} steps of {example.module} in {options.groups} groups, {options.kills} kills"
            )
            job = Job("storm", groups, training, coordinator=address, processes=processes)
            record = run_job(job, display, Storm(display, strikes), title="storm")
            undisturbed = None if record.problems else _run_alone(example, training, processes, display)
            verdict = judge(record, undisturbed)
    sys.stdout.write("\n" + storm_text(verdict, record, seed=options.seed) + "\n")
    if not verdict.ok and options.keep is None:
        sys.stdout.write(
            "To look into it: the same command with --keep FOLDER keeps every log and event file.\n"
        )
    if options.json is not None:
        result = storm_json(verdict, record, seed=options.seed)
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if verdict.ok else 1


def at_rate(example: Example, rate: float | None) -> Example:
    """Return the example with another distance between kills.

    Raises:
        LaunchError: it is not between 0 and 100 kills in a hundred steps.
    """
    if rate is None:
        return example
    if not 0 < rate <= 100:
        raise LaunchError(f"--rate is in kills per hundred steps, more than 0 and at most 100, not {rate:g}")
    return replace(example, steps_per_kill=max(1, round(100 / rate)))


def default_steps(kills: int, example: Example) -> int:
    """Return in how many steps so many kills fit."""
    return FIRST_STEP + (kills + TAIL_KILLS) * example.steps_per_kill


def plan(options: ChaosOptions, example: Example, steps: int) -> tuple[Strike, ...]:
    """Return the strikes that the options ask for.

    Raises:
        LaunchError: there is no such plan.
    """
    return plan_strikes(
        options.group_names,
        kills=options.kills,
        seed=options.seed,
        last_step=steps - min(TAIL_KILLS * example.steps_per_kill, steps // 3),
        only=_names(options.only),
        phases=_names(options.phases),
    )


def _names(comma_list: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in comma_list.split(",") if name.strip())


def _run_alone(example: Example, training: Training, processes: Processes, display: Display) -> RunRecord:
    """Train undisturbed, in one process that computes all shards: by design the same bits, and quicker."""
    display.say("the same steps, undisturbed, in one process")
    alone = replace(training, trainer=example.trainer, takes_orders=False)
    job = Job("undisturbed", ("alone",), alone, coordinator=None, processes=processes)
    return run_job(job, display, Storm(display, ()), title="undisturbed run")
