"""Carries out the demo's kills, and reports the outcome of each."""

import time
from collections.abc import Sequence

from jaxft_launch.storm._display import Display
from jaxft_launch.storm._job import Job
from jaxft_launch.storm._record import RunRecord, back_s, stall_s
from lab._killer import Killer, Strike


class DemoWatcher:
    """Kills groups by a plan, or only reports the job's progress if there is none."""

    def __init__(self, display: Display, strikes: Sequence[Strike] = ()) -> None:
        self.planned_kills = len(strikes)
        self._display = display
        self._killer = Killer(strikes)
        self._narrator = Narrator(display)

    def tell(self, job: Job) -> None:
        self._narrator.tell(job.record())

    def strike(self, job: Job) -> None:
        if strike := self._killer.due(time.monotonic(), job.full_step_s()):
            _place(strike, job, self._display)


def _place(strike: Strike, job: Job, display: Display) -> None:
    """Kill a group and restart it at once, or do nothing if it has finished."""
    victim = job.current(strike.group)
    if victim.finished is not None or victim.over:
        return
    kill = job.kill(strike.group, strike.rank)
    again = job.start(strike.group)
    rank = "" if job.nproc == 1 else f" rank {kill.rank}"
    display.say(
        f"killed {kill.group}{rank} (kill -9 {victim.ranks[kill.rank].child.pid}) after step {kill.step}; "
        f"restarted it (pid {again.pids})"
    )


class Narrator:
    """Reports once the outcome of each kill, and the final state of each group."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._told: set[tuple[str, int, str]] = set()

    def tell(self, record: RunRecord) -> None:
        """Report what is new in the record."""
        for kill in record.kills:
            key = (kill.group, kill.incarnation)
            stalled_s, returned_s = stall_s(kill, record.histories), back_s(kill, record.histories)
            if stalled_s is not None:
                self._once(*key, "stall", f"the others continued {stalled_s * 1000:.0f} ms after the kill")
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
