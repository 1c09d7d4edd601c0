"""One life of a group: its processes, which share one fate."""

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxft._supervised._announcements import WAIT
from jaxft._supervised._phase_file import DRAINED, LATE, STRANDED, read_word
from jaxft_launch.processes._fate import LAST_WORDS_S, Fate
from jaxft_launch.processes._processes import REAP_TIMEOUT_S, REST_TIMEOUT_S, Child, Processes
from jaxft_launch.processes._ranks import Member, start_ranks
from jaxft_launch.processes._statuses import Ending
from jaxft_launch.processes._warm import Warm, with_statuses
from jaxft_launch.supervise._deadlines import END, WAITS, Overdue, Sign, overdue

PHASE_FILE = "JAXFT_PHASE_FILE"


@dataclass(slots=True)
class RankProcess:
    """A process of a group, and the file with its phase."""

    rank: int
    child: Child
    phase_file: Path
    _told: Sign | None = None
    _seen: tuple[Sign, Sign] | None = None  # the last sign, and the same with our own times

    def sign(self) -> Sign | None:
        """Return its last sign of life; None if it has given none."""
        word = read_word(self.phase_file)
        if word is None:
            return self._told
        with contextlib.suppress(OSError):  # removed since
            self._told = Sign(
                phase=word.phase,
                step=word.step,
                since_t_s=word.t_s,
                alive_t_s=self.phase_file.stat().st_mtime,
                members=word.members,
                committed=word.committed,
            )
        return self._told

    def seen(self, now_s: float) -> Sign | None:
        """Return its last sign of life, with the times at which this launcher first saw its phase and its time."""
        told = self.sign()
        if told is None:
            return None
        since_s = alive_s = now_s
        if self._seen is not None:
            before, seen = self._seen
            since_s = seen.since_t_s if before.since_t_s == told.since_t_s else now_s
            alive_s = seen.alive_t_s if before.alive_t_s == told.alive_t_s else now_s
        seen = replace(told, since_t_s=since_s, alive_t_s=alive_s)
        self._seen = told, seen
        return seen


class Life:
    """The processes of one life of a group. A process that exceeds a deadline counts as failed."""

    def __init__(
        self,
        member: Member,
        number: int,
        command: Sequence[str],
        processes: Processes,
        *,
        warm: Warm | None,
        phases: Path,
    ) -> None:
        """Start them. `phases`: a folder on this machine for the phase files."""
        self.member = member
        self.number = number
        self.started_s = time.monotonic()
        self._first_end_s: float | None = None
        self._kill_rest_at_s: float | None = None
        self._rest_leaves_until_s = 0.0
        self._rest_gone_by_s: float | None = None  # from its kill on
        self.overdue: Overdue | None = None
        self.step = 0
        self.committed = 0  # the steps behind the last one that it took part in, unlike one that it healed to
        self.members = 0  # of the job, in the last step that it took part in; 0 while it waits for others
        self._drained = False
        self.late = False  # the job was finished without it
        self.stranded = False  # it finds no group that holds the job's state
        self.has_begun = False  # it does more than wait for the job, or has waited for long
        self.joined = False  # a process has called `join` or a step
        name = f"{member.name}.{number}"
        files = [phases / f"{name}.{rank}.phase" for rank in member.ranks_here]
        commands = [fill(command, member, rank=rank, folder=processes.folder) for rank in member.ranks_here]
        if warm is None:
            commands = [with_statuses(one) for one in commands]
        # What clears temporary folders may have removed it.
        phases.mkdir(mode=0o700, parents=True, exist_ok=True)
        children = start_ranks(
            member,
            commands,
            processes,
            name=name,
            warm=warm,
            own=[{PHASE_FILE: str(file)} for file in files],
        )
        ranks = zip(member.ranks_here, children, files, strict=True)
        self.ranks = [RankProcess(rank, child, file) for rank, child, file in ranks]
        self._fate = Fate(children)

    @property
    def over(self) -> bool:
        """Whether all processes have ended."""
        return self._fate.over

    @property
    def untold(self) -> bool:
        """Whether it was killed, and the ends of forks are still to be told by their warm process: that hangs."""
        forks = any(one.child.warm and one.child.exit_code() is None for one in self.ranks)
        return forks and time.monotonic() - self._fate.killed_s > REAP_TIMEOUT_S

    @property
    def failed(self) -> RankProcess | None:
        """The first process that ended with another status than 0, or exceeded a deadline.

        If another is seen later that is the reason for its end, that one.
        """
        return None if self._fate.failed is None else self.ranks[self._fate.failed]

    @property
    def settled(self) -> bool:
        """Whether `failed` is the reason for the end of this life, and stays as it is."""
        return self._fate.settled

    @property
    def warm(self) -> bool:
        return all(one.child.warm for one in self.ranks)

    def result(self) -> tuple[Ending, int]:
        """Return how it ended, and the exit status that says so. Call it once it is over."""
        killed_by_us = self._fate.killed and self._fate.failed is None
        if self.overdue is not None or killed_by_us:
            return Ending.KILLED, -signal.SIGKILL
        ending, status = self._fate.result()
        return (Ending.DRAINED if ending is Ending.DONE and self._drained else ending), status

    def watch(self, *, fate: bool) -> None:
        """See which processes have ended. With `fate`, one that failed ends the others."""
        self._fate.watch(shared=fate)

    def note_signs(self) -> None:
        """Note what the last signs of life of all processes say of the group."""
        told = [sign for one in self.ranks if (sign := one.sign()) is not None]
        self.step = max([self.step, *(sign.step for sign in told)])
        self.committed = max([self.committed, *(sign.committed for sign in told)])
        # One that waits for others may wait for those that were there in the last step.
        self.members = max((sign.members for sign in told if sign.phase not in WAITS), default=0)
        self._drained = any(sign.phase == DRAINED for sign in told)
        self.late = any(sign.phase == LATE for sign in told)
        self.stranded = any(sign.phase == STRANDED for sign in told)
        self.has_begun = self.has_begun or any(sign.phase != WAIT for sign in told)
        self.joined = self.joined or bool(told)

    def supervise(self, deadlines: Mapping[str, float]) -> None:
        """End the group if one of its processes has exceeded a deadline.

        All of them say first where they stand: that one may wait for another, which looks the same from here.
        """
        now_s = time.monotonic()
        if self.failed is not None:
            return
        self.note_signs()
        if self._first_end_s is None and self._fate.statuses:
            self._first_end_s = now_s
        for index, one in enumerate(self.ranks):
            late = None if one.child.exit_code() is not None else self._late(one, now_s, deadlines)
            if late is not None:
                self.overdue = late
                for each in self.ranks:
                    each.child.say_where()
                self._fate.fail(index, within_s=LAST_WORDS_S)
                return

    def _late(self, one: RankProcess, now_s: float, deadlines: Mapping[str, float]) -> Overdue | None:
        if late := overdue(one.seen(now_s), started_t_s=self.started_s, now_t_s=now_s, deadlines=deadlines):
            return late
        lasted_s = 0.0 if self._first_end_s is None else now_s - self._first_end_s
        return Overdue(END, self.step, lasted_s, deadlines[END]) if lasted_s > deadlines[END] else None

    def terminate(self, *, within_s: float) -> None:
        """Send SIGTERM to all, and to what they have started, if that may be the program.

        That has as long to end: a shell around a program ends at once, while the program finishes its step.
        """
        if any(one.child.exit_code() is None for one in self.ranks):  # or SIGTERM reaches nothing
            self._rest_leaves_until_s = time.monotonic() + within_s
        for one in self.ranks:
            one.child.terminate()

    def kill(self) -> None:
        """Send SIGKILL to all that still run; what they have started ends with them."""
        self._kill_rest_at_s = self._rest_leaves_until_s = 0.0
        self._fate.kill()

    def end_rest(self) -> tuple[bool, list[int]]:
        """Once it is over, end what its processes have started, which may hold devices and ports.

        That has a moment to end by itself, or the time for which `terminate` was called. The kernel may take a moment
        to end what was killed, such as one that holds the memory of a device.

        Returns:
            whether this is done; the processes that were killed for that.

        Raises:
            OSError: what runs cannot be found out now.
        """
        rest = [pid for one in self.ranks for pid in one.child.rest()]
        if not rest:
            return True, []
        if self._kill_rest_at_s is None:
            self._kill_rest_at_s = time.monotonic() + REST_TIMEOUT_S
        if time.monotonic() < max(self._kill_rest_at_s, self._rest_leaves_until_s):
            return False, []
        for one in self.ranks:
            one.child.kill_rest()
        if self._rest_gone_by_s is None:
            self._rest_gone_by_s = time.monotonic() + REAP_TIMEOUT_S
            return False, rest
        return time.monotonic() >= self._rest_gone_by_s, []

    def clean_up(self) -> None:
        """Remove the phase files. Call it once it is over."""
        self.note_signs()
        with contextlib.suppress(OSError):  # no later life has a file of this name
            for one in self.ranks:
                one.phase_file.unlink(missing_ok=True)


def fill(command: Sequence[str], member: Member, *, rank: int, folder: Path) -> list[str]:
    """Return the command of one process: {coordinator}, {group}, {rank} and {folder} in its words are filled in."""
    values = {
        "{coordinator}": member.coordinator or "",
        "{group}": member.name,
        "{rank}": str(rank),
        "{folder}": str(folder),
    }
    filled = list(command)
    for name, value in values.items():
        filled = [word.replace(name, value) for word in filled]
    return filled
