"""Accounts of time, from sequences of events."""

import pytest
from jaxft_coordinator.observe._goodput import Account, Standing


def training(startup_s: float = 10.0) -> Account:
    account = Account(0.0)
    account.moves_to(Standing.TRAINING, startup_s)
    return account


def lost(account: Account, now_s: float) -> dict[str, float]:
    return {
        source.name: pytest.approx(seconds)
        for source, seconds in account.seconds(now_s)[1].items()
        if seconds
    }


def test_clean_steps_are_productive_from_start_to_last_vote():
    account = training(startup_s=10.0)
    for step in range(1, 11):
        account.commits(2.0, 10.0 + 2.0 * step)
    assert account.good_s == pytest.approx(20.0)
    assert lost(account, 30.0) == {"STARTUP": 10.0}
    assert account.ratio(30.0) == pytest.approx(2 / 3)


def test_time_in_which_members_were_away_is_other():
    account = training(startup_s=0.0)
    account.commits(2.0, 2.0)
    account.commits(2.0, 32.0)  # an evaluation of 28 s, then a step
    assert account.good_s == pytest.approx(4.0)
    assert lost(account, 32.0) == {"OTHER": 28.0}


def test_a_retried_step_costs_what_it_takes_beyond_a_usual_one():
    account = training(startup_s=0.0)
    for step in range(1, 6):
        account.commits(2.0, 2.0 * step)
    account.retries()  # a member dies after 1.9 s; the others keep their shards, and need 0.5 s for the missing one
    account.commits(0.5, 10.0 + 1.9 + 0.5)
    assert account.good_s == pytest.approx(12.0)
    assert lost(account, 12.4) == {"WASTED": 0.4}


def test_without_a_usual_step_all_but_the_last_attempt_is_wasted():
    account = training(startup_s=0.0)
    account.retries()
    account.commits(1.0, 5.0)
    assert account.good_s == pytest.approx(1.0)
    assert lost(account, 5.0) == {"WASTED": 4.0}


def test_without_a_quorum_time_is_lost_to_recovery_and_the_step_goes_on_after_it():
    account = training(startup_s=0.0)
    account.commits(2.0, 2.0)
    account.moves_to(Standing.WAITING, 3.0)
    assert lost(account, 53.0) == {"RECOVERY": 50.0}
    account.retries()
    account.moves_to(Standing.TRAINING, 63.0)
    account.commits(1.0, 64.0)
    assert account.good_s == pytest.approx(4.0)
    assert lost(account, 64.0) == {"RECOVERY": 60.0}


def test_a_halt_is_lost_and_the_time_after_the_end_is_not_counted():
    account = training(startup_s=0.0)
    account.commits(1.0, 1.0)
    account.moves_to(Standing.HALTED, 1.0)
    account.moves_to(Standing.TRAINING, 3.0)
    account.commits(1.0, 4.0)
    account.moves_to(Standing.FINISHED, 4.0)
    assert lost(account, 1000.0) == {"RECOVERY": 2.0}
    assert account.ratio(1000.0) == pytest.approx(0.5)


def test_all_time_is_either_productive_or_lost():
    account, now_s = Account(0.0), 0.0
    for number in range(200):
        now_s += 0.5 + number % 7 / 3
        if number % 11 == 5:
            account.moves_to(Standing.WAITING, now_s)
        elif number % 11 == 7:
            account.moves_to(Standing.TRAINING, now_s)
        elif number % 5 == 0 and account.standing is Standing.TRAINING:
            account.retries()
        elif account.standing is Standing.TRAINING:
            account.commits(number % 3 * 0.4, now_s)
        else:
            account.moves_to(Standing.TRAINING, now_s)
    account.commits(0.1, now_s)
    good_s, lost_s = account.seconds(now_s)
    assert good_s + sum(lost_s.values()) == pytest.approx(now_s)
