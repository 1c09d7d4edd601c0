"""Places the strikes of a plan on a running job, one after the other.

A strike on members waits for its step, until its victims take part in the quorum, and until at least one other group
does too: the last group that holds the state is never killed. A strike on a group that is on its way back follows
upon the death that sent it there. The next strike is considered when all victims of the last are dead, so the order
of victims and phases is that of the plan on a machine of any speed; only the steps may come later. While strikes
come too late, the groups are told to take more time for each step, so that all kills fit into the job's steps.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxft._chaos._phases import ANY, STEP_PHASES
from jaxft._chaos._schedule import Strike, Victim
from jaxft._chaos._words import read_word, words_beside
from jaxft._launch._display import Display
from jaxft._launch._job import Incarnation, Job
from jaxft._launch._record import Kill

# How long a start takes until the first announced phase, before we have seen one.
FIRST_BOOT_S = 1.0
# How long a return takes, before we have seen one.
FIRST_RETURN_S = 5.0
# When the next death is overdue by so many steps, or the last victims are still away when all is done, each step is
# made longer, so that the returns that are still to come fit into the steps that are left: up to this, and in units
# coarse enough to send few orders.
LATE_STEPS = 10
MOST_PACE_S = 2.0
PACE_UNIT_S = 0.05


@dataclass(eq=False, slots=True)
class Doomed:
    """A victim whose death is on the way: by its own hand in the ordered phase, or by ours at a time."""

    victim: Victim
    strike: int
    incarnation: Incarnation
    kill_at_s: float | None = None
    sent_s: float | None = None


class Storm:
    """Watches a job, strikes by the plan, and launches every victim again at once."""

    def __init__(self, display: Display, strikes: Sequence[Strike]) -> None:
        self.planned_kills = sum(len(strike.victims) for strike in strikes)
        self._display = display
        self._waiting = deque(enumerate(strikes))
        self._doomed: list[Doomed] = []
        self._boot_s = FIRST_BOOT_S
        self._return_s = FIRST_RETURN_S
        self._away_since_s: dict[str, float] = {}
        self._due_step = 0
        self._pace_s = 0.0
        self._finished: set[str] = set()

    def tell(self, job: Job) -> None:
        """Say who is back, and who has finished."""
        for group in job.groups:
            incarnation = job.current(group)
            if group in self._away_since_s and incarnation.live:
                away_s = time.time() - self._away_since_s.pop(group)
                self._return_s = away_s
                self._display.say(
                    f"{group} is back after {away_s:.1f} s, at step {incarnation.steps[-1].step}"
                )
                self._learn_boot(incarnation)
            if incarnation.finished is not None and group not in self._finished:
                self._finished.add(group)
                self._display.say(f"{group} finished, digest {incarnation.finished.digest}")

    def strike(self, job: Job) -> None:
        """Do what is due."""
        for doomed in tuple(self._doomed):
            self._collect(doomed, job)
        for doomed in self._doomed:
            self._pursue(doomed, job)
        if not self._doomed and self._waiting and _may_fall(self._waiting[0][1], job):
            number, strike = self._waiting.popleft()
            self._due_step = strike.step
            self._doomed = [_doom(victim, number, job, self._boot_s) for victim in strike.victims]
        self._set_pace(job)

    def _set_pace(self, job: Job) -> None:
        left = len(self._doomed) + sum(len(strike.victims) for _, strike in self._waiting)
        next_step = self._due_step if self._doomed or not self._waiting else self._waiting[0][1].step
        late = job.committed_step > next_step + LATE_STEPS if left else bool(self._away_since_s)
        steps_left = max(1, job.training.steps - job.committed_step)
        units = math.ceil((left + 1) * self._return_s / steps_left / PACE_UNIT_S)
        pace_s = min(units * PACE_UNIT_S, MOST_PACE_S) if late else 0.0
        if pace_s != self._pace_s:
            self._pace_s = pace_s
            for group in job.groups:
                job.current(group).child.order(f"pace {pace_s}")

    def _collect(self, doomed: Doomed, job: Job) -> None:
        """Note a death that has come, and launch the victim again."""
        exit_code = doomed.incarnation.child.exit_code()
        if exit_code is None:
            return
        self._doomed.remove(doomed)
        if exit_code != -signal.SIGKILL:
            self._display.say(f"{doomed.victim.group} ended before it could be struck")
            return
        kill = _kill_of(doomed, job)
        job.note(kill)
        again = job.start(kill.group)
        again.order(f"pace {self._pace_s}")
        self._away_since_s[kill.group] = kill.t_s
        where = f"in {kill.phase}, step {kill.step}" if kill.phase in STEP_PHASES else f"in {kill.phase}"
        self._display.say(
            f"kill {len(job.kills)}: {kill.group} (pid {doomed.incarnation.child.pid}) {where}; "
            f"launched again (pid {again.pid})"
        )

    def _pursue(self, doomed: Doomed, job: Job) -> None:
        """Send the signals that are ours to send; give up on a phase of a return that did not come."""
        came_back = doomed.victim.phase not in (*STEP_PHASES, ANY) and doomed.incarnation.live
        if doomed.kill_at_s is None and came_back and others_at_work(job, (doomed.victim.group,)):
            doomed.kill_at_s = time.time()
        if doomed.kill_at_s is not None and doomed.sent_s is None and time.time() >= doomed.kill_at_s:
            doomed.sent_s = time.time()
            doomed.incarnation.child.kill()

    def _learn_boot(self, incarnation: Incarnation) -> None:
        word = read_word(words_beside(incarnation.events.path))
        if word is not None:
            self._boot_s = word.first_t_s - incarnation.launched_s


def members_at_work(job: Job) -> frozenset[str]:
    """Return the groups that took part in the newest step, in person and with the process that runs now."""
    current = [job.current(group) for group in job.groups]
    newest = max((i.steps[-1] for i in current if i.live), key=lambda event: event.step, default=None)
    return frozenset(
        i.group
        for i in current
        if newest is not None
        and i.live
        and i.group in newest.members
        and i.finished is None
        and i.child.exit_code() is None
    )


def others_at_work(job: Job, names: Sequence[str]) -> frozenset[str]:
    """Return the groups that would still hold the state if these died."""
    return members_at_work(job) - set(names)


def _may_fall(strike: Strike, job: Job) -> bool:
    names = [victim.group for victim in strike.victims]
    if strike.on_return and not job.current(names[0]).live:
        return True
    in_time = job.committed_step >= strike.step
    return in_time and members_at_work(job) >= set(names) and bool(others_at_work(job, names))


def _doom(victim: Victim, strike: int, job: Job, boot_s: float) -> Doomed:
    incarnation = job.current(victim.group)
    incarnation.doomed = True
    doomed = Doomed(victim, strike, incarnation)
    if victim.phase == "boot":
        doomed.kill_at_s = incarnation.launched_s + victim.depth * boot_s
    elif victim.phase == ANY:
        doomed.kill_at_s = time.time() + victim.depth * incarnation.steps[-1].seconds
    else:
        incarnation.child.order(f"die {victim.phase} {victim.depth}")
    return doomed


def _kill_of(doomed: Doomed, job: Job) -> Kill:
    """Return what is known of a death: where it really fell is what the victim's last word says."""
    incarnation = doomed.incarnation
    incarnation.read()
    word = read_word(words_beside(incarnation.events.path))
    phase = "boot" if word is None else word.phase
    own_t_s = None if word is None else word.dies_t_s
    t_s = own_t_s or doomed.sent_s
    return Kill(
        group=incarnation.group,
        incarnation=incarnation.number,
        t_s=time.time() if t_s is None else t_s,
        step=word.step if word is not None and phase in STEP_PHASES else job.committed_step,
        strike=doomed.strike,
        aim=doomed.victim.phase,
        phase=phase,
    )
