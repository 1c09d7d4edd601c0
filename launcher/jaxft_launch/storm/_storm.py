"""Carries out the strikes of a plan on a running job, one after the other.

A strike on members waits for its step, for its victims to take part in the quorum, and for at least one other group
to take part too: the last group that holds the state is never killed. A strike on a returning group follows right
after the death that made it return. The next strike waits until all victims of the last one are dead, and its other
faults have ended. So victims and phases have the plan's order on a machine of any speed; only the steps
may be later. While strikes are overdue, the groups are ordered to take more time for each step, so that all faults
fit into the job's steps. In a storm with a set duration, the steps are stretched to fill it; if it is only meant for
the faults, until the last victim is back.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxft._supervised._phase_file import read_word, words_beside
from jaxft_launch.storm._display import Display
from jaxft_launch.storm._faults import COORDINATOR, FaultKind, Victim
from jaxft_launch.storm._harms import Corruption, Harm, Reach, begin
from jaxft_launch.storm._job import Incarnation, Job
from jaxft_launch.storm._kills import Death
from jaxft_launch.storm._schedule import Strike

# How long a start takes until the first announced phase, before we have seen one.
FIRST_BOOT_S = 1.0
# How long a return takes, before we have seen one.
FIRST_RETURN_S = 5.0
# If the next death is overdue by this many steps, or the last victims are still away after the last strike, steps are
# made longer so that the missing returns fit into the remaining steps: up to this limit, and in units coarse enough
# to send few orders.
LATE_STEPS = 10
MOST_PACE_S = 2.0
PACE_UNIT_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long a storm and its parts take.

    Attributes:
        lasts_s: how long the storm should last, if steps are made longer for it.
        to_the_end: whether it should also last that long if all victims are back earlier.
        return_s: how long the first return is expected to take.
        most_pace_s: by how much a step may be made longer.
        silence_s: the job hangs if no group commits a step for this long; a cold start compiles in less.
    """

    lasts_s: float | None = None
    to_the_end: bool = True
    return_s: float = FIRST_RETURN_S
    most_pace_s: float = MOST_PACE_S
    silence_s: float = 180.0


class Storm:
    """Watches a job and strikes as planned. The job's supervisor restarts the victims."""

    def __init__(
        self,
        display: Display,
        strikes: Sequence[Strike],
        reach: Reach | None = None,
        times: Times | None = None,
    ) -> None:
        """Follow a plan. Faults of the network and of the coordinator go through `reach`."""
        victims = [victim for strike in strikes for victim in strike.victims]
        self.planned_kills = sum(victim.kind is FaultKind.KILL for victim in victims)
        self.planned_faults = len(victims) - self.planned_kills
        self.undamaged = 0
        self._display = display
        self._reach = reach or Reach()
        self.times = times or Times()
        self._began_s: float | None = None
        self._waiting = deque(enumerate(strikes))
        self._under_way: list[Death | Harm] = []
        self._boot_s = FIRST_BOOT_S
        self._return_s = self.times.return_s
        self._away_since_s: dict[str, float] = {}
        self._due_step = 0
        self._pace_s = 0.0
        self._finished: set[str] = set()
        self._fallen: set[tuple[str, int]] = set()

    def tell(self, job: Job) -> None:
        """Report which groups are back, and which have finished."""
        at_work = job.members_at_work()
        for group in job.groups:
            incarnation = job.current(group)
            if group in self._away_since_s and group in at_work:
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
        """Perform due actions."""
        for harm in tuple(self._under_way):
            if harm.over():
                self._under_way.remove(harm)
                self._see_off(harm, job)
        for harm in self._under_way:
            harm.pursue()
        self._note_the_fallen(job)
        if not self._under_way and self._waiting and _may_fall(self._waiting[0][1], job):
            number, strike = self._waiting.popleft()
            self._due_step = strike.step
            self._under_way = [self._begin(victim, number, job) for victim in strike.victims]
        self._set_pace(job)

    def _begin(self, victim: Victim, strike: int, job: Job) -> Death | Harm:
        if victim.kind is FaultKind.KILL:
            return Death(victim, strike, job, self._display, boot_s=self._boot_s)
        return begin(victim, strike, job, self._display, self._reach)

    def _see_off(self, harm: Death | Harm, job: Job) -> None:
        """Record which groups are away, and since when; count the corruptions that found nothing to damage."""
        if isinstance(harm, Corruption) and harm.found_nothing:
            self.undamaged += 1
        if isinstance(harm, Death):
            if harm.kill is None:
                return
            self._away_since_s[harm.group] = harm.kill.t_s
        elif harm.group != COORDINATOR and harm.group not in job.members_at_work():
            self._away_since_s.setdefault(harm.group, time.time())

    def _note_the_fallen(self, job: Job) -> None:
        """Note which groups of several processes a stop has ended."""
        for group in job.groups:
            incarnation = job.current(group)
            if incarnation.frozen and incarnation.fell and (group, incarnation.number) not in self._fallen:
                self._fallen.add((group, incarnation.number))
                self._away_since_s.setdefault(group, time.time())
                self._display.say(f"{group} has ended, because a rank was silent")

    def _set_pace(self, job: Job) -> None:
        pace_s = max(self._pace_for_the_late(job), self._pace_for_the_time(job))
        self._pace_s = pace_s
        for group in job.groups:
            incarnation = job.current(group)
            if incarnation.pace_s != pace_s and not incarnation.over:
                incarnation.pace_s = pace_s
                incarnation.order(f"pace {pace_s}")

    def _pace_for_the_late(self, job: Job) -> float:
        left = len(self._under_way) + sum(len(strike.victims) for _, strike in self._waiting)
        next_step = self._due_step if self._under_way or not self._waiting else self._waiting[0][1].step
        late = job.committed_step > next_step + LATE_STEPS if left else bool(self._away_since_s)
        return self._in_units((left + 1) * self._return_s / _steps_left(job)) if late else 0.0

    def _pace_for_the_time(self, job: Job) -> float:
        """Return how much longer each step must take for the storm to last as long as it should."""
        lasts_s = self.times.lasts_s
        if lasts_s is None or (self._is_done and not self.times.to_the_end):
            return 0.0
        if job.committed_step == 0:  # quick steps would end before they could be made longer
            return self._in_units(lasts_s / _steps_left(job))
        now_s = time.time()
        if self._began_s is None:
            self._began_s = now_s
        left_s = self._began_s + lasts_s - now_s
        newest = [job.current(group).steps[-1] for group in job.groups if job.current(group).live]
        # A step's time without the pace, which is part of the measurement.
        own_s = max(0.0, min((event.seconds for event in newest), default=0.0) - self._pace_s)
        return self._in_units(max(0.0, left_s / _steps_left(job) - own_s))

    @property
    def _is_done(self) -> bool:
        """Whether all faults are over, and all victims are back."""
        return not (self._waiting or self._under_way or self._away_since_s)

    def _in_units(self, pace_s: float) -> float:
        return min(math.ceil(pace_s / PACE_UNIT_S) * PACE_UNIT_S, self.times.most_pace_s)

    def _learn_boot(self, incarnation: Incarnation) -> None:
        word = read_word(words_beside(incarnation.events.path))
        if word is not None:
            self._boot_s = word.first_t_s - incarnation.launched_s


def _steps_left(job: Job) -> int:
    assert job.program.steps is not None
    return max(1, job.program.steps - job.committed_step)


def _may_fall(strike: Strike, job: Job) -> bool:
    hit = [name for v in strike.victims for name in (v.group, v.other) if name in job.groups]
    if strike.on_return and not job.current(hit[0]).live:
        return not job.current(hit[0]).over  # it has been restarted
    in_time = job.committed_step >= strike.step
    killed = [victim.group for victim in strike.victims if victim.kind is FaultKind.KILL or not victim.other]
    return in_time and job.members_at_work() >= set(hit) and bool(job.others_at_work(killed))
