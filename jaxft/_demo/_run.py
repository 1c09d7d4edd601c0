"""One run of a job, from its launch to the end of its last process."""

import math
import time
from collections.abc import Sequence

from jaxft._demo._display import Display, GroupRow, View
from jaxft._demo._job import Incarnation, Job
from jaxft._demo._killer import Killer, Strike
from jaxft._demo._record import RunRecord, back_s, stall_s

# Also the precision of what is told live; the verdict uses the groups' own times.
POLL_S = 0.02
# No step for so long, though a cold start compiles for less: the job hangs.
SILENCE_TIMEOUT_S = 180.0


def run_job(
    job: Job,
    display: Display,
    *,
    title: str,
    strikes: Sequence[Strike] = (),
    silence_timeout_s: float = SILENCE_TIMEOUT_S,
) -> RunRecord:
    """Launch all groups, place the strikes, and return what happened once every group has ended.

    A group that fails of itself, or a job that hangs, ends the run at once: that is a problem in the record, and
    the end of the log of whoever failed is shown.
    """
    killer = Killer(strikes)
    narrator = Narrator(display)
    began_s = time.time()
    problems: list[str] = []
    for group in job.groups:
        display.say(f"launched {group} (pid {job.start(group).pid})")
    while not problems:
        job.read()
        display.show(view_of(job, title=title, planned_kills=len(strikes)))
        narrator.tell(job.record())
        if failed := job.failed():
            problems.append(failure_text(failed))
            display.say(failed.child.log_tail())
        elif job.over:
            break
        elif time.time() - max(began_s, job.last_event_t_s or 0.0) > silence_timeout_s:
            problems.append(f"the job hangs: no group reported a step for {silence_timeout_s:.0f} s")
            for group in job.groups:
                display.say(job.current(group).child.log_tail())
        elif strike := killer.due(time.monotonic(), job.full_step_s()):
            place(strike, job, display)
        time.sleep(POLL_S)
    job.end()
    narrator.tell(job.record())
    return job.record(planned_kills=len(strikes), problems=problems)


def place(strike: Strike, job: Job, display: Display) -> None:
    """Kill a group and launch it again at once; or do nothing if it has done all its work."""
    victim = job.current(strike.group)
    if victim.finished is not None or victim.child.exit_code() is not None:
        return
    kill = job.kill(strike.group)
    again = job.start(strike.group)
    display.say(
        f"killed {kill.group} (kill -9 {victim.child.pid}) after step {kill.step}; "
        f"launched it again (pid {again.pid})"
    )


class Narrator:
    """Says once what has become of each kill, and what each group ended with."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._told: set[tuple[str, int, str]] = set()

    def tell(self, record: RunRecord) -> None:
        """Say what is new in the record."""
        for kill in record.kills:
            key = (kill.group, kill.incarnation)
            stalled_s, returned_s = stall_s(kill, record.histories), back_s(kill, record.histories)
            if stalled_s is not None:
                self._once(*key, "stall", f"the others went on {stalled_s * 1000:.0f} ms after the kill")
            if returned_s is not None:
                self._once(
                    *key, "back", f"{kill.group} is back: contributes {returned_s:.1f} s after the kill"
                )
        for history in record.histories:
            if history.finished is not None:
                text = f"{history.group} finished {history.finished.step} steps, digest {history.finished.digest}"
                self._once(history.group, history.incarnation, "finished", text)

    def _once(self, group: str, incarnation: int, what: str, text: str) -> None:
        if (group, incarnation, what) not in self._told:
            self._told.add((group, incarnation, what))
            self._display.say(text)


def view_of(job: Job, *, title: str, planned_kills: int) -> View:
    """Return what there is to see of a job now."""
    current = [job.current(group) for group in job.groups]
    newest = max(
        (i.steps[-1] for i in current if i.steps), key=lambda event: (event.live, event.step), default=None
    )
    kills = sum(job.current(group).number for group in job.groups)
    return View(
        title=title,
        step=job.committed_step,
        planned_steps=job.training.steps,
        loss=None if newest is None else newest.loss,
        participating=0 if newest is None else len(newest.members),
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
    """Say how a process ended that should not have ended."""
    exit_code = failed.child.exit_code()
    if exit_code == 0:
        return f"{failed.child.name} ended before the job was finished"
    return f"{failed.child.name} (pid {failed.child.pid}) failed with exit status {exit_code}"
