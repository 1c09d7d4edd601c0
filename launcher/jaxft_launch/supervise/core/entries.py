"""The events of a launch, as its journal has them. docs/clusters.md documents each of them."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchBegan:
    """The first event. `folder` holds the logs."""

    groups: list[str]
    nproc: int
    coordinator: str
    command: list[str]
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStarted:
    """A coordinator of this launch listens."""

    pid: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorEnded:
    """It ended by itself, and is restarted after `wait_s`."""

    pid: int
    status: int
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStarted:
    """A life of a group began: one process per rank, in order.

    `warm`: forked from a warm process. `devices`: it may use only these; empty: not limited.
    """

    group: str
    life: int
    pids: list[int]
    warm: bool
    devices: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    """The first process of a life that ended with another status than 0; the others are ended."""

    group: str
    life: int
    rank: int
    pid: int
    status: int
    ending: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOverdue:
    """A process stayed in a phase beyond its deadline; its group is ended."""

    group: str
    life: int
    rank: int
    pid: int
    phase: str
    step: int
    lasted_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded:
    """All processes of a life have ended. `step`: its highest step; 0 if none."""

    group: str
    life: int
    ending: str
    status: int
    step: int
    lived_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRestarts:
    """The next life of a group begins after `wait_s`."""

    group: str
    life: int
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesMissing:
    """A group is due, but some of its devices do not work: it waits for them, for `wait_s` at most."""

    group: str
    devices: list[str]
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClimbs:
    """A group leaves after its step, and starts again on a higher rung: more of its devices work."""

    group: str
    life: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGivenUp:
    """A group is not started again."""

    group: str
    life: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckChanged:
    """The check of a group has changed its level: ok, warning, critical or unknown. `text`: its output."""

    group: str
    level: str
    before: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDrains:
    """A group finishes its step and leaves, since its check is critical. It comes back when that is OK."""

    group: str
    life: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainBegan:
    """The launcher got a signal, and passes it on to all groups as SIGTERM."""

    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnded:
    """The last event, with the exit status of the launcher."""

    status: int


Entry = (
    LaunchBegan
    | CoordinatorStarted
    | CoordinatorEnded
    | GroupStarted
    | RankEnded
    | RankOverdue
    | GroupEnded
    | GroupRestarts
    | DevicesMissing
    | GroupClimbs
    | GroupGivenUp
    | CheckChanged
    | CheckDrains
    | DrainBegan
    | LaunchEnded
)


def name_of(kind: type[Entry]) -> str:
    """Return the name of an event, as in the file: group_started."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
