"""The kinds of faults, and how one of each is drawn: whom it hits, how, and for how long."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from jaxft._chaos._phases import ANY, STEP_PHASES

KILL, STOP, HANG, LINK, PARTITION, NO_COORDINATOR, CORRUPT = FAULTS = (
    *("kill", "stop", "hang", "link", "partition", "coordinator", "corrupt"),
)
# Beside the groups, one more that can be hit, and a name of the network's.
COORDINATOR = "coordinator"
# These need a network that can be broken.
ON_THE_NETWORK = (LINK, PARTITION, CORRUPT)

# Shorter than a timeout, with room for a machine that stalls; and longer.
SHORT = (0.2, 0.7)
LONG = (1.6, 2.6)
# One that hangs is given twice the heartbeat timeout, or more where steps are slow.
LONG_HANG = (3.0, 4.0)
# Of an exchange's patience with a link that carries nothing.
LONG_LINK = (1.2, 1.8)
# The other ways for something to arrive damaged are in a heal.
IN_AN_EXCHANGE = "in an exchange"
# So many deaths of the coordinator take a group with them.
COORDINATOR_AND_GROUP_SHARE = 0.34


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Those that the lengths of faults are measured by."""

    heartbeat_s: float = 5.0
    failure_s: float = 60.0

    @property
    def exchange_s(self) -> float:
        """How long an exchange waits while nothing moves."""
        return self.failure_s / 2


SHIPPED = Timeouts()


@dataclass(frozen=True, slots=True)
class Victim:
    """A fault to be.

    Attributes:
        group: whom it hits, or "coordinator".
        phase: where in a step it falls, for those that fall there.
        depth: how far into the phase a kill falls, in [0, 1) of the phase's usual length.
        kind: what is done.
        seconds: for how long.
        how: which of its kinds.
        other: the other end of a link.
    """

    group: str
    phase: str
    depth: float = 0.0
    kind: str = KILL
    seconds: float = 0.0
    how: str = ""
    other: str = ""


def draw(
    rng: random.Random, kind: str, group: str, other: str, phases: Sequence[str], timeouts: Timeouts
) -> tuple[Victim, ...]:
    """Return a fault of a kind other than "kill", and what falls together with it. `other` is another group."""
    match kind:
        case "stop":
            how, seconds = _short_or_long(rng, timeouts.heartbeat_s, LONG)
            return (Victim(group, ANY, kind=kind, seconds=seconds, how=how),)
        case "hang":
            how, seconds = _short_or_long(rng, timeouts.heartbeat_s, LONG_HANG)
            phase = rng.choice([phase for phase in STEP_PHASES if phase in phases] or STEP_PHASES)
            return (Victim(group, phase, kind=kind, seconds=seconds, how=f"{how}, in {phase}"),)
        case "link":
            return (_link(rng, group, other, timeouts),)
        case "partition":
            how, seconds = _short_or_long(rng, timeouts.heartbeat_s, LONG)
            way = rng.choice(("both ways", "in", "out"))
            end = rng.choice(("then mended", "then reset"))
            return (Victim(group, ANY, kind=kind, seconds=seconds, how=f"{way}, {how}, {end}"),)
        case "coordinator":
            together = rng.random() < COORDINATOR_AND_GROUP_SHARE
            victim = Victim(COORDINATOR, ANY, kind=kind, how="with a group" if together else "alone")
            return (victim, Victim(group, ANY, rng.random())) if together else (victim,)
        case "corrupt":
            how = rng.choice(("from one donor", "from each donor", IN_AN_EXCHANGE))
            if how == IN_AN_EXCHANGE:
                return (Victim(group, ANY, kind=kind, how=how),)
            # What arrives damaged is what the victim of a kill fetches.
            return (Victim(group, ANY, kind=kind, how=how), Victim(group, ANY, rng.random()))
        case _:
            raise AssertionError(kind)


def _short_or_long(rng: random.Random, timeout_s: float, long: tuple[float, float]) -> tuple[str, float]:
    how, bounds = rng.choice((("short", SHORT), ("long", long)))
    return how, round(timeout_s * rng.uniform(*bounds), 3)


def _link(rng: random.Random, group: str, other: str, timeouts: Timeouts) -> Victim:
    way = rng.choice(("dies", "stalls shortly", "stalls long, then mended", "stalls long, then reset"))
    bounds = SHORT if way == "stalls shortly" else LONG_LINK
    seconds = 0.0 if way == "dies" else round(timeouts.exchange_s * rng.uniform(*bounds), 3)
    return Victim(group, ANY, kind=LINK, seconds=seconds, how=way, other=other)
