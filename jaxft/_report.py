"""A group's report of each step."""

from dataclasses import dataclass, field
from typing import Any

from jaxft_protocol.messages import NewQuorum


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
    """The last call of the step, as this group saw it. Times in seconds of wall clock.

    Attributes:
        step: committed steps after it, as `Manager.step`.
        attempts: how often this group tried the step; 1 without a failure, 0 if it only caught up.
        quorum_id: the quorum that committed it.
        members: the groups of that quorum, in order.
        shards: the shards that this group computed, each time it computed one. A number that stands here twice
            is work that was lost.
        compute_s: in compute and in packing its results.
        exchange_s: connecting to the peers and summing with them.
        vote_s: from the vote to the decision.
        apply_s: in apply.
        joined: groups that came into the quorum since the last report.
        left: groups that went, with the reason.
        heal: set if this group had to fetch the job's state first: from which `donors`, the `snapshot_step`, the
            `replayed_steps` on top of it, the `transferred_bytes`, and how many `seconds` it took.
        nonfinite: which of the step's means was not finite, as far as the step's `nonfinite` has this looked for.
            With "skip" such a step has changed nothing.
        writer: the group that writes for the job at this step (`Manager.is_writer`); empty if this group has healed.
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
    writer: str = ""


@dataclass(slots=True)
class Record:
    """What happens in a call of the step, as it happens; `report` makes the report of it."""

    metrics: Any = None  # of the last step that it committed or replayed
    caught_up: bool = False  # it has healed or replayed
    # The rest as in the report.
    quorum_id: int = 0
    members: tuple[str, ...] = ()
    attempts: int = 0
    shards: list[int] = field(default_factory=list[int])
    compute_s: float = 0.0
    exchange_s: float = 0.0
    vote_s: float = 0.0
    apply_s: float = 0.0
    joined: list[str] = field(default_factory=list[str])
    left: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    heal: HealReport | None = None
    nonfinite: str = ""

    def next_call(self) -> "Record":
        """The record of the next call, which begins in the same quorum."""
        return Record(quorum_id=self.quorum_id, members=self.members)

    def entered(self, quorum: NewQuorum) -> None:
        """Note who has come and who is gone since the last quorum."""
        members = tuple(member.group for member in quorum.members)
        reasons = {str(change.group): change.reason for change in quorum.left}
        self.left += [(name, reasons.get(name, "")) for name in self.members if name not in members]
        self.joined += [name for name in members if self.members and name not in self.members]
        self.quorum_id, self.members = quorum.quorum_id, members

    def caught_up_with(self, metrics: Any) -> None:
        """Leave out earlier attempts: they were of an earlier step, or did not count."""
        self.metrics, self.caught_up = metrics, True
        self.attempts = 0
        self.shards.clear()

    @property
    def committed_by(self) -> tuple[str, ...]:
        """The quorum that committed the step, if this group took part in that."""
        return self.members if self.attempts else ()

    def report(self, step: int, writer: str = "") -> StepReport:
        return StepReport(
            step=step,
            attempts=self.attempts,
            quorum_id=self.quorum_id,
            members=self.members,
            shards=tuple(self.shards),
            compute_s=self.compute_s,
            exchange_s=self.exchange_s,
            vote_s=self.vote_s,
            apply_s=self.apply_s,
            joined=tuple(self.joined),
            left=tuple(self.left),
            heal=self.heal,
            nonfinite=self.nonfinite,
            writer=writer,
        )
