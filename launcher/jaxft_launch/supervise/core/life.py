"""One life of a group: its processes, which share one fate. Pure.

As soon as a process ends with another status than 0, or stays in a phase beyond its deadline, the life has failed,
and its other processes are ended: they would wait forever. They have a moment for last words, since a
process whose own error has ended the others may end after them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from jaxft_launch.supervise.core.values import (
    DONE,
    DRAINED,
    LATE,
    SIGKILLED,
    STRANDED,
    Ending,
    Signed,
    ending_of,
    reason_of,
)

# From the start of the process to its first announced phase: imports, restore, compilation.
BOOT = "boot"
# Since the last sign of life, in any phase.
SILENCE = "silence"
# After another process of its group has ended with status 0, or while a thread keeps it alive after its main thread.
END = "end"
WAIT, HEAL, REPLAY = "wait", "heal", "replay"
# Phases in which a process may be waiting for other groups.
WAITS = (WAIT, "exchange", "vote")
# A group that waits for others may be the last holder of the job's state: no deadline. Elsewhere, deadlines far above
# the needs of a healthy program are cheap, since the job continues without the group.
DEADLINES_S: Mapping[str, float] = MappingProxyType(
    {
        BOOT: 3600.0,
        WAIT: math.inf,
        "compute": 600.0,
        "exchange": 600.0,
        "vote": math.inf,
        "apply": 600.0,
        HEAL: 600.0,
        REPLAY: 600.0,
        # Between two calls of the step: evaluation, input, checkpoints.
        "outside": math.inf,
        SILENCE: 60.0,
        END: 600.0,
    }
)
# For the other processes of a life that has failed.
LAST_WORDS_S = 1.0
# For the processes of a life that is overdue, to write their stacks: on a busy machine a second is too short.
STACKS_S = 3.0
# JAX ends a rank so, within a tenth of a second, when rank 0 has ended: the reason is the end of rank 0.
ABORTED = (-6, 128 + 6)


@dataclass(frozen=True, slots=True)
class Overdue:
    """A phase that takes too long: for how long it has lasted, and its deadline."""

    rank: int
    phase: str
    step: int
    lasted_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of a life.

    Attributes:
        status: its exit status, once it has ended.
        sign: its last sign of life.
        since_s: when its phase was first seen.
        alive_s: when its last sign of life was first seen.
    """

    status: int | None = None
    sign: Signed | None = None
    since_s: float = 0.0
    alive_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A life of a group.

    Attributes:
        counted: the ranks that ended before the group was killed, with their statuses.
        failed: the rank that failed first, or one seen later that is the reason for that.
        overdue: the deadline that was exceeded.
        killed: whether SIGKILL was sent to its processes.
        reported: whether its failure has been reported.
        leaves_until_s: until when what its processes have started may end by itself.
        first_end_s: when its first process ended with status 0.
        healed: whether a process has healed, and holds the job's state since.
        has_begun: whether it does more than wait for the job, or has waited for long.
    """

    number: int
    started_s: float
    pids: tuple[int, ...]
    devices: tuple[str, ...] = ()
    ranks: tuple[Rank, ...]
    counted: tuple[tuple[int, int], ...] = ()
    failed: int | None = None
    overdue: Overdue | None = None
    killed: bool = False
    reported: bool = False
    leaves_until_s: float = 0.0
    first_end_s: float | None = None
    step: int = 0
    committed: int = 0
    healed: bool = False
    has_begun: bool = False

    @property
    def over(self) -> bool:
        """Whether all processes have ended."""
        return all(rank.status is not None for rank in self.ranks)

    @property
    def phases(self) -> frozenset[str]:
        return frozenset(rank.sign.phase for rank in self.ranks if rank.sign is not None)

    @property
    def members(self) -> int:
        """The groups of the job in the last step that it took part in; 0 while it waits for others."""
        signs = [rank.sign for rank in self.ranks if rank.sign is not None]
        return max((sign.members for sign in signs if sign.phase not in WAITS), default=0)

    @property
    def joined(self) -> bool:
        """Whether a process has called `join` or a step."""
        return any(rank.sign is not None for rank in self.ranks)

    @property
    def late(self) -> bool:
        """Whether the job was finished without it."""
        return LATE in self.phases

    @property
    def stranded(self) -> bool:
        """Whether it finds no group that holds the job's state."""
        return STRANDED in self.phases

    @property
    def holds_the_state(self) -> bool:
        """Whether it has committed a step itself, or has healed completely."""
        return self.failed is None and not self.killed and (self.committed > 0 or self.healed)

    def running(self) -> list[int]:
        """The process ids that have not ended."""
        return [pid for pid, rank in zip(self.pids, self.ranks, strict=True) if rank.status is None]

    def result(self) -> tuple[Ending, int]:
        """Return how it ended, and the exit status for that. Call it once it is over."""
        last = {DRAINED: Ending.DRAINED, LATE: Ending.DONE}
        if self.overdue is not None and (words := last.keys() & self.phases):
            return last[words.pop()], DONE  # only a thread that never ends has kept the process
        if self.overdue is not None or (self.killed and self.failed is None):
            return Ending.KILLED, SIGKILLED
        ending, status = reason_of(status for _, status in self.counted)
        return (Ending.DRAINED if ending is Ending.DONE and DRAINED in self.phases else ending), status


def signed(life: Life, sign: Signed, now_s: float) -> Life:
    """Note a sign of life."""
    before = life.ranks[sign.rank]
    last = before.sign
    moved = last is None or (sign.phase, sign.phase_mark) != (last.phase, last.phase_mark)
    lives = last is None or sign.life_mark != last.life_mark
    rank = replace(
        before,
        sign=sign,
        since_s=now_s if moved else before.since_s,
        alive_s=now_s if moved or lives else before.alive_s,
    )
    ranks = (*life.ranks[: sign.rank], rank, *life.ranks[sign.rank + 1 :])
    # A heal that has failed ends in the same phases, at the step from before it.
    fetched = [each.sign.step for each in life.ranks if each.sign and each.sign.phase in (HEAL, REPLAY)]
    held = bool(fetched) and sign.step >= max(fetched)
    after = replace(life, ranks=ranks)
    return replace(
        after,
        step=max(life.step, sign.step),
        committed=max(life.committed, sign.committed),
        healed=life.healed or (held and not {HEAL, REPLAY, STRANDED, LATE} & after.phases),
        has_begun=life.has_begun or sign.phase != WAIT,
    )


def ended(life: Life, rank: int, status: int, now_s: float) -> tuple[Life, float | None]:
    """Note the end of a process; return when the others are to be killed, if this process has failed first."""
    process = replace(life.ranks[rank], status=status)
    life = replace(life, ranks=(*life.ranks[:rank], process, *life.ranks[rank + 1 :]))
    if life.killed or (life.failed is not None and status in ABORTED):
        return life, None
    life = replace(life, counted=(*life.counted, (rank, status)))
    if life.first_end_s is None and status == DONE:
        life = replace(life, first_end_s=now_s)
    if status == DONE:
        return life, None
    if life.failed is None:
        words_s = 0.0 if ending_of(status) is Ending.KILLED else LAST_WORDS_S
        return replace(life, failed=rank), now_s + words_s
    first = dict(life.counted).get(life.failed)
    if first is not None and reason_of([first, status]) != reason_of([first]):
        life = replace(life, failed=rank)
    return life, None


def late(life: Life, now_s: float, deadlines: Mapping[str, float]) -> Overdue | None:
    """Return the deadline that a process of the life has exceeded, or None."""
    for number, rank in enumerate(life.ranks):
        if rank.status is not None:
            continue
        for phase, since_s in _clocks(life, rank):
            lasted_s, deadline_s = now_s - since_s, deadlines.get(phase, math.inf)
            if lasted_s > deadline_s:
                return Overdue(number, phase, life.step if rank.sign else 0, lasted_s, deadline_s)
    return None


def _clocks(life: Life, rank: Rank) -> list[tuple[str, float]]:
    """The phases that a process is in, and since when."""
    clocks = [(BOOT, life.started_s)]
    if rank.sign is not None:
        phase = END if rank.sign.phase in (DRAINED, LATE) else rank.sign.phase
        clocks = [(SILENCE, rank.alive_s), (phase, rank.since_s)]
    return clocks if life.first_end_s is None else [*clocks, (END, life.first_end_s)]
