"""When to restart a group that has ended. Pure functions.

A group that made progress since its last restart, in steps that it committed with others or alone, is restarted at
once. Otherwise it is restarted after a wait that doubles each time, up to a limit. An error of the program is tried
only twice without progress: the same program most likely fails again. The step to which a group heals is no progress:
it is higher in each life, since the other groups go on.
"""

from dataclasses import dataclass, replace

from jaxft_launch.processes._statuses import Ending

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
# Waits differ by up to this share, so that groups which ended together do not all come back at once.
JITTER = 0.25
# No wait doubles more often, since a float overflows at 1024: a coordinator may be restarted as often in a day.
MOST_DOUBLINGS = 64
ERRORS_IN_A_ROW = 2
# What commits no steps, a spare or a coordinator, has made progress if it lived for so long.
STEADY_S = 600.0


@dataclass(frozen=True, slots=True)
class Past:
    """What counts of a group's former lives.

    Attributes:
        step: the highest step that any of them committed.
        fruitless: how many in a row ended without a higher one than the lives before.
    """

    step: int = 0
    fruitless: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the group again after `wait_s`."""

    wait_s: float
    past: Past


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start the group again; `why` is a sentence."""

    why: str


def after(
    past: Past,
    *,
    ending: Ending,
    status: int,
    step: int,
    lived_s: float,
    max_restarts: int,
    jitter: float,
    stands_by: bool = False,
) -> Restart | GiveUp:
    """Return what to do after a life that did not end with status 0.

    Args:
        past: of the lives before.
        ending: how it ended.
        status: its exit status, for the message.
        step: the highest step that it committed; 0 if it committed none.
        lived_s: how long it lived.
        max_restarts: the most restarts in a row without progress.
        jitter: a random number in [0, 1).
        stands_by: whether it may have nothing to commit: it is a spare.
    """
    if ending is Ending.REFUSED:
        return GiveUp(f"The job refused it (exit status {status}); its log says what differs.")
    if step > past.step:
        return Restart(0.0, Past(step, 0))
    if stands_by and lived_s >= STEADY_S and ending is not Ending.ERROR:
        return Restart(0.0, replace(past, fruitless=0))
    fruitless = past.fruitless + 1
    if ending is Ending.ERROR and fruitless >= ERRORS_IN_A_ROW:
        return GiveUp(
            f"It failed with exit status {status}, {fruitless} times in a row without a new step: fix the program."
        )
    if fruitless > max_restarts:
        return GiveUp(
            f"It ended {fruitless} times in a row without a new step (--max-restarts {max_restarts})."
        )
    wait_s = doubled_s(FIRST_WAIT_S, fruitless - 1)
    return Restart(wait_s * (1.0 - JITTER * jitter), replace(past, fruitless=fruitless))


def doubled_s(first_s: float, times: int) -> float:
    """Return a wait that has doubled so many times, up to the limit."""
    return min(LONGEST_WAIT_S, first_s * 2.0 ** min(times, MOST_DOUBLINGS))
