"""The replica's state, events and effects, and the directives for the training thread."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxft_protocol.messages import (
    WHOLE,
    CoordinatorMessage,
    GroupMessage,
    GroupName,
    Heal,
    HealId,
    HistoryId,
    Incarnation,
    NewQuorum,
    QuorumId,
    Step,
    Stripe,
    Vote,
)


class Phase(enum.Enum):
    """The group's phase. docs/protocol.md shows the transitions."""

    OFFLINE = "offline"  # no stream to the coordinator; redials
    GREETING = "greeting"  # sent Hello, waits for Welcome
    PRESENT = "present"  # received Welcome; the training thread still compiles
    JOINING = "joining"  # sent Join, waits for a quorum or a heal
    HEALING = "healing"  # fetches a snapshot
    FOLLOWING = "following"  # holds a snapshot, replays the log up to the frontier
    WORKING = "working"  # in a quorum: computes and exchanges
    VOTED = "voted"  # waits for the decision
    APPLYING = "applying"  # received COMMIT; the training thread applies
    FINISHED = "finished"  # the job is over
    DRAINED = "drained"  # takes part in no further step; the training thread ends, and leaves
    LEAVING = "leaving"  # leaves on purpose; serves its heals until Goodbye
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Identity:
    job: str
    group: GroupName
    incarnation: Incarnation
    address: str
    coordinator: str  # host:port, or several, separated by commas

    @property
    def coordinators(self) -> tuple[str, ...]:
        return tuple(address.strip() for address in self.coordinator.split(","))


class FailureKind(enum.Enum):
    """Why a group cannot continue. The session has an error class for each."""

    COORDINATOR_UNREACHABLE = "coordinator unreachable"
    JOIN_REFUSED = "join refused"
    EVICTED = "evicted"
    CANNOT_HEAL = "cannot heal"
    DIVERGED = "diverged"
    NONFINITE = "nonfinite"
    JOB_HALTED = "job halted"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why this group cannot continue, and the text for the user."""

    kind: FailureKind
    text: str


# ---- events: from the training thread ----


@dataclass(frozen=True, slots=True)
class Prepared:
    """Both programs are compiled; the group holds state `step` and wants to take part.

    `history`: of the checkpoint that the state came from, 0 for a fresh state. `heals_only`: the state is
    fresh because other groups have read the job's checkpoint; the job must not start from it.
    """

    step: Step
    digest: int | None  # of that state; None if it cannot be taken
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    min_replicas: int = 0
    history: HistoryId = HistoryId(0)
    spare: bool = False
    heals_only: bool = False
    total_shards: int | None = None  # None: one for each member of the quorum
    weight: int = 1  # how fast this group computes a shard, relative to the others: the number of its devices


@dataclass(frozen=True, slots=True)
class Exchanged:
    """This group holds the sum of `step`. `digest`: of the state it computed from, if a digest was due.

    `nonfinite` names a mean that is not finite, if the job's policy is to stop then. `edit` is the digest of
    the edit that this group made of the state before it computed; 0: none. `digest`: of the state before it.
    """

    quorum_id: QuorumId
    step: Step
    digest: int | None = None
    nonfinite: str = ""
    edit: int = 0


@dataclass(frozen=True, slots=True)
class ExchangeBroke:
    quorum_id: QuorumId
    step: Step
    accused: tuple[GroupName, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception has left the attempt at `step`: `reason` is its text, and `shard` was being computed, if any."""

    step: Step
    reason: str
    shard: int | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """The training thread now holds state `step`."""

    step: Step


@dataclass(frozen=True, slots=True)
class Digested:
    """State `step`, which this group holds, has this digest; None if it could not be taken."""

    step: Step
    digest: int | None


@dataclass(frozen=True, slots=True)
class Healed:
    """The snapshot of this heal is in place."""

    heal_id: HealId
    step: Step


@dataclass(frozen=True, slots=True)
class Replayed:
    heal_id: HealId
    step: Step


@dataclass(frozen=True, slots=True)
class HealBroke:
    heal_id: HealId
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveNow:
    finished: bool


@dataclass(frozen=True, slots=True)
class DrainNow:
    """This group is to end: it leaves the job at the end of its step, or at once if it is in none.

    Attributes:
        at_once: it is in a part of a step that takes many times as long as a drain may take, such as a round of
            inner steps. It leaves that to the others.
    """

    at_once: bool = False


# ---- events: from the session ----


@dataclass(frozen=True, slots=True)
class Connected:
    pass


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The stream has ended. `busy`: the training thread is at work; `Idle` follows when it waits.

    A group joins only when its training thread waits for a directive. So a group that hangs stays out, and Join
    describes its state correctly.
    """

    reason: str
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Idle:
    """The training thread was busy when the stream ended, and now waits for a directive."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; with the work of the training thread.

    Attributes:
        computed: the last quorum and step whose shards it has computed.
        away: it is not in a step: between two calls, compiling, or saving a checkpoint.
        progress: a counter that grows whenever it makes progress on its step.
    """

    computed: tuple[QuorumId, Step] = (QuorumId(0), Step(0))
    away: bool = False
    progress: int = 0


Event = (
    Prepared
    | Exchanged
    | ExchangeBroke
    | Raised
    | Applied
    | Digested
    | Healed
    | Replayed
    | HealBroke
    | LeaveNow
    | DrainNow
    | Connected
    | Disconnected
    | Received
    | Idle
    | Tick
)


# ---- effects ----


@dataclass(frozen=True, slots=True)
class Send:
    message: GroupMessage


@dataclass(frozen=True, slots=True)
class Dial:
    """Open the stream to `address`, after `delay_s`."""

    delay_s: float
    address: str = ""


@dataclass(frozen=True, slots=True)
class Close:
    """End the stream, to reconnect or to find another coordinator."""

    reason: str


@dataclass(frozen=True, slots=True)
class PinState:
    heal_id: HealId
    step: Step
    log_only: bool = False
    stripe: Stripe = WHOLE


@dataclass(frozen=True, slots=True)
class ReleasePin:
    heal_id: HealId


@dataclass(frozen=True, slots=True)
class Log:
    """A log line: a transition that users should see."""

    text: str
    warning: bool = False


Effect = Send | Dial | Close | PinState | ReleasePin | Log


# ---- directives: orders to the training thread, as a function of the state ----


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until the directive changes; `reason`: for whom the group waits."""

    reason: str


@dataclass(frozen=True, slots=True)
class HealFrom:
    heal: Heal


@dataclass(frozen=True, slots=True)
class Replay:
    """Fetch and apply the means of step `step`; the job is at state `until`."""

    heal: Heal
    step: Step
    until: Step


@dataclass(frozen=True, slots=True)
class Attempt:
    """Compute this group's shards of the quorum's step and exchange them."""

    quorum: NewQuorum
    step: Step


@dataclass(frozen=True, slots=True)
class Apply:
    """Step `step` is committed: apply it."""

    quorum_id: QuorumId
    step: Step


@dataclass(frozen=True, slots=True)
class TakeDigest:
    """Take the digest of state `step`: the coordinator compares digests before it accepts a state as the job's."""

    step: Step


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """The groups that were to read the checkpoint are gone: read it here, and report it with `Prepared`."""


@dataclass(frozen=True, slots=True)
class Over:
    """The job finished at state `step`."""

    step: Step


@dataclass(frozen=True, slots=True)
class LeaveJob:
    """This group is drained: end the loop, and post `LeaveNow`."""


@dataclass(frozen=True, slots=True)
class Fail:
    failure: Failure


Directive = Wait | TakeDigest | ReadCheckpoint | HealFrom | Replay | Attempt | Apply | Over | LeaveJob | Fail


@dataclass(frozen=True)  # without slots: see `values.changed`
class Replica:
    """Everything that a group knows about its job."""

    identity: Identity
    failure_timeout_s: float
    phase: Phase = Phase.OFFLINE
    step: Step = Step(0)
    prepared: Prepared | None = None
    joined: bool = False
    reads: bool = False  # must read the checkpoint, which it had left to other groups
    busy: bool = False  # the training thread was at work when the stream ended, and is not idle yet
    history: HistoryId = HistoryId(0)  # of the state that this group holds
    counts_as_fresh: bool = False  # so the coordinator takes that state, whatever its history
    job_history: HistoryId = HistoryId(0)
    quorum: NewQuorum | None = None
    vote: Vote | None = None
    commit_heard: bool = False  # the step of `vote` is committed, but not applied yet
    heal: Heal | None = None
    pins: frozenset[HealId] = frozenset()
    # For each heal, the state whose digest the coordinator waits for.
    digests_due: Mapping[HealId, Step] = field(default_factory=dict[HealId, Step])
    # The digest of this group's state, once it has been taken; None if it cannot be taken.
    digest: int | None = None
    digest_taken: bool = False
    frontier_step: Step | None = None
    frontier_held: bool = False  # a live group held the frontier at the coordinator's last report
    last_quorum_id: QuorumId = QuorumId(0)
    # The attempt of the last AllComputed.
    all_computed: tuple[QuorumId, Step] = (QuorumId(0), Step(0))
    progress: int = 0  # `Tick.progress` when the last heartbeat was sent
    last_members: int = 0  # how many members the last quorum had
    heartbeat_interval_s: float = 1.0
    next_heartbeat_s: float = 0.0
    heard_s: float = 0.0  # when the last message from the coordinator arrived
    last_tick_s: float = 0.0
    since_s: float = 0.0  # when the current phase began
    dials: int = 0  # without success, since the last Welcome
    streams: int = 0  # how many it has opened
    address_index: int = 0  # index of the current address in `Identity.coordinators`
    term: int = 0  # the highest term of any coordinator so far
    offline_since_s: float | None = None
    offline_reason: str = ""
    # Why a coordinator that is still there has refused the last Hello. The refusal may pass; if it does not, this
    # group fails with `refusal_kind`.
    refusal: str = ""
    refusal_kind: FailureKind = FailureKind.JOIN_REFUSED
    refused_by: int = 0  # its `address_index`
    waiting: str = ""
    drains: bool = False  # this process was asked to end
    drained: bool = False  # this group takes part in no further step once it has applied
    paused: bool = False  # no step begins before the next quorum
    finished: Step | None = None
    failure: Failure | None = None
