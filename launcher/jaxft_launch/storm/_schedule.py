"""The plan of a storm (victims, phases and steps): a pure function of the seed and the job's parameters.

The phases are dealt like a deck of cards, so that each occurs equally often; the victims are the groups that have
been struck least. A group can be struck in a phase of its return only right after another strike: such a strike
follows at once, and hits the same victim again. Some strikes hit two groups together, but never all.

With other faults besides kills, all kinds also occur equally often, in any order.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.storm._faults import (
    ANY,
    FAULTS,
    PHASES,
    RETURN_PHASES,
    SHIPPED,
    FaultKind,
    Timeouts,
    Victim,
    draw,
)

_T = TypeVar("_T")

# The number of strikes per kill that hit two groups at once: one strike in eight.
DOUBLES_PER_KILL = 0.11
# The share of strikes that follow so soon that the last victim is usually still away.
CLOSE_SHARE = 0.25
# Half of the deaths occur exactly at the start of a phase, the others somewhere in it.
AT_BEGINNING_SHARE = 0.5
# Steps before the first strike, so that all groups have joined and left the first state behind.
FIRST_STEP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """The ingredients of a plan: kinds of faults, the phases of kills and hangs, and the job's timeouts."""

    faults: Sequence[FaultKind] = (FaultKind.KILL,)
    phases: Sequence[str] = PHASES
    timeouts: Timeouts = SHIPPED


KILLS = Kinds()


@dataclass(frozen=True, slots=True)
class Strike:
    """Faults that occur together, once the job has committed `step` steps."""

    step: int
    victims: tuple[Victim, ...]

    @property
    def on_return(self) -> bool:
        """Whether it hits a returning group."""
        return self.victims[0].phase in RETURN_PHASES


def parse_faults(names: Sequence[str]) -> tuple[FaultKind, ...]:
    """Return the named kinds. Raises LaunchError for an unknown name."""
    if unknown := set(names) - set(FAULTS):
        raise LaunchError(
            f"--faults does not know {', '.join(sorted(unknown))}; the kinds are {', '.join(FAULTS)}."
        )
    return tuple(map(FaultKind, names))


def plan_strikes(
    groups: Sequence[str],
    *,
    kills: int,
    seed: int,
    last_step: int,
    kinds: Kinds = KILLS,
) -> tuple[Strike, ...]:
    """Return strikes with `kills` faults in total, in the order of their steps, none later than `last_step`.

    A fault that needs an additional kill, such as damage in a heal, counts once.

    Args:
        groups: all groups of the job.
        kills: the number of faults of any kind; by default, of processes to kill.
        seed: determines the plan.
        last_step: the latest step for the last strike, in committed steps.
        kinds: the kinds of faults; by default, kills in all phases.

    Raises:
        LaunchError: there is no such plan.
    """
    _check(groups, kills=kills, last_step=last_step, kinds=kinds)
    rng = random.Random(seed)
    if tuple(kinds.faults) == (FaultKind.KILL,):
        dealt = _deal(rng, groups, _deck(rng, kills, kinds.phases))
    else:
        dealt = _deal_all_kinds(rng, groups, kills, kinds)
    gaps = [_gap(rng, former, victims) for former, victims in zip([(), *dealt], dealt, strict=False)]
    unit_steps = (last_step - FIRST_STEP) / max(1.0, sum(gaps))
    strikes: list[Strike] = []
    passed = 0.0
    for victims, gap in zip(dealt, gaps, strict=True):
        passed += gap
        strikes.append(Strike(FIRST_STEP + int(passed * unit_steps), victims))
    return tuple(strikes)


def deal_ranks(strikes: Sequence[Strike], *, nproc: int, seed: int) -> tuple[Strike, ...]:
    """Give every victim a process of its group's `nproc`: in each phase, and for each kind of fault, all equally
    often."""
    rng = random.Random(f"ranks {seed}")
    decks: dict[str, list[int]] = {}

    def dealt(victim: Victim) -> Victim:
        deck = decks.setdefault(f"{victim.kind} {victim.phase}", [])
        if not deck:
            deck += rng.sample(range(nproc), nproc)
        return replace(victim, rank=deck.pop())

    return tuple(replace(strike, victims=tuple(map(dealt, strike.victims))) for strike in strikes)


def _check(groups: Sequence[str], *, kills: int, last_step: int, kinds: Kinds) -> None:
    if len(groups) < 2:
        raise LaunchError(f"A storm needs at least 2 groups, not {len(groups)}: one must keep the state.")
    if kills < 1:
        raise LaunchError(f"--kills must be 1 or more, not {kills}.")
    if last_step <= FIRST_STEP:
        raise LaunchError(f"The job is too short: strikes start after step {FIRST_STEP}. Give it more steps.")
    if unknown := set(kinds.phases) - set(PHASES):
        raise LaunchError(
            f"--phases does not know {', '.join(sorted(unknown))}; the phases are {', '.join(PHASES)}."
        )
    if not kinds.faults:
        raise LaunchError(f"--faults is empty; the kinds are {', '.join(FAULTS)}.")
    if set(kinds.phases) <= set(RETURN_PHASES):
        raise LaunchError(
            f"--phases {','.join(kinds.phases)} hits only returning groups, but no group would ever leave. Name "
            "at least one other phase."
        )


def _deal_all_kinds(
    rng: random.Random, groups: Sequence[str], count: int, kinds: Kinds
) -> list[tuple[Victim, ...]]:
    """Give every fault a victim, all kinds equally often. A kill on a return stays after the kill that caused it."""
    drawn = _evenly(rng, count, kinds.faults)
    hands: list[list[tuple[Victim, ...]]] = []
    kills = drawn.count(FaultKind.KILL)
    for victims in _deal(rng, groups, _deck(rng, kills, kinds.phases)) if kills else []:
        if victims[0].phase in RETURN_PHASES:
            hands[-1].append(victims)
        else:
            hands.append([victims])
    struck: Counter[str] = Counter()
    for kind in drawn:
        if kind is FaultKind.KILL:
            continue
        (group,) = _least_struck(rng, struck, groups, 1)
        struck[group] += 1
        other = rng.choice([name for name in groups if name != group])
        hands.append([draw(rng, kind, group, other, kinds.phases, kinds.timeouts)])
    rng.shuffle(hands)
    return [victims for hand in hands for victims in hand]


def _evenly(rng: random.Random, count: int, names: Sequence[_T]) -> list[_T]:
    """Return `count` of the names in any order, each equally often."""
    deck: list[_T] = []
    while len(deck) < count:
        deck += rng.sample(names, len(names))
    return deck[:count]


def _deck(rng: random.Random, kills: int, phases: Sequence[str]) -> list[str]:
    """Return one phase for each kill, as evenly as possible; the first is no phase of a return."""
    deck = _evenly(rng, kills, phases)
    rng.shuffle(deck)
    opener = next((index for index, phase in enumerate(deck) if phase not in RETURN_PHASES), None)
    if opener is None:  # fewer kills than phases, and only phases of a return were drawn
        deck[0] = next(phase for phase in phases if phase not in RETURN_PHASES)
    else:
        deck[0], deck[opener] = deck[opener], deck[0]
    return deck


def _deal(rng: random.Random, groups: Sequence[str], deck: list[str]) -> list[tuple[Victim, ...]]:
    """Give every phase of the deck a victim."""
    struck: Counter[str] = Counter()
    dealt: list[tuple[Victim, ...]] = []
    on_members = sum(phase not in RETURN_PHASES for phase in deck)
    can_double = len(groups) > 2
    doubles = min(round(DOUBLES_PER_KILL * len(deck)), on_members // 2) if can_double else 0
    singles = on_members - 2 * doubles
    while deck:
        phases = [deck.pop(0)]
        if phases[0] in RETURN_PHASES:
            names = _least_struck(rng, struck, [victim.group for victim in dealt[-1]], 1)
        else:
            if rng.random() * (singles + doubles) < doubles:
                doubles -= 1
                phases.append(deck.pop(next(i for i, phase in enumerate(deck) if phase not in RETURN_PHASES)))
            else:
                singles -= 1
            names = _least_struck(rng, struck, groups, len(phases))
        struck.update(names)
        dealt.append(tuple(Victim(*pair, _depth(rng, pair[1])) for pair in zip(names, phases, strict=True)))
    return dealt


def _least_struck(
    rng: random.Random, struck: Counter[str], candidates: Sequence[str], count: int
) -> list[str]:
    shuffled = rng.sample(candidates, len(candidates))
    return sorted(shuffled, key=lambda group: struck[group])[:count]


def _depth(rng: random.Random, phase: str) -> float:
    at_beginning = rng.random() < AT_BEGINNING_SHARE
    depth = rng.random()
    # A boot is not announced, and "any" has no start.
    return 0.0 if at_beginning and phase not in ("boot", ANY) else depth


def _gap(rng: random.Random, former: tuple[Victim, ...], victims: tuple[Victim, ...]) -> float:
    """Return the distance to the previous strike, in units of a return."""
    close, gap, close_gap = rng.random() < CLOSE_SHARE, rng.uniform(0.75, 1.25), rng.uniform(0.0, 0.4)
    if not former or victims[0].phase in RETURN_PHASES:
        return 0.0
    # A group that was struck on its return needs a whole return again.
    return close_gap if close else gap + (1.0 if former[0].phase in RETURN_PHASES else 0.0)
