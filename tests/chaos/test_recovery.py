"""The cost of a fault, and how long each group took part, from handmade events."""

from collections.abc import Iterable

import pytest

from jaxft_launch.storm._events import StepEvent
from jaxft_launch.storm._record import Fault, History, RunRecord, again_s, participation, standstill_s

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


def test_the_standstill_is_the_longest_time_without_a_commit() -> None:
    assert standstill_s(fault(), HISTORIES) == 3.0  # from 10 to 13


def test_what_the_victim_reports_is_no_commit_of_the_others() -> None:
    own = history("b", [(11.0, 11, "b"), (12.0, 12, "b")])
    assert standstill_s(fault(), [*HISTORIES[:2], own]) == 3.0


def test_a_job_that_waits_for_the_end_of_the_fault_stands_still_for_all_of_it() -> None:
    commits = [(10.0, 10, "abc"), (15.5, 11, "abc"), (16.0, 12, "abc")]
    assert standstill_s(fault(), [history("a", commits)]) == 5.5


def test_a_job_that_never_moves_again() -> None:
    assert standstill_s(fault(), [history("a", [(9.0, 9, "abc"), (12.0, 10, "abc")])]) is None


def test_a_victim_is_back_with_a_step_that_was_tried_since_the_end() -> None:
    assert again_s(fault(), "b", HISTORIES) == 2.0  # step 15, at 17
    # A step that it voted for before it was stopped, and recorded when it continued, does not count.
    late = history("b", [(15.1, 10, "abc"), (18.0, 16, "abc")])
    assert again_s(fault(), "b", [*HISTORIES[:2], late]) == 3.0
    caught_up = history("b", [(15.2, 15, "ac")])
    assert again_s(fault(), "b", [*HISTORIES[:2], caught_up]) is None


def test_a_victim_that_was_killed_later_is_back_with_its_next_process() -> None:
    again = history("b", [(18.0, 16, "abc")], number=1)
    assert again_s(fault(), "b", [*HISTORIES[:2], history("b", []), again]) == 3.0


def record(*faults: Fault, histories: tuple[History, ...] = HISTORIES) -> RunRecord:
    return RunRecord(groups=GROUPS, planned_steps=19, histories=histories, faults=faults)


def test_participation_is_the_share_of_the_time_in_which_groups_took_part() -> None:
    """From 1 to 21 s; b was no member in the intervals that ended with steps 11 to 14: from 10 to 16 s."""
    assert participation(record()) == pytest.approx((20 + 20 + 14) / 60)


def test_the_time_in_which_something_was_done_to_a_group_is_left_out() -> None:
    assert participation(record(fault())) == pytest.approx((20 + 20 + 14) / (20 + 20 + 15))


def test_faults_that_overlap_are_left_out_once() -> None:
    faults = fault(), fault(t_s=12.0, seconds=3.0), fault(t_s=9.0, seconds=2.0)
    assert participation(record(*faults)) == pytest.approx((20 + 20 + 13) / (20 + 20 + 14))


def test_a_link_has_two_ends_and_without_a_coordinator_nobody_can_take_part() -> None:
    link = fault(group="a", other="b")
    assert participation(record(link)) == pytest.approx((15 + 20 + 14) / (15 + 20 + 15))
    gone = fault(group="coordinator")
    assert participation(record(gone)) == pytest.approx((15 + 15 + 14) / (15 + 15 + 15))


def test_without_steps_there_is_no_participation() -> None:
    assert participation(record(histories=())) is None
    assert participation(record(histories=(history("a", [(1.0, 1, "abc")]),))) is None
