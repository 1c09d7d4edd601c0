"""Goodput of single groups: the account alone, and of the groups of a job to which things happen."""

import json

import pytest
from jaxft_coordinator.observe._goodput import Account, Source, Standing
from jaxft_coordinator.observe._group_goodput import GroupAccount, Spends, spends
from jaxft_protocol.messages import Drain, GroupName

from tests.operate.test_happened import Watching, told_of, watching
from tests.protocol.coordinator.helpers import healing

GROUP = GroupName


def job(now_s: float = 0.0) -> Account:
    account = Account(now_s)
    account.moves_to(Standing.TRAINING, now_s)
    return account


def member(account: Account, now_s: float = 0.0) -> GroupAccount:
    group = GroupAccount(now_s)
    group.moves_to(Spends.TRAINING, account, now_s)
    return group


def spent(group: GroupAccount, account: Account, now_s: float) -> tuple[object, object]:
    good_s, lost_s = group.seconds(account, now_s)
    return pytest.approx(good_s), {
        source.name: pytest.approx(seconds) for source, seconds in lost_s.items() if seconds
    }


def test_a_member_has_what_its_job_has():
    account = job()
    group = member(account)
    account.commits(2.0, 2.0)
    account.commits(2.0, 7.0)  # 3 s of it outside of the step
    assert spent(group, account, 7.0) == (4.0, {"OTHER": 3.0})
    assert group.ratio(account, 7.0) == account.ratio(7.0)


def test_a_group_that_dies_loses_its_step_and_the_time_until_it_is_back():
    account = job()
    group = member(account)
    account.commits(2.0, 2.0)
    group.moves_to(Source.RECOVERY, account, 3.5)  # in the middle of a step
    account.commits(2.0, 4.5)
    group.moves_to(Source.STARTUP, account, 13.5)
    group.moves_to(Source.RECOVERY, account, 16.5)
    group.moves_to(Spends.TRAINING, account, 20.5)
    account.commits(16.0, 20.5)  # of before
    account.commits(2.0, 22.5)
    assert spent(group, account, 22.5) == (2.0 + 2.0, {"WASTED": 1.5, "RECOVERY": 10.0 + 4.0, "STARTUP": 3.0})


def test_a_spare_that_takes_over_in_the_middle_of_a_step_counts_no_more_than_its_time():
    account = job()
    group = member(account, 3.0)
    account.commits(4.0, 4.0)
    assert spent(group, account, 4.0) == (1.0, {})


@pytest.mark.parametrize(
    ("state", "standing", "how"),
    [
        ("member", Standing.TRAINING, Spends.TRAINING),
        ("member", Standing.WAITING, Spends.TRAINING),
        ("present", Standing.TRAINING, Source.STARTUP),
        ("stale", Standing.STARTING, Source.STARTUP),
        ("stale", Standing.TRAINING, Source.RECOVERY),
        ("healing", Standing.TRAINING, Source.RECOVERY),
        ("ready", Standing.TRAINING, Source.RECOVERY),
        ("leaving", Standing.TRAINING, Source.OTHER),
        ("gone", Standing.TRAINING, Source.RECOVERY),
        ("gone", Standing.FINISHED, Spends.UNCOUNTED),
        ("member", Standing.FINISHED, Spends.UNCOUNTED),
    ],
)
def test_a_state_says_what_its_time_is_lost_to(state: str, standing: Standing, how: Spends | Source) -> None:
    assert spends(state, standing, spare=False, ended=False) is how


def test_a_spare_that_stands_by_and_a_group_that_ended_lose_nothing():
    assert spends("ready", Standing.TRAINING, spare=True, ended=False) is Spends.UNCOUNTED
    assert spends("healing", Standing.TRAINING, spare=True, ended=False) is Source.RECOVERY
    assert spends("gone", Standing.TRAINING, spare=False, ended=True) is Spends.UNCOUNTED


def test_all_time_of_a_group_is_either_productive_or_lost():
    account, now_s = job(), 0.0
    group, how = GroupAccount(0.0), 0
    ways = [Spends.TRAINING, Source.RECOVERY, Source.STARTUP, Spends.TRAINING, Source.OTHER]
    group.moves_to(ways[0], account, 0.0)
    for number in range(200):
        now_s += 0.5 + number % 7 / 3
        account.commits(number % 3 * 0.4, now_s)
        if number % 4 == 3:
            how += 1
            group.moves_to(ways[how % len(ways)], account, now_s + 0.25)
    group.moves_to(Spends.UNCOUNTED, account, now_s + 1.0)
    good_s, lost_s = group.seconds(account, now_s + 9.0)
    assert good_s + sum(lost_s.values()) == pytest.approx(now_s + 1.0)


def lost(desk: Watching, name: str) -> dict[str, float]:
    """The lost seconds of a group of a desk, without zeros."""
    watched = desk.observer.jobs["job"]
    _, lost_s = watched.groups[GROUP(name)].account.seconds(watched.account, desk.now_s)
    return {source.name: round(seconds, 3) for source, seconds in lost_s.items() if seconds > 1e-9}


def test_a_group_that_is_lost_and_heals():
    desk = watching("a", "b", "c")
    desk.now_s += 2.0
    desk.commit()
    desk.now_s += 1.0
    desk.close("b")
    desk.now_s += 5.0
    desk.commit()
    assert lost(desk, "b") == {"WASTED": 1.0, "RECOVERY": 5.0}
    healing(desk, "b", incarnation=2)
    desk.now_s += 4.0
    desk.ready("b")
    desk.commit()
    desk.now_s += 2.0
    desk.commit()
    assert lost(desk, "b") == {"WASTED": 1.0, "RECOVERY": 9.0}
    assert "RECOVERY" not in lost(desk, "a")


def test_a_group_that_was_drained_loses_nothing_afterwards():
    desk = watching("a", "b")
    desk.say("b", Drain())
    desk.now_s += 2.0
    desk.commit()
    desk.leave("b")
    before = lost(desk, "b")
    desk.now_s += 1000.0
    assert lost(desk, "b") == before


def test_after_the_end_of_the_job_nothing_is_lost():
    desk = watching("a", "b")
    desk.commit()
    desk.close("b")
    desk.commit()
    desk.leave("a", finished=True)
    before = (lost(desk, "a"), lost(desk, "b"))
    desk.now_s += 1000.0
    assert (lost(desk, "a"), lost(desk, "b")) == before


def test_the_api_has_the_causes_to_which_a_group_lost_something():
    desk = watching("a", "b")
    desk.now_s += 2.0
    desk.commit()
    desk.close("b")
    desk.now_s += 6.0
    answer = told_of(desk)
    found = {each["group"]: each for each in answer["group_list"]}  # pyright: ignore
    assert found["b"]["badput_seconds"]["INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"] == 6.0
    assert "PROGRAM_STARTUP" not in found["b"]["badput_seconds"]
    assert found["b"]["goodput"] < 0.3
    assert json.dumps(answer)
