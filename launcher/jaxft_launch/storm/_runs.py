"""The two runs of a storm, their surroundings, and the final report."""

import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from jaxft_launch.processes._checks import check_new_folder
from jaxft_launch.processes._coordinator import Coordinator
from jaxft_launch.processes._processes import Processes
from jaxft_launch.storm._display import Display, View
from jaxft_launch.storm._faults import COORDINATOR
from jaxft_launch.storm._harms import Reach
from jaxft_launch.storm._job import Doors, Incarnation, Job, Place, Program
from jaxft_launch.storm._network import Network
from jaxft_launch.storm._options import StormOptions
from jaxft_launch.storm._record import RunRecord
from jaxft_launch.storm._report import storm_json, storm_text
from jaxft_launch.storm._schedule import Strike
from jaxft_launch.storm._storm import Storm, Times
from jaxft_launch.storm._verdict import Verdict

# Also the precision of the live output; the verdict uses the groups' own times.
POLL_S = 0.02
# The verdict, in the folder of --keep.
VERDICT = "verdict.json"
# Until all groups run: each waits for its warm process.
START_TIMEOUT_S = 1800.0


def run_storm(
    groups: Sequence[str],
    program: Program,
    strikes: Sequence[Strike],
    coordinator: Coordinator,
    place: Place,
    times: Times,
) -> RunRecord:
    """Train under the storm, through the fault-injecting network if a fault needs it."""
    network: Network | None = None
    job: Job

    def where(name: str) -> int | None:
        if name == COORDINATOR:
            return coordinator.port
        return job.port_of(name)

    with contextlib.ExitStack() as stack:
        if any(victim.kind.on_the_network for strike in strikes for victim in strike.victims):
            network = stack.enter_context(Network(groups, where))
        job = stack.enter_context(
            job_of("storm", groups, program, place, coordinator=coordinator, doors=network)
        )
        storm = Storm(place.display, strikes, Reach(network=network, coordinator=coordinator), times)
        record = run_job(job, place.display, storm, title="storm")
        return replace(record, planned_faults=storm.planned_faults, undamaged=storm.undamaged)


@contextlib.contextmanager
def job_of(
    name: str,
    groups: Sequence[str],
    program: Program,
    place: Place,
    *,
    coordinator: Coordinator | None = None,
    doors: Doors | None = None,
) -> Iterator[Job]:
    """Yield a job whose processes have a separate folder beneath the folder of `place`."""
    folder = place.processes.folder / name
    folder.mkdir()
    with Processes(folder, cwd=place.processes.cwd) as own:
        yield Job(name, groups, program, replace(place, processes=own), coordinator=coordinator, doors=doors)


def conclude(options: StormOptions, verdict: Verdict, record: RunRecord) -> int:
    """Print the verdict of a storm, and write it to the folder that is kept; return the exit status."""
    text = storm_text(verdict, record, seed=options.seed)
    return report(options, verdict, text=text, result=storm_json(verdict, record, seed=options.seed))


def report(options: StormOptions, verdict: Verdict, *, text: str, result: Mapping[str, Any]) -> int:
    """Print a verdict, and write it to the folder that is kept; return the exit status."""
    sys.stdout.write(f"\n{text}\n")
    if options.keep is None and not (verdict.ok or verdict.incomplete):
        sys.stdout.write(
            f"To investigate, run the same command with --seed {options.seed} --keep FOLDER, which keeps all "
            "logs and event files.\n"
        )
    if options.keep is not None:
        (options.keep / VERDICT).write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    return 0 if verdict.ok else 1


def run_job(job: Job, display: Display, storm: Storm, *, title: str) -> RunRecord:
    """Run all groups, let the storm strike, and return what happened once every group has ended.

    A group that fails by itself, or a job that hangs, ends the run at once. It becomes a problem in the record, and
    the end of the failed process's log is shown. A group that is away when the job is over ends the run as well: the
    job was too short.
    """
    end = _await_start(job)
    began_s = time.time()
    while end is None:
        job.poll()
        display.show(view_of(job, title=title))
        storm.tell(job)
        end = _end_of(job, display, began_s, storm.times.silence_s)
        if end is None:
            storm.strike(job)
        time.sleep(POLL_S)
    job.end()
    if job.has_begun:
        storm.tell(job)
    return job.record(planned_kills=storm.planned_kills, problems=end.problems, too_short=end.too_short)


@dataclass(frozen=True)
class _End:
    """Why a run is over: all groups have finished, a problem, or steps that were too few."""

    problems: tuple[str, ...] = ()
    too_short: str = ""


def _await_start(job: Job) -> _End | None:
    """Wait until all groups run, before the job's clock starts: on a busy machine, warm processes need minutes."""
    begun_s = time.time()
    while True:
        job.poll()
        if job.has_begun:
            return None
        if time.time() - begun_s > START_TIMEOUT_S:
            return _End((f"not all groups were started within {START_TIMEOUT_S:.0f} s",))
        time.sleep(POLL_S)


def _end_of(job: Job, display: Display, began_s: float, silence_s: float) -> _End | None:
    """Return why a run is over now; None if it is not."""
    if failed := job.failed():
        display.say(failed.failing.log_tail())
        if failed.status == 0 and job.committed_step == job.program.steps:
            name = failed.failing.name
            return _End(too_short=f"{name} returned only after the job was over; give the job more steps")
        return _End((failure_text(failed),))
    if job.over:
        away = ", ".join(job.absent())
        return _End(
            too_short=f"{away} was away when the job was over; give the job more steps" if away else ""
        )
    if time.time() - max(began_s, job.last_event_t_s or 0.0) > silence_s:
        for group in job.groups:
            display.say(job.current(group).child.log_tail())
        return _End((f"the job hangs: no group reported a step for {silence_s:.0f} s",))
    return None


def view_of(job: Job, *, title: str) -> View:
    """Return the current view of a job."""
    current = [job.current(group) for group in job.groups]
    newest = max(
        (i.steps[-1] for i in current if i.steps), key=lambda event: (event.live, event.step), default=None
    )
    return View(
        title=title,
        step=job.committed_step,
        planned_steps=job.program.steps,
        loss=None if newest is None else newest.loss,
        participating=0 if newest is None else len(newest.members or current),
        groups=len(current),
        quorum_id=None if newest is None else newest.quorum_id,
    )


def failure_text(failed: Incarnation) -> str:
    """Return how a process ended that should not have."""
    child, status = failed.failing, failed.status
    if status == 0:
        return f"{child.name} ended before the job was finished"
    return f"{child.name} (pid {child.pid}) failed with exit status {status}"


@contextlib.contextmanager
def run_folder(keep: Path | None, *, name: str) -> Iterator[Path]:
    """Yield the folder for logs and event files: a new folder that is kept, or a temporary folder.

    Raises:
        LaunchError: `keep` exists and is not an empty folder.
    """
    if keep is not None:
        check_new_folder(keep)
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix=name) as folder:
        yield Path(folder)


@contextlib.contextmanager
def signals_as_exit() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C: leave every `with` block, to end processes and remove files."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    # While a parent's choice to ignore it is inherited, the kernel keeps no exit status: all of them would be 0.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
