from dataclasses import replace

import pytest

from jaxft_launch.storm._record import History, Kill, RunRecord, back_s, stall_s
from tests.chaos.cases import disturbed, history, step_event, with_step, without_step

KILL = Kill(group="group-1", incarnation=0, t_s=3.25, step=3)


def test_the_stall_lasts_until_the_last_survivor_has_committed_again() -> None:
    record = disturbed()
    assert stall_s(KILL, record.histories) == 0.75
    late = with_step(record.histories[3], 4, t_s=4.5)
    assert stall_s(KILL, (*record.histories[:3], late)) == 1.25


def test_catching_up_is_no_commit_of_a_survivor() -> None:
    record = disturbed()
    healed = with_step(record.histories[3], 4, attempts=0)
    assert stall_s(KILL, (*record.histories[:3], healed)) == 1.75


def test_a_survivor_that_never_commits_again_stalls_without_end() -> None:
    record = disturbed()
    silent = replace(record.histories[3], steps=record.histories[3].steps[:3])
    assert stall_s(KILL, (*record.histories[:3], silent)) is None


def test_who_is_killed_before_it_could_commit_again_is_no_survivor() -> None:
    record = disturbed()
    silent = replace(record.histories[3], steps=record.histories[3].steps[:3])
    histories = (*record.histories[:3], silent)
    other = Kill(group="group-2", incarnation=0, t_s=3.5, step=3)
    assert stall_s(KILL, histories, [KILL, other]) == 0.75
    assert stall_s(KILL, histories, [KILL, replace(other, incarnation=1)]) is None
    stopped = [replace(history, fell=history.group == other.group) for history in histories]
    assert stall_s(KILL, stopped, [KILL]) == 0.75


def test_a_kill_without_survivors_has_no_stall() -> None:
    assert stall_s(KILL, [history("group-1", range(1, 4))]) is None


def test_a_group_that_came_after_the_kill_is_no_survivor() -> None:
    record = disturbed()
    newcomer = History(group="group-3", steps=(step_event("group-2", 9),))
    assert stall_s(KILL, (*record.histories, newcomer)) == 0.75


def test_an_incarnation_that_died_before_the_kill_is_no_survivor() -> None:
    former = history("group-0", range(1, 2))
    later = replace(history("group-0", range(2, 11)), incarnation=1)
    assert stall_s(KILL, [former, later]) == 0.75


def test_the_victim_is_back_with_its_first_contribution_not_with_the_event_of_catching_up() -> None:
    assert back_s(KILL, disturbed().histories) == 2.75


@pytest.mark.parametrize("changes", [{"attempts": 0}, {"shards": ()}])
def test_a_step_without_a_contribution_is_not_a_return(changes: dict[str, object]) -> None:
    record = disturbed()
    idle = with_step(record.histories[2], 6, **changes)
    assert back_s(KILL, (*record.histories[:2], idle, record.histories[3])) == 3.75


def test_a_victim_that_does_not_return() -> None:
    assert back_s(KILL, disturbed().histories[:2]) is None


def test_steps_of_the_killed_incarnation_are_not_a_return() -> None:
    late = history("group-1", range(1, 9))
    assert back_s(KILL, [late]) is None


def test_the_last_incarnation_and_the_committed_steps_of_a_record() -> None:
    record = disturbed()
    newest = record.last("group-1")
    assert newest is not None
    assert newest.incarnation == 1
    assert record.last("group-7") is None
    assert record.committed_steps == frozenset(range(1, 11))
    only = RunRecord(groups=("group-0",), planned_steps=9, histories=(without_step(record.histories[0], 2),))
    assert 2 not in only.committed_steps
