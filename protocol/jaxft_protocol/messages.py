"""The messages between groups and the coordinator, as frozen values.

They mirror `proto/coordinator.proto`, which documents every field. The cores of both ends use these values; only the
shells use protobuf. "State s" is the state after s committed steps. Step s turns state s into state s + 1.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

GroupName = NewType("GroupName", str)
Incarnation = NewType("Incarnation", int)
QuorumId = NewType("QuorumId", int)
HealId = NewType("HealId", int)
# Identifies the run that a committed state belongs to, since its founding. 0 for a state that was never committed.
HistoryId = NewType("HistoryId", int)
Step = NewType("Step", int)

PROTOCOL_VERSION = 2


# ---- group to coordinator ----


@dataclass(frozen=True, slots=True)
class Hello:
    job: str
    group: GroupName
    incarnation: Incarnation
    address: str
    rank: int = 0
    ranks: int = 1
    protocol_version: int = PROTOCOL_VERSION
    term: int = 0
    # The state that the group holds, if it has taken part before: it may be busy for a long time before it joins.
    step: Step = Step(0)
    history: HistoryId = HistoryId(0)
    # Counts the streams that this process has opened: a Hello may arrive after a later stream's.
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Join:
    step: Step
    digest: int | None  # of that state; None if it could not be taken
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    last_quorum_id: QuorumId = QuorumId(0)
    min_replicas: int = 0
    history: HistoryId = HistoryId(0)
    spare: bool = False
    # How many members the last quorum that this group has seen had; 0 if it has seen none.
    members: int = 0
    # Shards per step; None: one for each member of the quorum.
    total_shards: int | None = None
    weight: int = 1  # how fast it computes a shard, relative to the others: the number of its devices


@dataclass(frozen=True, slots=True)
class Pinned:
    """A donor keeps the state that a heal asked for. `digest` is its digest; None if it could not be taken."""

    heal_id: HealId
    digest: int | None


@dataclass(frozen=True, slots=True)
class Ready:
    heal_id: HealId
    step: Step


@dataclass(frozen=True, slots=True)
class Vote:
    quorum_id: QuorumId
    step: Step
    ok: bool
    accused: tuple[GroupName, ...] = ()
    reason: str = ""
    digest: int | None = None
    nonfinite: str = ""
    # The user's code raised an exception in this group, with the text `reason`, while it computed `shard`; None: not
    # in a shard.
    raised: bool = False
    shard: int | None = None
    edit: int = 0  # digest of the edit of the state before this step; 0: none


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The group is alive, and has computed its shards of this quorum and step (0, 0: of none)."""

    computed_quorum_id: QuorumId = QuorumId(0)
    computed_step: Step = Step(0)
    away: bool = False
    moves: bool = False


@dataclass(frozen=True, slots=True)
class HealFailed:
    heal_id: HealId
    reason: str
    step: Step = Step(0)
    history: HistoryId = HistoryId(0)


@dataclass(frozen=True, slots=True)
class Leave:
    finished: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """A group's work since its last sample. It is for people: the cores never see it.

    `shards_again` counts shards that it computed more than once for a step. Times are totals, in seconds.
    """

    step: Step
    steps: int = 0
    attempts: int = 0
    shards: int = 0
    shards_again: int = 0
    compute_s: float = 0.0
    exchange_s: float = 0.0
    vote_s: float = 0.0
    apply_s: float = 0.0
    heals: int = 0
    heal_s: float = 0.0
    heal_bytes: int = 0
    # Numbers of the training program, such as its loss.
    values: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Drain:
    """The group is to end: it finishes its step, and leaves at that step's boundary, on `Drained`."""


GroupMessage = Hello | Join | Pinned | Ready | Vote | Heartbeat | HealFailed | Leave | Drain


# ---- coordinator to group ----


@dataclass(frozen=True, slots=True)
class Member:
    group: GroupName
    incarnation: Incarnation
    address: str
    shards: tuple[int, ...] = ()
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Change:
    group: GroupName
    reason: str = ""


# How many heartbeats fit into the heartbeat timeout, at both ends: two may be lost or late. The coordinator pays
# for each. Kafka's documentation asks for at least as many (heartbeat.interval.ms, session.timeout.ms).
HEARTBEATS_IN_TIMEOUT = 3


@dataclass(frozen=True, slots=True)
class Welcome:
    heartbeat_interval_ms: int
    frontier_step: Step | None = None
    frontier_quorum_id: QuorumId = QuorumId(0)
    frontier_held: bool = False
    term: int = 0
    samples: bool = False  # the coordinator wants samples


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    job: str
    group: str


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True)
class NewQuorum:
    quorum_id: QuorumId
    step: Step
    total_shards: int
    members: tuple[Member, ...]
    joined: tuple[Change, ...] = ()
    left: tuple[Change, ...] = ()
    history: HistoryId = HistoryId(0)


@dataclass(frozen=True, slots=True)
class Commit:
    quorum_id: QuorumId
    step: Step
    next: NewQuorum | None = None


@dataclass(frozen=True, slots=True)
class Stripe:
    """Which part of a state a donor keeps for a heal: part `number` of `count` parts of about the same size."""

    number: int = 0
    count: int = 1


WHOLE = Stripe()


@dataclass(frozen=True, slots=True)
class Pin:
    heal_id: HealId
    step: Step
    log_only: bool = False
    stripe: Stripe = WHOLE


@dataclass(frozen=True, slots=True)
class Release:
    heal_id: HealId


@dataclass(frozen=True, slots=True)
class Heal:
    heal_id: HealId
    step: Step
    donors: tuple[Member, ...]
    log_only: bool = False
    history: HistoryId = HistoryId(0)


@dataclass(frozen=True, slots=True)
class FrontierMoved:
    step: Step


@dataclass(frozen=True, slots=True)
class Waiting:
    reason: str
    held: bool = False  # a group that holds the job's state is here
    fresh: bool = False  # this group's state counts as fresh, whatever its history: the group can only heal


@dataclass(frozen=True, slots=True)
class Finished:
    step: Step


@dataclass(frozen=True, slots=True)
class Evicted:
    """The group is out of the job.

    `may_return`: it may come back as a joiner. Before its Welcome: its name is taken, and it may dial again.
    `aside`: it was only away; it is not blamed, and comes back with its next call.
    """

    reason: str
    may_return: bool
    aside: bool = False


@dataclass(frozen=True, slots=True)
class Goodbye:
    pass


@dataclass(frozen=True, slots=True)
class Drained:
    """The group takes part in no further step. It serves its heals until it has sent Leave and got Goodbye."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The job is paused: its members begin no further step before the next quorum."""


class HaltKind(enum.IntEnum):
    """Why a job stops for all its groups. The numbers are the proto's."""

    DIVERGED = 0  # states differ, without a majority
    NONFINITE = 1  # a step's means are not finite, and the job's policy is to stop then
    FAILED = 2  # the job cannot continue for another reason, such as a coordinator error on this job
    RAISED = 3  # the user's code raises an exception in every group


@dataclass(frozen=True, slots=True)
class Halted:
    reason: str
    kind: HaltKind = HaltKind.DIVERGED


@dataclass(frozen=True, slots=True)
class AllComputed:
    """All members have computed their shards, or the quorum has ended: the exchange's timeouts start now."""

    quorum_id: QuorumId
    step: Step


@dataclass(frozen=True, slots=True)
class Alive:
    """The reply to a heartbeat. The shell sends it at once: it depends on no decision."""


CoordinatorMessage = (
    Welcome
    | Refused
    | NewQuorum
    | Commit
    | Pin
    | Release
    | Heal
    | FrontierMoved
    | Waiting
    | Finished
    | Evicted
    | Goodbye
    | Halted
    | Alive
    | AllComputed
    | Drained
    | Paused
)
