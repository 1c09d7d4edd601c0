"""When to restart a group that has ended. Pure functions.

A group that made progress, in steps that it committed itself, is restarted at once: any step counts that its former
life did not commit last, since a job that has resumed from a checkpoint is at lower steps than before. The step to
which a group heals is no progress: the other groups go on, so it is higher in each life. Without progress, there is a
wait that doubles up to a few minutes.

As long as the job lives without the group, it is never given up, unless the job refuses it. Otherwise it is given up
after some fruitless lives in a row: an error of the program is tried only twice, since the same program most likely
fails again.
"""

import zlib
from dataclasses import dataclass, replace

from jaxft_launch.supervise.core.values import Ending

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 300.0
# Waits differ by up to this share, so that groups which ended together do not all come back at once.
JITTER = 0.25
# No wait doubles more often, since a float overflows at 1024.
MOST_DOUBLINGS = 64
ERRORS_IN_A_ROW = 2
# A spare or a coordinator commits no steps: it has made progress if it lived for this long.
STEADY_S = 600.0


@dataclass(frozen=True, slots=True)
class Past:
    """What counts of a group's former lives.

    Attributes:
        step: the last step that such a life committed itself.
        fruitless: how many in a row ended without a new one.
        errors: how many of these, in a row, ended with an error of the program.
    """

    step: int = 0
    fruitless: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lived:
    """A life that did not end with status 0.

    Attributes:
        ending: how it ended.
        status: its exit status, for the message.
        committed: the last step that it committed itself; 0 if none.
        lived_s: how long it lived.
        stands_by: whether it may have nothing to commit: it is a spare.
        job_lives: whether the job continues without it.
    """

    ending: Ending
    status: int
    committed: int = 0
    lived_s: float = 0.0
    stands_by: bool = False
    job_lives: bool = False


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the group again after `wait_s`; `why` it waits, as a sentence."""

    wait_s: float
    past: Past
    why: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start the group again; `why` is a sentence."""

    why: str


def after(past: Past, life: Lived, *, max_restarts: int, jitter: float) -> Restart | GiveUp:
    """Return what to do after a life. `jitter`: a number in [0, 1) that differs from group to group."""
    if life.ending is Ending.REFUSED:
        return GiveUp(f"The job refused it (exit status {life.status}); its log names the difference.")
    if life.committed not in (0, past.step):
        return Restart(0.0, Past(life.committed))
    failed = life.ending is Ending.ERROR
    if life.stands_by and life.lived_s >= STEADY_S and not failed:
        return Restart(0.0, replace(past, fruitless=0, errors=0))
    now = Past(past.step, past.fruitless + 1, past.errors + 1 if failed else 0)
    if not life.job_lives and now.errors >= ERRORS_IN_A_ROW:
        return GiveUp(
            f"It failed with exit status {life.status}, {now.errors} times in a row without a new step: fix the "
            "program."
        )
    if not life.job_lives and now.fruitless > max_restarts:
        return GiveUp(
            f"It ended {now.fruitless} times in a row without a new step (--max-restarts {max_restarts})."
        )
    without = ", while the job continues without it" if life.job_lives else ""
    why = f"it ended {now.fruitless} times in a row without a new step{without}" if now.fruitless > 1 else ""
    return Restart(doubled_s(FIRST_WAIT_S, now.fruitless - 1) * (1.0 - JITTER * jitter), now, why)


def doubled_s(first_s: float, times: int, longest_s: float = LONGEST_WAIT_S) -> float:
    """Return a wait that has doubled this number of times, up to the limit."""
    return min(longest_s, first_s * 2.0 ** min(times, MOST_DOUBLINGS))


def jitter_of(name: str, lives: int) -> float:
    """Return a number in [0, 1) for the wait of a group."""
    return zlib.crc32(f"{name} {lives}".encode()) / 2**32
