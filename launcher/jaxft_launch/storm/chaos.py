"""The command `jaxft chaos`: a storm of faults over any program that trains with jaxft, and a verdict.

The program runs at most three times, each time with a separate coordinator: undisturbed in one group; in several
groups under the storm; and, if the results differ, undisturbed again, to tell a program that is not deterministic
from a storm that changed the result. An agent in the library (`_agent`) reports steps and carries out orders.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from jaxft_launch.processes._checks import LaunchError, check_command, check_installed
from jaxft_launch.processes._coordinator import COORDINATOR, Coordinator
from jaxft_launch.processes._processes import Processes
from jaxft_launch.storm._display import Display
from jaxft_launch.storm._faults import SHIPPED
from jaxft_launch.storm._job import Place, Program
from jaxft_launch.storm._options import StormOptions
from jaxft_launch.storm._record import RunRecord
from jaxft_launch.storm._runs import (
    conclude,
    failure_text,
    job_of,
    run_folder,
    run_job,
    run_storm,
    signals_as_exit,
)
from jaxft_launch.storm._storm import MOST_PACE_S, Storm, Times
from jaxft_launch.storm._verdict import Verdict, first_difference, judge, s_per_step_of

# The time for a fault and the return of its victim, at least.
FAULT_S = 10.0
# A victim starts and compiles while other groups train, so it may take this many times as long as undisturbed.
BOOTS = 2.0
# So much of the time in which a failure must be noticed may be added to each step, if that is more than usual.
PACE_SHARE = 1 / 12
# This share of the steps remains after the last strike, for the last victims to return.
TAIL_SHARE = 1 / 3
# Long enough for any plan: used to reject impossible plans before anything is started.
ANY_STEP = 10**6
# An undisturbed program that commits no step for this long hangs: large models compile for minutes.
UNDISTURBED_SILENCE_S = 1800.0
# Under the storm, a job hangs if no step is committed in this many times the time to the first undisturbed step.
SILENT_BOOTS = 5.0


@dataclass(frozen=True, kw_only=True)
class ChaosOptions(StormOptions):
    """Kill -9 the replica groups of your own training by a seeded plan, or inject other faults, and compare the final
    state with an undisturbed run's.

    Everything after two dashes is the program: jaxft chaos --kills 6 -- python my_train.py. It runs once in one
    group, then in several. --nproc is the number of processes of a group, as with jaxft launch. It takes the
    coordinator and its group from the environment: leave both out of jaxft.Manager(...), or pass it {coordinator}
    and {group}. {folder} is a separate folder for each run, for checkpoints.

    Exit status 0 if every fault was placed, no step was lost and all final states are equal, bit for bit; 1 if not.
    """


def run_chaos(
    options: ChaosOptions, words: Sequence[str], *, coordinator: tuple[str, ...] = COORDINATOR
) -> int:
    """Run the program with and without a storm, and print the verdict; return the exit status.

    Raises:
        LaunchError: it cannot run here, there is no such plan, or the undisturbed program does not finish.
    """
    check_command(words, command="jaxft chaos")
    check_installed(("jaxft_coordinator",), remedy="pip install jaxft-coordinator")
    options.plan(last_step=ANY_STEP)
    with signals_as_exit(), run_folder(options.keep, name="jaxft-chaos-") as folder:
        display = Display(sys.stdout, name="jaxft chaos")
        with display, Processes(folder, cwd=Path.cwd()) as processes:
            place = Place(processes, display, options.nproc)
            runs = _Runs(options, tuple(words), coordinator, place)
            record, verdict = runs.compare()
    return conclude(options, verdict, record)


@dataclass(frozen=True)
class _Runs:
    """The runs of one program."""

    options: ChaosOptions
    words: tuple[str, ...]
    coordinator: tuple[str, ...]
    place: Place

    @property
    def processes(self) -> Processes:
        return self.place.processes

    @property
    def display(self) -> Display:
        return self.place.display

    def compare(self) -> tuple[RunRecord, Verdict]:
        """Run the program undisturbed and under the storm; return the record of the storm, and the verdict."""
        self.display.say(f"logs in {self.processes.folder}")
        undisturbed, boot_s = self._undisturbed("undisturbed")
        if undisturbed.problems:
            raise LaunchError(f"The program fails without a storm: {'; '.join(undisturbed.problems)}.")
        record = self._storm(undisturbed, boot_s)
        verdict = judge(record, undisturbed)
        # Without a step, it may have found the checkpoint of an earlier run, as it would once more.
        if record.committed_steps and not verdict.differs:
            return record, verdict
        found = self._is_deterministic(undisturbed)
        return record, replace(verdict, problems=(*verdict.problems, found))

    def _undisturbed(self, name: str) -> tuple[RunRecord, float]:
        """Run the program to its end, in one group; return the record, and how many seconds the first step took.

        Raises:
            LaunchError: it did not train with jaxft, or continued an earlier run.
        """
        self.display.say(f"the program, {name}, in one group")
        coordinator = Coordinator(self.processes, self.coordinator, name=f"{name}.coordinator")
        program = Program(words=self.words, takes_orders=True)
        with job_of(name, ("group-0",), program, self.place, coordinator=coordinator) as job:
            storm = Storm(self.display, (), times=Times(silence_s=UNDISTURBED_SILENCE_S))
            record = run_job(job, self.display, storm, title=name)
        self.processes.end([coordinator.child])
        first = job.current("group-0")
        # A program that we ended because it was silent may end with status 0 too.
        ended_itself = first.end is not None and record.problems in ((), (failure_text(first),))
        if ended_itself and first.status == 0 and not record.committed_steps:
            raise LaunchError(
                "The program ended without a step of jaxft, so there is nothing to disturb. Does it enter "
                "`with jaxft.Manager() as manager:` and call its step there? Or did it find "
                "the checkpoint of an earlier run? Then pass it {folder} in its command: "
                "a separate folder for each run."
            )
        _check_one_job(record)
        _check_fresh(record)
        return record, first.steps[0].t_s - first.launched_s if first.steps else 0.0

    def _storm(self, undisturbed: RunRecord, boot_s: float) -> RunRecord:
        options, steps = self.options, undisturbed.planned_steps
        strikes = options.plan(last_step=steps - round(TAIL_SHARE * steps))
        flags = options.coordinator_flags(self.processes.folder / "coordinator")
        coordinator = Coordinator(self.processes, (*self.coordinator, *flags))
        return_s = max(FAULT_S, BOOTS * boot_s)
        lasts_s = return_s * options.kills
        most_pace_s = max(MOST_PACE_S, PACE_SHARE * SHIPPED.failure_s)
        own_s = s_per_step_of(undisturbed) or 0.0
        if few := few_steps_text(steps, own_s=own_s, most_pace_s=most_pace_s, lasts_s=lasts_s):
            self.display.say(few)
        slowed = slowed_text(steps, own_s=own_s, most_pace_s=most_pace_s, lasts_s=lasts_s)
        self.display.say(
            f"the same {steps} steps in {options.groups} groups, {options.kills} {options.what}, "
            f"--seed {options.seed}{slowed}"
        )
        times = Times(
            lasts_s=lasts_s,
            to_the_end=False,
            return_s=return_s,
            most_pace_s=most_pace_s,
            silence_s=max(Times().silence_s, SILENT_BOOTS * boot_s),
        )
        program = Program(words=self.words, steps=steps, takes_orders=True)
        record = run_storm(options.group_names, program, strikes, coordinator, self.place, times)
        self.processes.end([coordinator.child])
        _check_fresh(record)
        return record

    def _is_deterministic(self, first: RunRecord) -> str:
        """Run the program undisturbed again; return the conclusion about the storm."""
        second, _ = self._undisturbed("undisturbed-again")
        if second.problems:
            return f"the program failed when it ran undisturbed again: {'; '.join(second.problems)}"
        step = first_difference(first, second)
        if step is None and first.planned_steps == second.planned_steps:
            return "two undisturbed runs of the program are equal, so the difference comes from the storm"
        where = (
            f"{first.planned_steps} and {second.planned_steps} steps"
            if step is None
            else f"their states differ from step {step} on"
        )
        return (
            f"the program is not deterministic: it ran undisturbed twice, and {where}. Fix its seeds, its order of "
            "data and its kernels first (docs/guarantees.md has the conditions)"
        )


def _check_one_job(record: RunRecord) -> None:
    """Raise LaunchError if a program that ran undisturbed trained more than one job, as its step numbers show."""
    for history in record.histories:
        for one, next_one in pairwise(history.steps):
            if next_one.step <= one.step:
                raise LaunchError(
                    f"The program has several jobs: its steps begin again at {next_one.step} after step {one.step}. "
                    "`jaxft chaos` compares the steps of one job: run it with the part of the program that trains "
                    "one job, with one jaxft.Manager(...)."
                )


def _check_fresh(record: RunRecord) -> None:
    first = min(record.committed_steps, default=1)
    if first != 1:
        raise LaunchError(
            f"The first step of the program was {first} and not 1: it continued from a checkpoint of an earlier run. "
            "Pass it {folder} in its command: a separate folder for each run."
        )


def few_steps_text(steps: int, *, own_s: float, most_pace_s: float, lasts_s: float) -> str:
    """Return a warning if the steps, as long as they can be made, are over before the faults; otherwise "".

    `own_s` is the time of an undisturbed step, and `most_pace_s` by how much it may be made longer.
    """
    longest_s = own_s + most_pace_s
    if steps * longest_s >= lasts_s:
        return ""
    return (
        f"{steps} steps are few for {lasts_s:.0f} s of faults, since each takes {own_s:.1f} s and is made "
        f"{most_pace_s:g} s longer at most: a victim may return too late. Give the program "
        f"{math.ceil(lasts_s / longest_s)} steps or more, or pass fewer --kills"
    )


def slowed_text(steps: int, *, own_s: float, most_pace_s: float, lasts_s: float) -> str:
    """Return why steps are slowed down; "" if they need not be, or if even that is not enough."""
    if not steps * own_s < lasts_s <= steps * (own_s + most_pace_s):
        return ""
    return f"; steps are slowed down so that the faults have {lasts_s:.0f} s"
