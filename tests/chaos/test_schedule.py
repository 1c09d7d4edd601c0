import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.storm._faults import PHASES, RETURN_PHASES
from jaxft_launch.storm._schedule import FIRST_STEP, Kinds, Strike, deal_ranks, plan_strikes

GROUPS = ("group-0", "group-1", "group-2")
LAST_STEP = 4000
SEEDS = range(3)


def plan(seed: int = 1, **changes: Any) -> tuple[Strike, ...]:
    return plan_strikes(**{"groups": GROUPS, "kills": 100, "seed": seed, "last_step": LAST_STEP, **changes})


def groups_of(strikes: Sequence[Strike]) -> list[str]:
    return [victim.group for strike in strikes for victim in strike.victims]


def phases_of(strikes: Sequence[Strike]) -> list[str]:
    return [victim.phase for strike in strikes for victim in strike.victims]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_phase_and_every_group_comes_up_equally_often(seed: int) -> None:
    strikes = plan(seed)
    assert strikes == plan(seed)
    phases, groups = Counter(phases_of(strikes)), Counter(groups_of(strikes))
    assert sum(phases.values()) == sum(groups.values()) == 100
    assert set(phases) == set(PHASES)
    assert max(phases.values()) - min(phases.values()) <= 1
    assert (
        max(groups.values()) - min(groups.values()) <= 10
    )  # strikes on returns hit a group that was hit before


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_in_each_phase_every_rank_is_struck_equally_often(nproc: int) -> None:
    strikes = plan()
    dealt = deal_ranks(strikes, nproc=nproc, seed=1)
    assert dealt == deal_ranks(strikes, nproc=nproc, seed=1)
    assert groups_of(dealt) == groups_of(strikes)
    for phase in PHASES:
        ranks = Counter(v.rank for strike in dealt for v in strike.victims if v.phase == phase)
        assert max(ranks[rank] for rank in range(nproc)) - min(ranks[rank] for rank in range(nproc)) <= 1
        assert set(ranks) <= set(range(nproc))


@pytest.mark.parametrize("groups", [2, 3, 5])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_strike_never_hits_all_groups_nor_one_group_twice(groups: int, seed: int) -> None:
    for strike in plan(seed, groups=tuple(f"g{number}" for number in range(groups))):
        names = {victim.group for victim in strike.victims}
        assert len(names) == len(strike.victims) <= min(2, groups - 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_return_is_struck_only_just_after_its_group_was(seed: int) -> None:
    strikes = plan(seed)
    assert not strikes[0].on_return
    for former, strike in itertools.pairwise(strikes):
        if strike.on_return:
            assert strike.step == former.step
            assert {victim.group for victim in strike.victims} <= {victim.group for victim in former.victims}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_steps_rise_to_the_last_and_some_strikes_follow_soon(seed: int) -> None:
    strikes = plan(seed)
    steps = [strike.step for strike in strikes]
    assert steps == sorted(steps)
    assert steps[0] == FIRST_STEP
    assert LAST_STEP - 1 <= steps[-1] <= LAST_STEP
    gaps = [b - a for a, b in itertools.pairwise(steps) if b > a]
    assert 4 * min(gaps) < max(gaps)


@pytest.mark.parametrize("kills", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_few_kills_can_be_planned_too(kills: int, seed: int) -> None:
    strikes = plan(seed, kills=kills)
    assert len(groups_of(strikes)) == kills
    assert strikes[0].victims[0].phase not in RETURN_PHASES


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"groups": ("group-0",)}, "at least 2 groups, not 1"),
        ({"kills": 0}, "--kills must be 1 or more, not 0"),
        ({"last_step": FIRST_STEP}, "too short"),
        (
            {"kinds": Kinds(phases=("voting",))},
            "--phases does not know voting; the phases are compute, exchange",
        ),
        ({"kinds": Kinds(phases=("heal", "boot"))}, "--phases heal,boot hits only returning groups"),
        ({"kinds": Kinds(phases=())}, "Name at least one"),
    ],
)
def test_what_cannot_be_planned_says_why(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        plan(**changes)
