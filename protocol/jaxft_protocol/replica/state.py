"""What can happen to a replica, what it must then do, and what it tells the training thread."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxft_protocol.messages import (
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
    Vote,
)


class Phase(enum.Enum):
    """Where this group stands. docs/protocol.md draws the moves between them."""

    OFFLINE = "offline"  # no stream to the coordinator; tries again
    GREETING = "greeting"  # said Hello, awaits Welcome
    PRESENT = "present"  # welcome; the training thread still compiles
    JOINING = "joining"  # said Join; awaits a quorum or a heal
    HEALING = "healing"  # fetches a snapshot
    FOLLOWING = "following"  # holds a snapshot, replays the log up to the frontier
    WORKING = "working"  # in a quorum: computes and exchanges
    VOTED = "voted"  # awaits the decision
    APPLYING = "applying"  # heard COMMIT; the training thread applies
    FINISHED = "finished"  # the job is over
    LEAVING = "leaving"  # goes on purpose; serves its heals until Goodbye
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Identity:
    job: str
    group: GroupName
    incarnation: Incarnation
    address: str
    coordinator: str  # host:port, or several with commas between them

    @property
    def coordinators(self) -> tuple[str, ...]:
        return tuple(address.strip() for address in self.coordinator.split(","))


class FailureKind(enum.Enum):
    """Why a group cannot go on. The session has an error class for each."""

    COORDINATOR_UNREACHABLE = "coordinator unreachable"
    JOIN_REFUSED = "join refused"
    EVICTED = "evicted"
    CANNOT_HEAL = "cannot heal"
    DIVERGED = "diverged"
    NONFINITE = "nonfinite"
    JOB_HALTED = "job halted"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why this group cannot go on, and the text that the user reads."""

    kind: FailureKind
    text: str


# ---- events: from the training thread ----


@dataclass(frozen=True, slots=True)
class Prepared:
    """Both programs are compiled; the group holds state `step` and wants to take part.

    `history` is that of the checkpoint that the state came from, 0 for a fresh one. `heals_only`: it is a fresh one,
    for others have read the job's checkpoint; nothing may begin with it.
    """

    step: Step
    digest: int | None  # of that state; None if it cannot be taken
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    min_replicas: int = 0
    history: HistoryId = HistoryId(0)
    spare: bool = False
    heals_only: bool = False
    total_shards: int | None = None  # None: one for each member of the quorum


@dataclass(frozen=True, slots=True)
class Exchanged:
    """This group holds the sum of `step`, and computed from the state with that fingerprint, if it was due.

    `nonfinite` says which of the means is not finite, where the job is to stop then.
    """

    quorum_id: QuorumId
    step: Step
    digest: int | None = None
    nonfinite: str = ""


@dataclass(frozen=True, slots=True)
class ExchangeBroke:
    quorum_id: QuorumId
    step: Step
    accused: tuple[GroupName, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Applied:
    """The training thread holds state `step` now."""

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


# ---- events: from the session ----


@dataclass(frozen=True, slots=True)
class Connected:
    pass


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The stream has ended. `busy`: the training thread is at work, here or elsewhere; `Idle` says when it waits.

    A group joins only when its training thread waits to be told what to do: so one that hangs stays outside, and
    what Join says of its state is so.
    """

    reason: str
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Idle:
    """The training thread, which was busy when the stream ended, waits for what it is to do."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes, and this is what the training thread does.

    Attributes:
        computed: of which quorum and step it has computed its shards last.
        away: it is not in a step: between two calls, or it compiles, or saves a checkpoint.
        progress: grows whenever it gets on with its step.
    """

    computed: tuple[QuorumId, Step] = (QuorumId(0), Step(0))
    away: bool = False
    progress: int = 0


Event = (
    Prepared
    | Exchanged
    | ExchangeBroke
    | Applied
    | Digested
    | Healed
    | Replayed
    | HealBroke
    | LeaveNow
    | Connected
    | Disconnected
    | Heard
    | Idle
    | Tick
)


# ---- effects ----


@dataclass(frozen=True, slots=True)
class Say:
    message: GroupMessage


@dataclass(frozen=True, slots=True)
class Dial:
    """Open the stream to `address`, after `delay_s`."""

    delay_s: float
    address: str = ""


@dataclass(frozen=True, slots=True)
class HangUp:
    """End the stream: who is at its other end is not to be followed."""

    reason: str


@dataclass(frozen=True, slots=True)
class PinState:
    heal_id: HealId
    step: Step
    log_only: bool = False


@dataclass(frozen=True, slots=True)
class ReleasePin:
    heal_id: HealId


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log: a transition that people should see."""

    text: str
    warning: bool = False


Effect = Say | Dial | HangUp | PinState | ReleasePin | Note


# ---- directives: what the training thread should be doing, as a function of the state ----


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until this changes; `reason` says for whom."""

    reason: str


@dataclass(frozen=True, slots=True)
class HealFrom:
    heal: Heal


@dataclass(frozen=True, slots=True)
class Replay:
    """Fetch and apply the means of step `step`; the job stands at state `until`."""

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
    """Take the digest of state `step`: the coordinator compares states before it lets one be the job's."""

    step: Step


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """Those to whom this group had left the checkpoint are gone: read it here, and say so with `Prepared`."""


@dataclass(frozen=True, slots=True)
class Over:
    """The job finished at state `step`."""

    step: Step


@dataclass(frozen=True, slots=True)
class Fail:
    failure: Failure


Directive = Wait | TakeDigest | ReadCheckpoint | HealFrom | Replay | Attempt | Apply | Over | Fail


@dataclass(frozen=True)  # without slots: see `values.changed`
class Replica:
    """All that a group knows of its job."""

    identity: Identity
    failure_timeout_s: float
    phase: Phase = Phase.OFFLINE
    step: Step = Step(0)
    prepared: Prepared | None = None
    joined: bool = False
    reads: bool = False  # the checkpoint, which it had left to others
    busy: bool = False  # the training thread was at work when the stream ended, and has not come to wait yet
    history: HistoryId = HistoryId(0)  # of the state that this group holds
    job_history: HistoryId = HistoryId(0)
    quorum: NewQuorum | None = None
    vote: Vote | None = None
    commit_heard: bool = False  # the step of `vote` counts, and is not applied yet
    heal: Heal | None = None
    pins: frozenset[HealId] = frozenset()
    # Of which state the coordinator awaits the digest, for which heals.
    digests_due: Mapping[HealId, Step] = field(default_factory=dict[HealId, Step])
    # Of the state that this group holds, once it has been taken; None if it cannot be.
    digest: int | None = None
    digest_taken: bool = False
    frontier_step: Step | None = None
    frontier_held: bool = False  # a live group held the frontier when this one was welcomed
    last_quorum_id: QuorumId = QuorumId(0)
    # Of which attempt this group was told that all members have computed their shards.
    all_computed: tuple[QuorumId, Step] = (QuorumId(0), Step(0))
    progress: int = 0  # of the training thread, when the last heartbeat was sent
    last_members: int = 0  # of that quorum
    heartbeat_interval_s: float = 1.0
    next_heartbeat_s: float = 0.0
    heard_s: float = 0.0  # when the coordinator last said something
    last_tick_s: float = 0.0
    since_s: float = 0.0  # when the present phase began
    dials: int = 0  # in vain, since the last Welcome
    place: int = 0  # of the coordinator that is dialled, among the addresses
    term: int = 0  # of the coordinator, the highest that was met
    offline_since_s: float | None = None
    offline_reason: str = ""
    waiting: str = ""
    finished: Step | None = None
    failure: Failure | None = None
