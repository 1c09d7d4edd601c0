"""The kinds of faults, and how a fault of each kind is drawn: its victim, how, and for how long."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

# A member of the quorum goes through these in each step.
STEP_PHASES = ("compute", "exchange", "vote", "apply")
# A returning group goes through these, and holds nothing yet that the job could lose.
RETURN_PHASES = ("boot", "heal", "replay")
# At any time in a member's step.
ANY = "any"
PHASES = (*STEP_PHASES, *RETURN_PHASES, ANY)


class FaultKind(StrEnum):
    """A kind of fault. The texts are used in --faults and in the report."""

    KILL = "kill"
    STOP = "stop"
    HANG = "hang"
    LINK = "link"
    PARTITION = "partition"
    COORDINATOR = "coordinator"
    CORRUPT = "corrupt"

    @property
    def on_the_network(self) -> bool:
        """Whether it needs the fault-injecting network."""
        return self in (FaultKind.LINK, FaultKind.PARTITION, FaultKind.CORRUPT)


FAULTS = tuple(FaultKind)
# Besides the groups, the coordinator can be a victim. Also a name in the network.
COORDINATOR = "coordinator"


class Length(StrEnum):
    """The length of a fault, relative to the timeout that applies to it."""

    SHORT = "short"
    LONG = "long"


class Way(StrEnum):
    """Which direction of a group's links a partition cuts."""

    BOTH = "both ways"
    IN = "in"
    OUT = "out"


class End(StrEnum):
    """What happens to the connections of a link at the end of a cut."""

    REPAIRED = "then repaired"
    RESET = "then reset"


class LinkFault(StrEnum):
    """What happens to the link between two groups."""

    DIES = "dies"
    STALLS_SHORTLY = "stalls shortly"
    STALLS_THEN_REPAIRED = "stalls long, then repaired"
    STALLS_THEN_RESET = "stalls long, then reset"


class Damage(StrEnum):
    """Where bits are flipped."""

    ONE_DONOR = "from one donor"
    EACH_DONOR = "from each donor"
    # The others are in a heal.
    IN_AN_EXCHANGE = "in an exchange"


class CoordinatorFault(StrEnum):
    """The victims besides the coordinator."""

    ALONE = "alone"
    WITH_A_GROUP = "with a group"


@dataclass(frozen=True, slots=True)
class HangIn:
    """A hang in one phase."""

    length: Length
    phase: str

    def __str__(self) -> str:
        return f"{self.length}, in {self.phase}"


@dataclass(frozen=True, slots=True)
class Cutoff:
    """A partition of one group from all others."""

    way: Way
    length: Length
    end: End

    def __str__(self) -> str:
        return f"{self.way}, {self.length}, {self.end}"


# The variant of a fault; its text appears in the report.
How: TypeAlias = Length | HangIn | LinkFault | Cutoff | CoordinatorFault | Damage

# Fractions of a timeout: shorter, with a margin for a machine that stalls; and longer.
SHORT = (0.2, 0.7)
LONG = (1.6, 2.6)
# The job waits twice the heartbeat timeout for a hung group, or longer if steps are slow.
LONG_HANG = (3.0, 4.0)
# Fractions of the time that an exchange waits for a link without traffic.
LONG_LINK = (1.2, 1.8)
# This share of the coordinator's deaths also kills a group.
COORDINATOR_AND_GROUP_SHARE = 0.34


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The timeouts that the lengths of faults depend on."""

    heartbeat_s: float = 5.0
    failure_s: float = 60.0

    @property
    def exchange_s(self) -> float:
        """How long an exchange waits without progress."""
        return self.failure_s / 2


SHIPPED = Timeouts()


@dataclass(frozen=True, slots=True)
class Victim:
    """A planned fault.

    Attributes:
        group: the victim, or "coordinator".
        phase: the phase of a step in which it starts, for kinds that have one.
        depth: how far into the phase a kill falls, in [0, 1) of the phase's usual length.
        kind: the kind of fault.
        seconds: how long it lasts.
        how: the variant of its kind; None for a kill.
        other: the other end of a link.
        rank: the process of the group that is struck.
    """

    group: str
    phase: str
    depth: float = 0.0
    kind: FaultKind = FaultKind.KILL
    seconds: float = 0.0
    how: How | None = None
    other: str = ""
    rank: int = 0


def draw(
    rng: random.Random, kind: FaultKind, group: str, other: str, phases: Sequence[str], timeouts: Timeouts
) -> tuple[Victim, ...]:
    """Return a fault of a kind other than a kill, with its companions. `other` is another group."""
    match kind:
        case FaultKind.STOP:
            length, seconds = _length(rng, timeouts.heartbeat_s, LONG)
            return (Victim(group, ANY, kind=kind, seconds=seconds, how=length),)
        case FaultKind.HANG:
            length, seconds = _length(rng, timeouts.heartbeat_s, LONG_HANG)
            phase = rng.choice([phase for phase in STEP_PHASES if phase in phases] or STEP_PHASES)
            return (Victim(group, phase, kind=kind, seconds=seconds, how=HangIn(length, phase)),)
        case FaultKind.LINK:
            return (_link(rng, group, other, timeouts),)
        case FaultKind.PARTITION:
            length, seconds = _length(rng, timeouts.heartbeat_s, LONG)
            cutoff = Cutoff(rng.choice(tuple(Way)), length, rng.choice(tuple(End)))
            return (Victim(group, ANY, kind=kind, seconds=seconds, how=cutoff),)
        case FaultKind.COORDINATOR:
            together = rng.random() < COORDINATOR_AND_GROUP_SHARE
            how = CoordinatorFault.WITH_A_GROUP if together else CoordinatorFault.ALONE
            victim = Victim(COORDINATOR, ANY, kind=kind, how=how)
            return (victim, Victim(group, ANY, rng.random())) if together else (victim,)
        case FaultKind.CORRUPT:
            damage = rng.choice(tuple(Damage))
            victim = Victim(group, ANY, kind=kind, how=damage)
            # Damage in a heal needs a victim of a kill, which then heals.
            in_heal = damage is not Damage.IN_AN_EXCHANGE
            return (victim, Victim(group, ANY, rng.random())) if in_heal else (victim,)
        case FaultKind.KILL:
            raise AssertionError("kills are drawn with their phases")


def _length(rng: random.Random, timeout_s: float, long: tuple[float, float]) -> tuple[Length, float]:
    length, bounds = rng.choice(((Length.SHORT, SHORT), (Length.LONG, long)))
    return length, round(timeout_s * rng.uniform(*bounds), 3)


def _link(rng: random.Random, group: str, other: str, timeouts: Timeouts) -> Victim:
    how = rng.choice(tuple(LinkFault))
    bounds = SHORT if how is LinkFault.STALLS_SHORTLY else LONG_LINK
    seconds = 0.0 if how is LinkFault.DIES else round(timeouts.exchange_s * rng.uniform(*bounds), 3)
    return Victim(group, ANY, kind=FaultKind.LINK, seconds=seconds, how=how, other=other)
