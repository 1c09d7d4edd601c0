"""The cost of kills and of other faults, and how long each group took part, from handmade events."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from jaxft_launch.storm._events import StepEvent
from jaxft_launch.storm._record import (
    Fault,
    History,
    Kill,
    RunRecord,
    again_s,
    back_s,
    participation,
    stall_s,
    standstill_s,
)
from tests.chaos import cases
from tests.chaos.cases import disturbed, step_event, with_step, without_step

KILL = Kill(group="group-1", incarnation=0, t_s=3.25, step=3)


def test_the_stall_lasts_until_the_last_survivor_has_committed_again() -> None:
    *others, last = disturbed().histories
    assert stall_s(KILL, (*others, last)) == 0.75
    assert stall_s(KILL, (*others, with_step(last, 4, t_s=4.5))) == 1.25
    assert stall_s(KILL, (*others, with_step(last, 4, attempts=0))) == 1.75  # it only caught up
    assert stall_s(KILL, (*others, replace(last, steps=last.steps[:3]))) is None
    assert stall_s(KILL, [cases.history("group-1", range(1, 4))]) is None  # without survivors


def test_who_is_killed_or_comes_before_it_could_commit_again_is_no_survivor() -> None:
    record = disturbed()
    silent = replace(record.histories[3], steps=record.histories[3].steps[:3])
    histories = (*record.histories[:3], silent)
    other = Kill(group="group-2", incarnation=0, t_s=3.5, step=3)
    assert stall_s(KILL, histories, [KILL, other]) == 0.75
    assert stall_s(KILL, histories, [KILL, replace(other, incarnation=1)]) is None
    stopped = [replace(history, fell=history.group == other.group) for history in histories]
    assert stall_s(KILL, stopped, [KILL]) == 0.75
    newcomer = History(group="group-3", steps=(step_event("group-2", 9),))
    assert stall_s(KILL, (*record.histories, newcomer)) == 0.75
    later = replace(cases.history("group-0", range(2, 11)), incarnation=1)
    assert stall_s(KILL, [cases.history("group-0", range(1, 2)), later]) == 0.75


def test_the_victim_is_back_with_its_first_contribution() -> None:
    """Not with the event of catching up, nor with a step without a shard, nor with a step of its former life."""
    *_, again, last = histories = disturbed().histories
    assert back_s(KILL, histories) == 2.75
    for changes in ({"attempts": 0}, {"shards": ()}):
        assert back_s(KILL, (*histories[:2], with_step(again, 6, **changes), last)) == 3.75
    assert back_s(KILL, histories[:2]) is None
    assert back_s(KILL, [cases.history("group-1", range(1, 9))]) is None


def test_the_last_incarnation_and_the_committed_steps_of_a_record() -> None:
    record = disturbed()
    newest = record.last("group-1")
    assert newest is not None
    assert newest.incarnation == 1
    assert record.last("group-7") is None
    assert record.committed_steps == frozenset(range(1, 11))
    only = RunRecord(groups=("group-0",), planned_steps=9, histories=(without_step(record.histories[0], 2),))
    assert 2 not in only.committed_steps


GROUPS = ("a", "b", "c")


def history(group: str, steps: Iterable[tuple[float, int, str]], number: int = 0) -> History:
    """Steps as (time, step, members), each group by a letter; without it among them, a group only caught up."""
    return History(
        group=group,
        incarnation=number,
        steps=tuple(
            StepEvent(t_s=t_s, step=step, attempts=int(group in members), shards=(0,), members=tuple(members))
            for t_s, step, members in steps
        ),
    )


def fault(group: str = "b", t_s: float = 10.0, seconds: float = 5.0, other: str = "") -> Fault:
    return Fault(kind="stop", group=group, other=other, t_s=t_s, seconds=seconds)


# All groups take part each second up to 10; b is stopped from 10 to 15, evicted at 12, and back at 17.
COMMITS = [
    *((float(t), t, "abc") for t in range(1, 11)),
    *((t + 2.0, t, "ac") for t in range(11, 15)),
    *((t + 2.0, t, "abc") for t in range(15, 20)),
]
HISTORIES = (
    history("a", COMMITS),
    history("c", COMMITS),
    history("b", [commit for commit in COMMITS if "b" in commit[2]]),
)


def test_the_standstill_is_the_longest_time_without_a_commit_of_the_others() -> None:
    assert standstill_s(fault(), HISTORIES) == 3.0  # from 10 to 13
    own = history("b", [(11.0, 11, "b"), (12.0, 12, "b")])
    assert standstill_s(fault(), [*HISTORIES[:2], own]) == 3.0
    waits = [(10.0, 10, "abc"), (15.5, 11, "abc"), (16.0, 12, "abc")]
    assert standstill_s(fault(), [history("a", waits)]) == 5.5
    assert standstill_s(fault(), [history("a", [(9.0, 9, "abc"), (12.0, 10, "abc")])]) is None


def test_a_victim_is_back_with_a_step_that_was_tried_since_the_end() -> None:
    assert again_s(fault(), "b", HISTORIES) == 2.0  # step 15, at 17
    # A step that it voted for before it was stopped, and recorded when it continued, does not count.
    late = history("b", [(15.1, 10, "abc"), (18.0, 16, "abc")])
    assert again_s(fault(), "b", [*HISTORIES[:2], late]) == 3.0
    caught_up = history("b", [(15.2, 15, "ac")])
    assert again_s(fault(), "b", [*HISTORIES[:2], caught_up]) is None
    killed = history("b", []), history("b", [(18.0, 16, "abc")], number=1)
    assert again_s(fault(), "b", [*HISTORIES[:2], *killed]) == 3.0


def share(*faults: Fault, histories: tuple[History, ...] = HISTORIES) -> float | None:
    return participation(RunRecord(groups=GROUPS, planned_steps=19, histories=histories, faults=faults))


def test_participation_is_the_share_of_the_time_in_which_groups_could_take_part_and_did() -> None:
    """From 1 to 21 s; b was no member in the intervals that ended with steps 11 to 14: from 10 to 16 s."""
    assert share() == pytest.approx((20 + 20 + 14) / 60)
    assert share(fault()) == pytest.approx((20 + 20 + 14) / (20 + 20 + 15))
    overlapping = fault(), fault(t_s=12.0, seconds=3.0), fault(t_s=9.0, seconds=2.0)
    assert share(*overlapping) == pytest.approx((20 + 20 + 13) / (20 + 20 + 14))
    link, gone = fault(group="a", other="b"), fault(group="coordinator")
    assert share(link) == pytest.approx((15 + 20 + 14) / (15 + 20 + 15))
    assert share(gone) == pytest.approx((15 + 15 + 14) / (15 + 15 + 15))
    assert share(histories=()) is None
    assert share(histories=(history("a", [(1.0, 1, "abc")]),)) is None
