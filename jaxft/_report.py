"""What a group says of each step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealReport:
    """How this group got back the job's state.

    Attributes:
        snapshot_step: the step whose state was fetched.
        replayed_steps: how many committed steps were applied on top of it.
        transferred_bytes: state and logged means together.
        seconds: from the plan to the moment the group stood at the frontier.
        donors: the groups that served.
    """

    snapshot_step: int
    replayed_steps: int
    transferred_bytes: int
    seconds: float
    donors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the last call of the step did, as this group saw it. Times in seconds of wall clock.

    Attributes:
        step: committed steps after it (what `Manager.step` says).
        attempts: how often this group tried the step; 1 without a failure, 0 if it only caught up.
        quorum_id: the quorum that committed it.
        members: the groups of that quorum, in order.
        shards: the shards that this group computed, each time it computed one. A number that stands here twice
            is work that was lost.
        compute_s: in compute and in packing what it gave.
        exchange_s: connecting to the peers and summing with them.
        vote_s: from the vote to the decision.
        apply_s: in apply.
        joined: groups that came into the quorum since the last report.
        left: groups that went, with the reason.
        heal: set if this group had to fetch the job's state first.
        nonfinite: which of the step's means was not finite, as far as the step's `nonfinite` has this looked for.
            With "skip" such a step has changed nothing.
    """

    step: int = 0
    attempts: int = 0
    quorum_id: int = 0
    members: tuple[str, ...] = ()
    shards: tuple[int, ...] = ()
    compute_s: float = 0.0
    exchange_s: float = 0.0
    vote_s: float = 0.0
    apply_s: float = 0.0
    joined: tuple[str, ...] = ()
    left: tuple[tuple[str, str], ...] = ()
    heal: HealReport | None = None
    nonfinite: str = ""
