"""The command `jaxft chaos`: a training under a storm of faults, the same training undisturbed, and a verdict."""

import contextlib
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from jaxft._chaos._examples import EXAMPLES, Example, ExampleName, flags_of, own_flags_of
from jaxft._chaos._faults import COORDINATOR as THE_COORDINATOR
from jaxft._chaos._faults import KILL, NO_COORDINATOR, ON_THE_NETWORK, Timeouts
from jaxft._chaos._harms import Reach
from jaxft._chaos._network import Network
from jaxft._chaos._phases import PHASES
from jaxft._chaos._report import storm_json, storm_text
from jaxft._chaos._schedule import FIRST_STEP, Strike, plan_strikes
from jaxft._chaos._storm import Storm
from jaxft._launch._checks import LaunchError, check_installed, check_json_file, find_clone
from jaxft._launch._coordinator import COORDINATOR, Coordinator
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
# A storm by time: so long is a step made, and so long after another does a fault fall, on average.
TIMED_STEP_S = 0.5
TIMED_FAULT_S = 20.0
LISTENS = re.compile(r"listens on port (\d+)")


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """Kill -9 the replica groups of a job again and again by a seeded plan, or do them other harm, and compare with
    an undisturbed run.

    Exit status 0 if every fault was placed, no step was lost and all final states are equal, bit for bit; 1 if not.
    """

    kills: int = 100
    """How many processes to kill; with --faults, how many faults of all kinds together."""
    faults: str = KILL
    """Kinds of faults, named with commas between them: kill, stop, hang, link, partition, coordinator, corrupt."""
    minutes: float | None = None
    """Let the storm last for so long, with a fault every 20 s, instead of --kills and --steps."""
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
    heartbeat_timeout_ms: int = 5000
    """Silence after which the coordinator takes a group for dead. The lengths of faults follow it."""
    failure_timeout_s: float = 60.0
    """How long any one failure may take before a group gives up; an exchange waits for half of it. The lengths of
    faults on links follow it."""
    devices: tuple[int, ...] = ()
    """Simulated devices of the groups, in turn: groups of different meshes. Only for mlp."""
    json: Path | None = None
    """Write the verdict to this file as well."""
    keep: Path | None = None
    """Keep the event files and logs in this new folder."""

    @property
    def group_names(self) -> tuple[str, ...]:
        return tuple(f"group-{number}" for number in range(self.groups))

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(heartbeat_s=self.heartbeat_timeout_ms / 1000, failure_s=self.failure_timeout_s)


def run_chaos(
    options: ChaosOptions, *, example: Example | None = None, coordinator: tuple[str, ...] = COORDINATOR
) -> int:
    """Run the storm and print its verdict; return the exit status. Tests name an example of their own.

    Raises:
        LaunchError: it cannot run here, there is no such plan, or the coordinator does not start.
    """
    options = timed(options)
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
                flags=flags_of(example, groups=options.groups, folder=folder) | timeout_flags(options),
                own_flags=own_flags,
                trainer=example.victim,
                takes_orders=True,
            )
            started = Coordinator(processes, (*coordinator, *coordinator_flags(options, folder)))
            display.say(
                f"coordinator at {started.address} (pid {started.child.pid}); logs in {processes.folder}"
            )
            what = "kills" if options.faults == KILL else f"faults ({options.faults})"
            display.say(
                f"{steps} steps of {example.module} in {options.groups} groups, {options.kills} {what}"
            )
            record = _run_storm(options, training, strikes, started, processes, display)
            undisturbed = None if record.problems else _run_alone(example, training, processes, display)
            verdict = judge(record, undisturbed)
    sys.stdout.write("\n" + storm_text(verdict, record, seed=options.seed) + "\n")
    if not verdict.ok and options.keep is None:
        sys.stdout.write(
            "To look into it: the same command with --keep FOLDER keeps every log and event file.\n"
        )
    if options.json is not None:
        result = storm_json(verdict, record, seed=options.seed)
        options.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    return 0 if verdict.ok else 1


def timed(options: ChaosOptions) -> ChaosOptions:
    """Return the options of a storm with the faults and steps that fill its minutes, if it goes by time.

    Raises:
        LaunchError: it is no time, or steps are given too.
    """
    if options.minutes is None:
        return options
    if not options.minutes > 0 or options.steps is not None:
        raise LaunchError(
            f"--minutes must be more than 0, and stands instead of --steps, not {options.minutes:g} with "
            f"{options.steps} steps"
        )
    lasts_s = 60 * options.minutes
    steps = max(2 * FIRST_STEP, round(lasts_s / TIMED_STEP_S))
    return replace(options, kills=max(1, round(lasts_s / TIMED_FAULT_S)), steps=steps)


def timeout_flags(options: ChaosOptions) -> dict[str, str]:
    """Return what every group is given of the storm's timeouts, where they are not those that the examples have."""
    default = ChaosOptions().failure_timeout_s
    changed = options.failure_timeout_s != default
    return {"--failure-timeout-s": f"{options.failure_timeout_s:g}"} if changed else {}


def coordinator_flags(options: ChaosOptions, folder: Path) -> tuple[str, ...]:
    """Return what the coordinator is given for this storm: its timeout, and a memory if it is to be killed."""
    flags: tuple[str, ...] = ()
    if options.heartbeat_timeout_ms != ChaosOptions().heartbeat_timeout_ms:
        flags += ("--heartbeat-timeout-ms", str(options.heartbeat_timeout_ms))
    if NO_COORDINATOR in _names(options.faults):
        flags += ("--state", str(folder / "coordinator"))
    return flags


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
        faults=_names(options.faults),
        timeouts=options.timeouts,
    )


def _names(comma_list: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in comma_list.split(",") if name.strip())


def _run_storm(
    options: ChaosOptions,
    training: Training,
    strikes: tuple[Strike, ...],
    coordinator: Coordinator,
    processes: Processes,
    display: Display,
) -> RunRecord:
    """Train under the storm, through a network that can be broken if a fault needs one."""
    groups = options.group_names
    network: Network | None = None
    job: Job

    def where(name: str) -> int | None:
        if name == THE_COORDINATOR:
            return coordinator.port
        found = LISTENS.search(job.current(name).child.log.read_text(errors="replace"))
        return None if found is None else int(found.group(1))

    with contextlib.ExitStack() as stack:
        if any(victim.kind in ON_THE_NETWORK for strike in strikes for victim in strike.victims):
            network = stack.enter_context(Network(groups, where))
            training = replace(training, own_flags=_through(network, groups, training))
        job = Job("storm", groups, training, coordinator=coordinator.address, processes=processes)
        lasts_s = None if options.minutes is None else 60 * options.minutes
        reach = Reach(network=network, coordinator=coordinator)
        storm = Storm(display, strikes, reach, lasts_s=lasts_s)
        return replace(run_job(job, display, storm, title="storm"), planned_faults=storm.planned_faults)


def _through(network: Network, groups: tuple[str, ...], training: Training) -> dict[str, dict[str, str]]:
    """Return each group's own flags, with the addresses at which the network carries what it says and hears."""
    return {
        group: {
            **training.own_flags.get(group, {}),
            "--coordinator": network.coordinator_of(group),
            "--host": network.host_of(group),
        }
        for group in groups
    }


def _run_alone(example: Example, training: Training, processes: Processes, display: Display) -> RunRecord:
    """Train undisturbed, in one process that computes all shards: by design the same bits, and quicker."""
    display.say("the same steps, undisturbed, in one process")
    alone = replace(training, trainer=example.trainer, takes_orders=False)
    job = Job("undisturbed", ("alone",), alone, coordinator=None, processes=processes)
    return run_job(job, display, Storm(display, ()), title="undisturbed run")
