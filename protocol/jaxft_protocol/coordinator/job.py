"""What the coordinator knows of one job, as frozen values, and what can happen to it.

`machine.py` moves a `Job` from state to state; nothing else does.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from jaxft_protocol.messages import (
    Change,
    CoordinatorMessage,
    GroupMessage,
    GroupName,
    HaltKind,
    HealId,
    HistoryId,
    Incarnation,
    NewQuorum,
    QuorumId,
    Step,
)

SessionId = NewType("SessionId", int)
Holder = tuple[GroupName, Incarnation]


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the coordinator that hold for all its jobs."""

    min_replicas: int = 1
    join_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 5.0
    # Which life of the coordinator this is: more than in every life before, where a store remembers those.
    term: int = 0
    # Decisions are kept in a store, which also fences a coordinator that was replaced.
    durable: bool = False
    # Heal ids of this life begin behind this one: no other life has any of them.
    heals_from: HealId = HealId(0)
    # How long a job that begins or resumes waits for groups that may bring a newer state; None: as long as for a
    # heartbeat.
    founding_wait_s: float | None = None

    # How long losses are gathered before a step is tried again, for each member of the quorum. To tell a thousand
    # members of a new quorum takes about as long, so gathering costs no time; a small job does not wait.
    gather_s_per_member: float = 5e-5

    def gather_s(self, members: int) -> float:
        """How long to wait for further losses after the first, in a quorum of so many members."""
        wait_s = min(0.05, members * self.gather_s_per_member)
        return wait_s if wait_s >= 0.005 else 0.0

    @property
    def newer_may_come_s(self) -> float:
        return self.heartbeat_timeout_s if self.founding_wait_s is None else self.founding_wait_s

    @property
    def heartbeat_interval_ms(self) -> int:
        """Five heartbeats fit into the timeout, so four may be lost or late."""
        return max(1, round(self.heartbeat_timeout_s * 1000 / 5))

    @property
    def vote_grace_s(self) -> float:
        """How long the others may take to vote once somebody has failed: they notice within milliseconds."""
        return min(1.0, self.heartbeat_timeout_s / 5)


class Phase(enum.Enum):
    """Where a group stands with its job."""

    PRESENT = "present"  # said Hello; may still be compiling
    STALE = "stale"  # joined, but does not hold the frontier and has no donors yet
    HEALING = "healing"  # fetches the frontier from donors
    READY = "ready"  # has caught up; enters at the next boundary
    MEMBER = "member"  # holds the frontier and takes part
    LEAVING = "leaving"  # takes no part any more; still serves its heals


@dataclass(frozen=True)  # without slots: see `values.changed`
class Group:
    name: GroupName
    incarnation: Incarnation
    session: SessionId
    address: str
    last_heard_s: float
    phase: Phase = Phase.PRESENT
    step: Step = Step(0)
    digest: int | None = None
    heal_id: HealId | None = None
    donors: tuple[Holder, ...] = ()
    # Of a heal whose donors take the digest of the state first: which state, and what they have said so far. None
    # once the joiner has been told whom to ask.
    pinned_step: Step | None = None
    pinned: Mapping[Holder, int] = field(default_factory=dict[Holder, int])
    pinned_s: float = 0.0  # since when they have been asked
    # Of the state with which it joined; 0: fresh.
    history: HistoryId = HistoryId(0)
    came_s: float = 0.0
    joined_s: float = 0.0
    ready_s: float = 0.0
    # Heals that failed in a row, and when it is given donors again.
    heals_failed: int = 0
    heals_again_s: float = 0.0
    spare: bool = False
    # By its heartbeats: its training thread is not in a step; and when it has last got on with one.
    away: bool = False
    moved_s: float = 0.0
    # Of the last quorum that it had seen when it joined; 0: of none.
    members: int = 0

    @property
    def holder(self) -> Holder:
        return (self.name, self.incarnation)


@dataclass(frozen=True, slots=True)
class Frontier:
    """State `step`, the quorum whose commit made it (0: the founding state), and who is known to hold it."""

    step: Step
    quorum_id: QuorumId
    digest: int | None  # of a founding state
    holders: frozenset[Holder]
    fresh: bool = False  # founded on a state that nobody had committed
    disputed: bool = False  # those who held it differ, and no majority says whose state is right

    @property
    def founding(self) -> bool:
        """Nothing has been committed on it yet."""
        return not self.quorum_id


@dataclass(frozen=True, slots=True)
class Halt:
    """Why a job was stopped, and who took part then: one whose stream broke at that moment has not heard of it."""

    kind: HaltKind
    reason: str
    holders: frozenset[Holder]


@dataclass(frozen=True, slots=True)
class Failure:
    voter: GroupName
    accused: tuple[GroupName, ...]
    reason: str


@dataclass(frozen=True)  # without slots: see `values.changed`
class Ballot:
    """The votes on one attempt. Bit i of a mask stands for member i of the quorum in force."""

    ok: int = 0
    failed: int = 0
    lost: int = 0
    failures: tuple[Failure, ...] = ()
    digests: Mapping[GroupName, int] = field(default_factory=dict[GroupName, int])
    nonfinite: str = ""  # which of the means is not finite, as the first to find it says
    deadline_s: float | None = None
    # Until when further losses are waited for.
    gather_until_s: float | None = None
    retries: int = 0
    began_s: float = 0.0
    computed: int = 0
    # Since when the first member has waited: with its shards computed; with its vote cast. And when the last one
    # that holds the sum said so.
    ahead_s: float | None = None
    voted_s: float | None = None
    last_voted_s: float = 0.0
    # When a member was last known to be away; and whether the members were told that all have computed.
    away_s: float = 0.0
    told: bool = False


@dataclass(frozen=True)  # without slots: see `values.changed`
class Job:
    name: str
    options: Options
    settings: Mapping[str, str] | None = None
    # Of a step; None where every member brings one shard of its own (TorchFT's meaning).
    total_shards: int | None = None
    min_replicas: int = 0
    groups: Mapping[GroupName, Group] = field(default_factory=dict[GroupName, Group])
    sessions: Mapping[SessionId, GroupName] = field(default_factory=dict[SessionId, GroupName])
    history: HistoryId = HistoryId(0)
    frontier: Frontier | None = None
    # Since when nobody has held the frontier.
    orphaned_s: float | None = None
    # Incarnations that have held a state of this job. What they say of their step proves what they hold, for they
    # apply nothing but what was committed. Of anybody else an equal step number proves nothing.
    proven: Mapping[GroupName, Incarnation] = field(default_factory=dict[GroupName, Incarnation])
    # Incarnations whose state was found to be corrupt; until they have healed their history counts for nothing.
    distrusted: frozenset[Holder] = frozenset()
    quorum: NewQuorum | None = None
    # Places and shards in the last quorum, also while there is none: its members may have computed them.
    seats: Mapping[GroupName, int] = field(default_factory=dict[GroupName, int])
    held: Mapping[GroupName, tuple[int, ...]] = field(default_factory=dict[GroupName, tuple[int, ...]])
    ballot: Ballot = Ballot()
    # How many groups took part at most, spares not counted: so many places are to be filled.
    places: int = 0
    last_quorum_id: QuorumId = QuorumId(0)
    last_heal_id: HealId = HealId(0)
    first_join_s: float | None = None
    # When a group was here last that holds a committed state, while the job has none.
    committed_seen_s: float | None = None
    left: tuple[Change, ...] = ()
    waiting: str = ""
    finished: Step | None = None
    # At which step a regular group, having taken part, has ended its loop last.
    ended: Step | None = None
    last_tick_s: float | None = None
    # How long the last steps took, each from the begin of its last attempt to its commit: see progress.py.
    recent_s: tuple[float, ...] = ()
    # Since when all that hold the frontier by the last commit have voted: at the earliest when its ballot began.
    voted_s: float = 0.0
    # How often since the last commit members were put out because others waited for them.
    hung: int = 0
    # Groups that were put out because they disturbed others: how often, and when last.
    blamed: Mapping[GroupName, tuple[int, float]] = field(default_factory=dict[GroupName, tuple[int, float]])
    # When a coordinator that remembers this job began with it; None once a quorum has been formed since.
    restored_s: float | None = None
    # Under which term its groups are welcomed; 0 before the first (`terms.py`).
    term: int = 0
    # Since when groups of a higher term have come in a row, and when the last one came.
    outdone_s: tuple[float, float] | None = None
    # Until a quorum is formed again.
    halted: Halt | None = None
    # Since when no group has been here, in seconds of Unix time, so that it outlives the coordinator.
    idle_since: int | None = None

    @property
    def empty(self) -> bool:
        """Nothing but its ids would be lost if this job were forgotten; `durable.anew` is to take its place.

        Not yet after a restart: those who took part are about to dial again. Nor where the state from which it began,
        or resumed, is of a history on which something was committed: that one must not give way to a fresh state.
        """
        fresh = self.frontier is None or self.frontier.fresh
        return not self.groups and fresh and self.restored_s is None


# ---- what must survive the coordinator ----


@dataclass(frozen=True, slots=True)
class Saved:
    """All that must be remembered of a job. `members` are those of the quorum in force."""

    job: str
    last_quorum_id: QuorumId
    settings: Mapping[str, str] | None
    min_replicas: int
    history: HistoryId
    frontier: Frontier | None
    proven: Mapping[GroupName, Incarnation]
    distrusted: frozenset[Holder]
    members: tuple[Holder, ...]
    held: Mapping[GroupName, tuple[int, ...]]
    places: int
    finished: Step | None
    idle_since: int | None = None
    total_shards: int | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """The frontier is now state `step`: quorum `quorum_id` has committed it, and all its members hold it.

    They are the `members` of the last `Saved`; so the record of a step is as short as the decision.
    """

    job: str
    step: Step
    quorum_id: QuorumId


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Nothing of this job needs to be remembered any more."""

    job: str


Record = Saved | Moved | Forgotten


# ---- events ----


@dataclass(frozen=True, slots=True)
class GroupSaid:
    session: SessionId
    message: GroupMessage


@dataclass(frozen=True, slots=True)
class SessionClosed:
    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. `unix_s` is the time of day: it decides nothing but when a job was left."""

    unix_s: int = 0


Event = GroupSaid | SessionClosed | Tick


# ---- effects ----


@dataclass(frozen=True, slots=True)
class Send:
    session: SessionId
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Persist:
    """Make this durable before any effect that follows it, of this turn or a later one of the job, is done."""

    record: Record


@dataclass(frozen=True, slots=True)
class Close:
    """End this session once what was sent to it has left."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class Report:
    """One line for the log: a transition that people should see."""

    text: str


Effect = Persist | Send | Close | Report
