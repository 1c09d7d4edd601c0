"""What the exit status of a program means: the contract between a training program and its supervisor."""

import signal
from enum import StrEnum

from jaxft._errors import ConfigurationError, JaxftError, JobFinished, JoinRefused

DONE = JobFinished.exit_status
# The program ended before its job did, and should be started again.
AGAIN = JaxftError.exit_status
# The job does not accept this program; another start would be refused as well.
REFUSED = JoinRefused.exit_status
ERROR = ConfigurationError.exit_status
SIGKILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the latter as a shell reports it


class Ending(StrEnum):
    """How a process ended, as its supervisor sees it."""

    DONE = "done"
    DRAINED = "drained"  # done with its part: the job goes on without it
    AGAIN = "again"
    KILLED = "killed"
    ERROR = "error"
    REFUSED = "refused"


# If several processes of a group have ended, the first of these is the reason: a process beside one that was killed
# also fails, and a process that lost its peers asks to be started again.
_REASONS = (Ending.REFUSED, Ending.KILLED, Ending.ERROR, Ending.AGAIN, Ending.DONE)


def ending_of(status: int) -> Ending:
    """Return the meaning of an exit status; negative: ended by that signal, as in `subprocess`."""
    if status < 0 or 128 < status <= 128 + 64:  # as a shell reports it
        return Ending.KILLED
    return {DONE: Ending.DONE, AGAIN: Ending.AGAIN, REFUSED: Ending.REFUSED}.get(status, Ending.ERROR)


def reason_of(statuses: list[int]) -> tuple[Ending, int]:
    """Return how a group ended whose processes have ended with these statuses, and the status that says so."""
    return min(((ending_of(status), status) for status in statuses), key=lambda one: _REASONS.index(one[0]))
