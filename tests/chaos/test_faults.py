"""Plans with all kinds of faults: how often each occurs, and its details."""

import random
from collections import Counter
from typing import Any

import pytest

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.storm._faults import (
    COORDINATOR,
    FAULTS,
    PHASES,
    STEP_PHASES,
    Damage,
    FaultKind,
    HangIn,
    LinkFault,
    Timeouts,
    Victim,
    draw,
)
from jaxft_launch.storm._schedule import Kinds, Strike, parse_faults, plan_strikes

GROUPS = ("group-0", "group-1", "group-2")
LAST_STEP = 4000
TIMEOUTS = Timeouts(heartbeat_s=2.0, failure_s=10.0)
ALL = Kinds(faults=FAULTS, timeouts=TIMEOUTS)
SEEDS = range(3)


def plan(seed: int = 1, **changes: Any) -> tuple[Strike, ...]:
    fields = {"groups": GROUPS, "kills": 70, "seed": seed, "last_step": LAST_STEP, "kinds": ALL}
    return plan_strikes(**{**fields, **changes})


def first_kinds(strikes: tuple[Strike, ...]) -> Counter[str]:
    """The main fault of each strike: a kill that accompanies another fault belongs to that."""
    return Counter(
        victim.kind
        for strike in strikes
        for victim in strike.victims
        if victim.kind != FaultKind.KILL or all(other.kind == FaultKind.KILL for other in strike.victims)
    )


def draws(kind: FaultKind, count: int = 200) -> list[Victim]:
    rng = random.Random(5)
    return [draw(rng, kind, "group-1", "group-2", PHASES, TIMEOUTS)[0] for _ in range(count)]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_kind_comes_up_equally_often(seed: int) -> None:
    assert first_kinds(plan(seed)) == dict.fromkeys(FAULTS, 10)
    counts = first_kinds(plan(seed, kills=24))
    assert sum(counts.values()) == 24
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("kind", [FaultKind.STOP, FaultKind.HANG, FaultKind.PARTITION])
def test_faults_are_shorter_and_longer_than_the_heartbeat_timeout(kind: FaultKind) -> None:
    lengths_s = [victim.seconds for victim in draws(kind)]
    assert 0.2 * 2.0 <= min(lengths_s) < 2.0 < max(lengths_s) <= 4 * 2.0
    shorter = sum(length_s < 2.0 for length_s in lengths_s)
    assert 60 <= shorter <= 140
    for victim in draws(kind):
        assert ("short" in str(victim.how)) == (victim.seconds < 2.0)


def test_a_hang_is_in_a_phase_of_the_step() -> None:
    hung = draws(FaultKind.HANG)
    assert {victim.phase for victim in hung} == set(STEP_PHASES)
    assert all(isinstance(v.how, HangIn) and v.how.phase == v.phase for v in hung)
    rng = random.Random(5)
    only = {draw(rng, FaultKind.HANG, "group-1", "", ("vote", "boot"), TIMEOUTS)[0].phase for _ in range(50)}
    assert only == {"vote"}


def test_a_link_dies_or_stalls_for_shorter_or_longer_than_an_exchange_waits() -> None:
    victims = draws(FaultKind.LINK)
    assert {(victim.group, victim.other) for victim in victims} == {("group-1", "group-2")}
    assert {victim.how for victim in victims} == set(LinkFault)
    for victim in victims:
        assert (victim.seconds == 0.0) == (victim.how is LinkFault.DIES)
        assert ("long" in str(victim.how)) == (victim.seconds > TIMEOUTS.exchange_s)


def test_some_deaths_of_the_coordinator_take_a_group_with_them() -> None:
    rng = random.Random(5)
    drawn = [draw(rng, FaultKind.COORDINATOR, "group-1", "", PHASES, TIMEOUTS) for _ in range(200)]
    assert all(victims[0].group == COORDINATOR for victims in drawn)
    together = [victims for victims in drawn if len(victims) == 2]
    assert 40 <= len(together) <= 100
    assert all((victims[1].group, victims[1].kind) == ("group-1", FaultKind.KILL) for victims in together)


def test_what_is_to_arrive_damaged_in_a_heal_needs_a_group_that_comes_back() -> None:
    rng = random.Random(5)
    hows: set[Damage] = set()
    for _ in range(50):
        corrupted, *killed = draw(rng, FaultKind.CORRUPT, "group-1", "", PHASES, TIMEOUTS)
        assert isinstance(corrupted.how, Damage)
        hows.add(corrupted.how)
        assert (corrupted.group, corrupted.kind) == ("group-1", "corrupt")
        in_heal = corrupted.how is not Damage.IN_AN_EXCHANGE
        assert [(victim.group, victim.kind) for victim in killed] == [("group-1", FaultKind.KILL)] * in_heal
    assert hows == set(Damage)


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        (("kill", "earthquake"), "--faults does not know earthquake; the kinds are kill, stop, hang, link"),
        ((), "--faults is empty"),
    ],
)
def test_what_cannot_be_planned_says_why(faults: tuple[str, ...], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        plan(kinds=Kinds(faults=parse_faults(faults)))
