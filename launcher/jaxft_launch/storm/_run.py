"""One run of a job, from its launch to the end of its last process."""

import math
import time
from typing import Protocol

from jaxft_launch.storm._display import Display, GroupRow, View
from jaxft_launch.storm._job import Incarnation, Job
from jaxft_launch.storm._record import RunRecord

# Also the precision of the live output; the verdict uses the groups' own times.
POLL_S = 0.02
# The job hangs if there is no step for this long; a cold start compiles in less.
SILENCE_TIMEOUT_S = 180.0


class Watcher(Protocol):
    """Polls a job while it runs: reports news, and injects the planned faults."""

    @property
    def planned_kills(self) -> int: ...

    def tell(self, job: Job) -> None: ...

    def strike(self, job: Job) -> None: ...


def run_job(
    job: Job,
    display: Display,
    watcher: Watcher,
    *,
    title: str,
    silence_timeout_s: float = SILENCE_TIMEOUT_S,
    silence_advice: str = "",
) -> RunRecord:
    """Launch all groups, let the watcher strike, and return what happened once every group has ended.

    A group that fails by itself, or a job that hangs, ends the run at once. It becomes a problem in the record, and
    the end of the failed process's log is shown; `silence_advice` follows the words about a job that hangs. A group
    that returns once the job is over ends the run as well: the job was too short.
    """
    began_s = time.time()
    problems: list[str] = []
    too_short = ""
    for group in job.groups:
        display.say(f"launched {group} (pid {job.start(group).pids})")
    for group, problem in job.cold.items():
        display.say(f"{group} has no warm process: {problem}")
    while not problems:
        job.read()
        display.show(view_of(job, title=title, planned_kills=watcher.planned_kills))
        watcher.tell(job)
        if failed := job.failed():
            display.say(failed.failing.log_tail())
            if failed.status == 0 and job.committed_step == job.program.steps:
                too_short = (
                    f"{failed.failing.name} returned only after the job was over; give the job more steps"
                )
                break
            problems.append(failure_text(failed))
        elif job.over:
            break
        elif time.time() - max(began_s, job.last_event_t_s or 0.0) > silence_timeout_s:
            problems.append(
                f"the job hangs: no group reported a step for {silence_timeout_s:.0f} s{silence_advice}"
            )
            for group in job.groups:
                display.say(job.current(group).child.log_tail())
        else:
            watcher.strike(job)
        time.sleep(POLL_S)
    job.end()
    watcher.tell(job)
    return job.record(planned_kills=watcher.planned_kills, problems=problems, too_short=too_short)


def view_of(job: Job, *, title: str, planned_kills: int) -> View:
    """Return the current view of a job."""
    current = [job.current(group) for group in job.groups]
    newest = max(
        (i.steps[-1] for i in current if i.steps), key=lambda event: (event.live, event.step), default=None
    )
    kills = sum(job.current(group).number for group in job.groups)
    return View(
        title=title,
        step=job.committed_step,
        planned_steps=job.program.steps,
        loss=None if newest is None else newest.loss,
        participating=0 if newest is None else len(newest.members or current),
        quorum_id=None if newest is None else newest.quorum_id,
        kills=kills,
        planned_kills=planned_kills,
        rows=tuple(row_of(incarnation) for incarnation in current),
    )


def row_of(incarnation: Incarnation) -> GroupRow:
    """Return a group's line of the table."""
    event = incarnation.steps[-1] if incarnation.steps else None
    if incarnation.finished is not None:
        state = "finished"
    elif event is not None:
        state = "training" if event.live else "caught up"
    else:
        state = "starting" if incarnation.number == 0 else "coming back"
    return GroupRow(
        group=incarnation.group,
        pid=incarnation.child.pid,
        launches=incarnation.number + 1,
        state=state,
        step=0 if event is None else event.step,
        loss=None if event is None or math.isnan(event.loss) else event.loss,
        shards=() if event is None else event.shards,
        step_s=event.seconds if event is not None and event.live else None,
    )


def failure_text(failed: Incarnation) -> str:
    """Return how a process ended that should not have."""
    child, status = failed.failing, failed.status
    if status == 0:
        return f"{child.name} ended before the job was finished"
    return f"{child.name} (pid {child.pid}) failed with exit status {status}"
