from collections import Counter

import pytest
from demo_cases import GROUPS

from lab._killer import MAX_DELAY_STEPS, Killer, Strike, plan_strikes


@pytest.mark.parametrize("seed", range(20))
def test_each_group_is_struck_once_with_a_delay_of_up_to_two_steps(seed: int) -> None:
    strikes = plan_strikes(GROUPS, kills=3, seed=seed)
    assert sorted(strike.group for strike in strikes) == sorted(GROUPS)
    assert all(0 <= strike.delay_steps <= MAX_DELAY_STEPS for strike in strikes)


def test_each_process_of_each_group_is_struck_once() -> None:
    strikes = plan_strikes(GROUPS, kills=6, seed=4, nproc=2)
    assert sorted((strike.group, strike.rank) for strike in strikes) == [
        (group, rank) for group in GROUPS for rank in (0, 1)
    ]


def test_a_seed_names_the_plan_and_seeds_differ() -> None:
    assert plan_strikes(GROUPS, kills=3, seed=5) == plan_strikes(GROUPS, kills=3, seed=5)
    assert len({plan_strikes(GROUPS, kills=3, seed=seed) for seed in range(20)}) == 20
    assert {plan_strikes(GROUPS, kills=3, seed=seed)[0].group for seed in range(20)} == set(GROUPS)


@pytest.mark.parametrize("kills", range(10))
def test_more_or_fewer_kills_are_spread_evenly(kills: int) -> None:
    struck = Counter(strike.group for strike in plan_strikes(GROUPS, kills=kills, seed=1))
    assert struck.total() == kills
    assert max((struck[group] for group in GROUPS), default=0) - min(struck[group] for group in GROUPS) <= 1


def test_a_strike_waits_for_the_whole_job_and_then_for_its_delay() -> None:
    strike = Strike("group-1", delay_steps=1.5)
    killer = Killer([strike])
    assert killer.due(0.0, None) is None
    assert killer.due(9.0, None) is None
    assert killer.due(10.0, 2.0) is None  # armed: due at 13
    assert killer.due(12.9, 2.0) is None
    assert killer.due(13.0, 2.0) == strike
    assert killer.due(14.0, 2.0) is None


def test_an_armed_strike_falls_at_its_moment_whatever_the_job_does_meanwhile() -> None:
    killer = Killer([Strike("group-1", delay_steps=1.0)])
    assert killer.due(0.0, 1.0) is None
    assert killer.due(0.5, None) is None
    assert killer.due(1.0, None) is not None


def test_the_next_strike_waits_until_all_take_part_again() -> None:
    first, second = Strike("group-2", delay_steps=0.0), Strike("group-0", delay_steps=0.5)
    killer = Killer([first, second])
    assert killer.due(0.0, 1.0) == first
    assert killer.due(5.0, None) is None
    assert killer.due(6.0, 1.0) is None
    assert killer.due(6.5, 1.0) == second


def test_no_strikes() -> None:
    assert Killer([]).due(1.0, 1.0) is None
    assert plan_strikes(GROUPS, kills=0, seed=1) == ()
