"""The coordinator's state for one job, as frozen values, with its events and effects.

Only `machine.py` advances a `Job`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from jaxft_protocol.messages import (
    HEARTBEATS_IN_TIMEOUT,
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
    """Settings of the coordinator, for all its jobs."""

    min_replicas: int = 1
    join_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 5.0
    # The number of this coordinator's life: higher than all earlier ones, if a store keeps those.
    term: int = 0
    # Decisions are kept in a store, which also fences off a replaced coordinator.
    durable: bool = False
    # Heal ids of this life start after this one: no other life uses them.
    heals_from: HealId = HealId(0)
    # How long a job that starts or resumes waits for a newer state; None: the heartbeat timeout.
    founding_wait_s: float | None = None
    # Ask groups for samples of their steps, which the shell shows to people.
    samples: bool = False

    # How long losses are collected before a step is retried, for each member of the quorum. Announcing a quorum to a
    # thousand members takes about as long, so collecting costs little; a small job does not wait.
    gather_s_per_member: float = 5e-5

    def gather_s(self, members: int) -> float:
        """How long to wait for further losses after the first, in a quorum of `members` members."""
        wait_s = min(0.05, members * self.gather_s_per_member)
        return wait_s if wait_s >= 0.005 else 0.0

    @property
    def newer_may_come_s(self) -> float:
        return self.heartbeat_timeout_s if self.founding_wait_s is None else self.founding_wait_s

    @property
    def heartbeat_interval_ms(self) -> int:
        return max(1, round(self.heartbeat_timeout_s * 1000 / HEARTBEATS_IN_TIMEOUT))

    @property
    def vote_grace_s(self) -> float:
        """How long the others may take to vote once a member has failed: they notice within milliseconds."""
        return min(1.0, self.heartbeat_timeout_s / 5)


class GroupPhase(enum.Enum):
    """A group's phase, as its job sees it."""

    PRESENT = "present"  # sent Hello; may still be compiling
    STALE = "stale"  # joined, but does not hold the frontier and has no donors yet
    HEALING = "healing"  # fetches the frontier from donors
    READY = "ready"  # has caught up; becomes a member at the next boundary
    MEMBER = "member"  # holds the frontier and takes part
    LEAVING = "leaving"  # no longer takes part; still serves its heals


@dataclass(frozen=True)  # without slots: see `values.changed`
class Group:
    name: GroupName
    incarnation: Incarnation
    session: SessionId
    address: str
    stream: int = 0  # which of the streams of its process this is
    phase: GroupPhase = GroupPhase.PRESENT
    step: Step = Step(0)
    digest: int | None = None
    heal_id: HealId | None = None
    donors: tuple[Holder, ...] = ()
    asked: tuple[Holder, ...] = ()  # the donors of this heal, also donors that could not send a digest
    # While donors take the digest of the state for this group's heal: which state, and their digests so far. None
    # once the joiner has its list of donors.
    pinned_step: Step | None = None
    pinned: Mapping[Holder, int] = field(default_factory=dict[Holder, int])
    pinned_s: float = 0.0  # when the donors were asked
    # The history of the state with which it joined; 0: a fresh state.
    history: HistoryId = HistoryId(0)
    came_s: float = 0.0
    joined_s: float = 0.0
    ready_s: float = 0.0
    # How many heals have failed in a row, and when it gets donors again.
    heals_failed: int = 0
    heals_again_s: float = 0.0
    spare: bool = False
    weight: int = 1  # how fast it computes a shard, relative to the others
    # From its heartbeats: its training thread is not in a step; and when it last made progress on one.
    away: bool = False
    moved_s: float = 0.0
    # How many members the last quorum that it had seen when it joined had; 0: it had seen none.
    members: int = 0
    # It is to leave at the next boundary; once it is LEAVING, it knows, and its Leave is still to come.
    draining: bool = False
    # Once it is LEAVING: for whom it stays, as it has heard.
    stays_for: str = ""

    @property
    def holder(self) -> Holder:
        return (self.name, self.incarnation)

    @property
    def has_fresh_state(self) -> bool:
        """Whether it can only heal: it has joined with a state that is of no history of this job."""
        return self.phase is GroupPhase.STALE and not self.history


@dataclass(frozen=True, slots=True)
class Frontier:
    """State `step`, the quorum that committed it (0: the founding state), and the groups known to hold it."""

    step: Step
    quorum_id: QuorumId
    digest: int | None  # of a founding state
    holders: frozenset[Holder]
    fresh: bool = False  # founded on a state that was never committed
    disputed: bool = False  # its holders differ, without a majority

    @property
    def founding(self) -> bool:
        """Nothing has been committed on it yet."""
        return not self.quorum_id


@dataclass(frozen=True, slots=True)
class Halt:
    """Why a job was halted, and the groups that took part then: a disconnected group did not get Halted."""

    kind: HaltKind
    reason: str
    holders: frozenset[Holder]


@dataclass(frozen=True, slots=True)
class FailedVote:
    voter: GroupName
    accused: tuple[GroupName, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Raise:
    """The user's code raised an exception with this text in a group, while it computed `shard`, if any."""

    shard: int | None
    text: str


@dataclass(frozen=True)  # without slots: see `values.changed`
class Ballot:
    """The votes on one attempt. Bit i of a mask stands for member i of the current quorum."""

    ok: int = 0
    failed: int = 0
    lost: int = 0
    failures: tuple[FailedVote, ...] = ()
    digests: Mapping[GroupName, int] = field(default_factory=dict[GroupName, int])
    # Of the groups that edited the state before this step.
    edits: Mapping[GroupName, int] = field(default_factory=dict[GroupName, int])
    nonfinite: str = ""  # which of the means is not finite, according to the first vote that names one
    deadline_s: float | None = None
    # Until when further losses are collected.
    gather_until_s: float | None = None
    retries: int = 0
    began_s: float = 0.0
    computed: int = 0
    # When the first member had computed its shards; when the first one voted ok; and when the last one voted ok.
    ahead_s: float | None = None
    voted_s: float | None = None
    last_voted_s: float = 0.0
    # When a member was last known to be away; and whether AllComputed was sent.
    away_s: float = 0.0
    announced: bool = False


@dataclass(frozen=True)  # without slots: see `values.changed`
class Job:
    name: str
    options: Options
    settings: Mapping[str, str] | None = None
    # Shards per step; None: one for each member of the quorum, as in TorchFT.
    total_shards: int | None = None
    min_replicas: int = 0
    groups: Mapping[GroupName, Group] = field(default_factory=dict[GroupName, Group])
    sessions: Mapping[SessionId, GroupName] = field(default_factory=dict[SessionId, GroupName])
    history: HistoryId = HistoryId(0)
    frontier: Frontier | None = None
    # Since when no group has held the frontier.
    orphaned_s: float | None = None
    # Incarnations that have held a state of this job. Their step number proves which state they hold, because they
    # apply only committed steps. For any other group, an equal step number proves nothing.
    proven: Mapping[GroupName, Incarnation] = field(default_factory=dict[GroupName, Incarnation])
    # Incarnations whose state was found to be corrupt; until they have healed, their history is ignored.
    distrusted: frozenset[Holder] = frozenset()
    quorum: NewQuorum | None = None
    # Positions and shards in the last quorum, kept while there is none: its members may have computed their shards.
    positions: Mapping[GroupName, int] = field(default_factory=dict[GroupName, int])
    held: Mapping[GroupName, tuple[int, ...]] = field(default_factory=dict[GroupName, tuple[int, ...]])
    ballot: Ballot = Ballot()
    # Groups whose code has raised an exception since the last commit, the last one last.
    raised: Mapping[GroupName, Raise] = field(default_factory=dict[GroupName, Raise])
    # The others have shown in a trial that they can do the step in which the last of these has raised.
    tried: bool = False
    # The highest number of members so far, not counting spares: spares fill up to this many places.
    places: int = 0
    last_quorum_id: QuorumId = QuorumId(0)
    last_heal_id: HealId = HealId(0)
    first_join_s: float | None = None
    # When a group with a committed state was last connected, while the job has none.
    committed_seen_s: float | None = None
    left: tuple[Change, ...] = ()
    waiting: str = ""
    finished: Step | None = None
    # The step at which a member last ended its loop.
    ended: Step | None = None
    last_tick_s: float | None = None
    # Until when the coordinator was last suspended: silence before that is no sign of a death.
    suspended_s: float = 0.0
    # How long the last steps took, each from the start of its last attempt to its commit: see progress.py.
    recent_s: tuple[float, ...] = ()
    # How often since the last commit members were evicted because others waited for them.
    hung: int = 0
    # Groups that were evicted because they disturbed others: how often, and when last.
    blamed: Mapping[GroupName, tuple[int, float]] = field(default_factory=dict[GroupName, tuple[int, float]])
    # When the coordinator restored this job from its record; None once a quorum has been formed since.
    restored_s: float | None = None
    # The term under which its groups are welcomed; 0 before the first (`terms.py`).
    term: int = 0
    # Since when groups with a higher term keep coming, and when the last one came.
    outdone_s: tuple[float, float] | None = None
    # Set until a quorum is formed again.
    halted: Halt | None = None
    # No step begins until an operator resumes the job.
    paused: bool = False
    # Who is to leave, in the order in which that was asked: a drain outlives the stream of its group.
    drains: tuple[Holder, ...] = ()
    # Since when no group has been connected, in Unix seconds, so that it stays valid across restarts.
    idle_since: int | None = None

    @property
    def empty(self) -> bool:
        """Whether only its ids would be lost if this job were forgotten. `durable.py` makes its replacement.

        Not after a restart: earlier members are about to reconnect. Not if the job started or resumed from a state of
        a history on which something was committed: a fresh state must not replace that one.
        """
        fresh = self.frontier is None or self.frontier.fresh
        return not self.groups and fresh and self.restored_s is None


# ---- records: what must survive the coordinator ----


@dataclass(frozen=True, slots=True)
class Saved:
    """Everything durable about a job. `members`: of the current quorum."""

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
    paused: bool = False
    drains: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Moved:
    """The frontier is now state `step`: quorum `quorum_id` has committed it, and all its members hold it.

    They are the `members` of the last `Saved`, so the record of a step is short.
    """

    job: str
    step: Step
    quorum_id: QuorumId


@dataclass(frozen=True, slots=True)
class Forgotten:
    """This job no longer needs a record."""

    job: str


Record = Saved | Moved | Forgotten


# ---- events ----


@dataclass(frozen=True, slots=True)
class Received:
    session: SessionId
    message: GroupMessage


@dataclass(frozen=True, slots=True)
class SessionClosed:
    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed.

    Attributes:
        heard_s: when the last message for a job came on each session. Most messages change nothing in the job but
            this, so the shell keeps it.
        unix_s: the time of day, used only to note since when a job is idle.
    """

    heard_s: Mapping[SessionId, float] = field(default_factory=dict[SessionId, float])
    unix_s: int = 0


@dataclass(frozen=True, slots=True)
class Suspended:
    """The coordinator did nothing for this long: its process was stopped. Its mail is still unread."""

    seconds: float


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """An operator asks for the drain of a group."""

    group: GroupName
    reason: str


@dataclass(frozen=True, slots=True)
class PauseAsked:
    """An operator pauses the job after its current step, or resumes it."""

    paused: bool


Event = Received | SessionClosed | Tick | Suspended | DrainAsked | PauseAsked


# ---- effects ----


@dataclass(frozen=True, slots=True)
class Send:
    session: SessionId
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Persist:
    """Make this durable before executing any later effect of the job, in this turn or a later one."""

    record: Record


@dataclass(frozen=True, slots=True)
class Close:
    """End this session once all messages to it have been sent."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class Log:
    """A log line: a transition that users should see."""

    text: str


Effect = Persist | Send | Close | Log
