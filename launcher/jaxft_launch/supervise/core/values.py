"""The values of the supervisor's core: exit statuses, events, and effects for its shell."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from jaxft_launch.supervise.core.entries import Entry

# The contract between a training program and its supervisor. `jaxft`'s errors have the same numbers.
DONE, ERROR, UNSAVED, AGAIN, REFUSED = 0, 1, 74, 75, 78
SIGKILLED = -9
# Final phases of a process.
DRAINED, LATE, STRANDED = "drained", "late", "stranded"


class Ending(StrEnum):
    """How a process or a group ended."""

    DONE = "done"
    DRAINED = "drained"  # done with its part: the job continues without it
    AGAIN = "again"
    KILLED = "killed"
    ERROR = "error"
    REFUSED = "refused"


# If several processes of a group have ended, the first of these is the reason: the other processes of a killed
# rank's group fail, too, and a process that lost its peers asks to be started again.
_REASONS = (Ending.REFUSED, Ending.KILLED, Ending.ERROR, Ending.AGAIN, Ending.DONE)


def ending_of(status: int) -> Ending:
    """Return the meaning of an exit status; negative: ended by that signal, as in `subprocess`."""
    if status < 0 or 128 < status <= 128 + 64:  # as a shell reports it
        return Ending.KILLED
    known = {DONE: Ending.DONE, UNSAVED: Ending.AGAIN, AGAIN: Ending.AGAIN, REFUSED: Ending.REFUSED}
    return known.get(status, Ending.ERROR)


def reason_of(statuses: Iterable[int]) -> tuple[Ending, int]:
    """Return how a group ended whose processes have ended with these statuses, and the status for that."""
    return min(((ending_of(status), status) for status in statuses), key=lambda one: _REASONS.index(one[0]))


# ---- events ----


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Started:
    """The answer to `Start`: the processes of a life run. `warm`: forked from the warm process."""

    group: str
    pids: tuple[int, ...]
    warm: bool = False


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The answer to `Start`: no descriptor, process, memory or disk is free now."""

    group: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """A new sign of life of a process.

    Attributes:
        phase: that it is in.
        step: for which.
        members: the groups of the last step that it took part in; 0 before the first one.
        committed: the committed steps after its last own step; 0 before the first.
        phase_mark: when it entered the phase, and
        life_mark: its last sign of life; both by its own clock, and only compared for equality.
    """

    group: str
    rank: int
    phase: str
    step: int
    members: int = 0
    committed: int = 0
    phase_mark: float = 0.0
    life_mark: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A process has ended."""

    group: str
    rank: int
    status: int


@dataclass(frozen=True, slots=True)
class RestSeen:
    """The child processes that the ended processes of a group have left behind, and that still run."""

    group: str
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """The answer of `--check` for a group: 0 OK, 1 warning, 2 critical, 3 unknown, as in Nagios."""

    group: str
    status: int
    text: str


@dataclass(frozen=True, slots=True)
class DevicesSeen:
    """The answer of `--probe`: the devices of this machine that work, and when it was asked."""

    working: frozenset[str]
    asked_s: float


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher got a signal: the first one drains all groups, a further one kills them."""

    name: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Let one group finish its step and leave for good; the launch continues."""

    group: str


@dataclass(frozen=True, slots=True)
class StrikeAsked:
    """Kill the processes of a group. It is restarted like any group that was killed."""

    group: str


@dataclass(frozen=True, slots=True)
class CoordinatorUp:
    """The answer to `StartCoordinator`: it runs, and does not listen yet."""

    pid: int


@dataclass(frozen=True, slots=True)
class CoordinatorStartFailed:
    error: str


@dataclass(frozen=True, slots=True)
class CoordinatorListens:
    pass


@dataclass(frozen=True, slots=True)
class CoordinatorSigned:
    """A new sign of life of the coordinator."""


@dataclass(frozen=True, slots=True)
class CoordinatorDown:
    """The coordinator's process has ended."""

    status: int


GroupEvent = Started | StartFailed | Signed | Ended | RestSeen | Checked | DrainAsked | StrikeAsked
KeeperEvent = (
    CoordinatorUp | CoordinatorStartFailed | CoordinatorListens | CoordinatorSigned | CoordinatorDown
)
Event = Tick | GroupEvent | KeeperEvent | DevicesSeen | Signalled


# ---- effects ----


@dataclass(frozen=True, slots=True)
class Start:
    """Start the processes of a life. The answer is `Started` or `StartFailed`. `devices`: empty: as in the plan."""

    group: str
    life: int
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM to the processes of a group."""

    group: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Send SIGKILL to the processes of a group that still run."""

    group: str


@dataclass(frozen=True, slots=True)
class KillRest:
    """Send SIGKILL to the child processes that they have left behind."""

    group: str


@dataclass(frozen=True, slots=True)
class ShowStacks:
    """Have the processes of a group print where their threads stand."""

    group: str


@dataclass(frozen=True, slots=True)
class AskDevices:
    """Ask `--probe` soon: a group waits for the answer."""


@dataclass(frozen=True, slots=True)
class StartCoordinator:
    """Start the coordinator again, on its port."""


@dataclass(frozen=True, slots=True)
class KillCoordinator:
    pass


@dataclass(frozen=True, slots=True)
class LogOf:
    """The log of a process of a group, or of the coordinator if `group` is empty."""

    group: str
    life: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Say:
    """Show people a text, and below it the end of a log."""

    text: str
    log: LogOf | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """Write an event to the journal."""

    entry: Entry


Effect = (
    Start
    | Terminate
    | Kill
    | KillRest
    | ShowStacks
    | AskDevices
    | StartCoordinator
    | KillCoordinator
    | Say
    | Write
)
