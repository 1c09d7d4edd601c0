"""A kill under way: the victim kills itself in the ordered phase, or we kill it at a given time."""

import time

from jaxft._supervised._phase_file import read_word, words_beside
from jaxft_launch.processes._processes import KILLED
from jaxft_launch.storm._display import Display
from jaxft_launch.storm._faults import ANY, STEP_PHASES, Victim
from jaxft_launch.storm._job import Job
from jaxft_launch.storm._record import Kill
from jaxft_launch.supervise.core.values import Ending


class Death:
    """Kills a process of a group once. The supervisor restarts the group."""

    def __init__(self, victim: Victim, strike: int, job: Job, display: Display, *, boot_s: float) -> None:
        """Order the kill, or set its time. `boot_s`: the time from a start to the first announced phase."""
        self.kill: Kill | None = None
        self._job = job
        self._victim = victim
        self._strike = strike
        self._display = display
        self._incarnation = incarnation = job.current(victim.group)
        self._rank = incarnation.ranks[victim.rank]
        self._kill_at_s: float | None = None
        self._sent_s: float | None = None
        incarnation.doomed = True
        if victim.phase == "boot":
            self._kill_at_s = incarnation.launched_s + victim.depth * boot_s
        elif victim.phase == ANY:
            self._kill_at_s = time.time() + victim.depth * incarnation.steps[-1].seconds
        else:
            self._rank.child.order(f"die {victim.phase} {victim.depth}")

    @property
    def group(self) -> str:
        return self._victim.group

    def over(self) -> bool:
        """Record the death if it has happened; return whether the kill is over."""
        if self._incarnation.end is None:
            return False
        if not self._was_killed():
            self._display.say(f"{self.group} ended before it could be killed")
            return True
        self.kill = kill = self._kill_of()
        self._job.note(kill)
        where = f"in {kill.phase}, step {kill.step}" if kill.phase in STEP_PHASES else f"in {kill.phase}"
        rank = "" if self._job.nproc == 1 else f" rank {kill.rank}"
        self._display.say(
            f"kill {len(self._job.kills)}: {kill.group}{rank} (pid {self._rank.child.pid}) {where}"
        )
        return True

    def pursue(self) -> None:
        """Send our own signals when they are due; give up on a phase of a return that did not begin."""
        came_back = self._victim.phase not in (*STEP_PHASES, ANY) and self._incarnation.live
        if self._kill_at_s is None and came_back and self._job.others_at_work((self.group,)):
            self._kill_at_s = time.time()
        if self._kill_at_s is not None and self._sent_s is None and time.time() >= self._kill_at_s:
            self._sent_s = time.time()
            self._rank.child.kill()
        elif self._sent_s is None and self._has_killed_itself():
            # A shell around it may still run.
            self._sent_s = time.time()
            self._rank.child.kill()

    def _was_killed(self) -> bool:
        assert self._incarnation.end is not None
        if self._incarnation.end.ending == Ending.KILLED:
            return True
        # Another process, which ended because of this, was seen first, and the group ended with it.
        ordered = self._sent_s is not None or self._has_killed_itself()
        return ordered and self._rank.child.exit_code() in KILLED

    def _has_killed_itself(self) -> bool:
        word = read_word(words_beside(self._rank.files))
        return word is not None and word.dies_t_s is not None

    def _kill_of(self) -> Kill:
        """Return the facts about the death: the victim's phase file names the place where it really happened."""
        incarnation = self._incarnation
        incarnation.read()
        word = read_word(words_beside(self._rank.files))
        phase = "boot" if word is None else word.phase
        own_t_s = None if word is None else word.dies_t_s
        t_s = own_t_s or self._sent_s
        return Kill(
            group=incarnation.group,
            rank=self._victim.rank,
            incarnation=incarnation.number,
            t_s=time.time() if t_s is None else t_s,
            step=word.step if word is not None and phase in STEP_PHASES else self._job.committed_step,
            strike=self._strike,
            aim=self._victim.phase,
            phase=phase,
        )
