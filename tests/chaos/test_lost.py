from dataclasses import replace

import pytest

from jaxft_launch.storm._lost import LostStep, lost_steps
from jaxft_launch.storm._record import History
from tests.chaos.cases import disturbed, history, step_event, undisturbed, with_step, without_step

NAN = float("nan")


def steps_of(lost: tuple[LostStep, ...]) -> list[int]:
    return [reason.step for reason in lost]


def all_groups() -> list[History]:
    return list(undisturbed().histories)


def test_nothing_is_lost_without_a_failure() -> None:
    assert lost_steps(all_groups()) == ()


def test_nothing_is_lost_when_survivors_share_out_what_the_victim_did() -> None:
    assert lost_steps(disturbed().histories) == ()


def test_nothing_is_lost_before_anything_is_committed() -> None:
    assert lost_steps([]) == ()
    assert lost_steps([History(group="group-0")]) == ()


def test_a_shard_that_one_group_computed_twice() -> None:
    groups = all_groups()
    groups[0] = with_step(groups[0], 4, shards=(0, 1, 1))
    assert lost_steps(groups) == (LostStep(4, "group-0 (incarnation 0) computed shard 1 2 times"),)


def test_a_shard_computed_twice_counts_though_the_group_caught_up_in_the_end() -> None:
    groups = all_groups()
    groups[2] = with_step(groups[2], 4, shards=(4, 4), attempts=0)
    assert steps_of(lost_steps(groups)) == [4]


def test_a_shard_that_two_groups_computed_for_the_step_both_committed() -> None:
    groups = all_groups()
    groups[0] = with_step(groups[0], 4, shards=(0, 1, 2))
    assert lost_steps(groups) == (
        LostStep(4, "shard 2 was computed by group-0 (incarnation 0) and by group-1 (incarnation 0)"),
    )


def test_a_shard_that_two_incarnations_of_a_group_computed() -> None:
    lost = lost_steps([history("group-1", range(1, 4)), history("group-1", range(3, 6), incarnation=1)])
    assert set(steps_of(lost)) == {3}
    assert "group-1 (incarnation 0) and by group-1 (incarnation 1)" in lost[0].why


def test_a_group_that_only_caught_up_computed_nothing_that_counts() -> None:
    caught_up = replace(history("group-2", range(4, 5)), steps=(step_event("group-0", 4, attempts=0),))
    assert lost_steps([*all_groups()[:2], caught_up]) == ()


@pytest.mark.parametrize(
    ("numbers", "undone"), [((1, 2, 3, 3), {3}), ((1, 2, 3, 2), {2, 3}), ((1, 2, 5, 3, 4, 5), {3, 4, 5})]
)
def test_an_incarnation_that_goes_back_undoes_every_step_from_there(
    numbers: tuple[int, ...], undone: set[int]
) -> None:
    events = tuple(step_event("group-0", step, shards=()) for step in numbers)
    reasons = [r for r in lost_steps([History(group="group-0", steps=events)]) if "then reported" in r.why]
    assert set(steps_of(tuple(reasons))) == undone


def test_the_next_incarnation_may_begin_below_where_the_former_ended() -> None:
    former = history("group-1", range(1, 6))
    behind = replace(step_event("group-1", 4), attempts=0, shards=())
    later = History(group="group-1", incarnation=1, steps=(behind,))
    assert lost_steps([former, later]) == ()


def test_two_groups_that_report_different_losses() -> None:
    groups = all_groups()
    groups[1] = with_step(groups[1], 5, loss=2.0000000000000004)
    assert lost_steps(groups) == (
        LostStep(
            5,
            "groups report different losses: 2.0 (group-0 (incarnation 0)), "
            "2.0000000000000004 (group-1 (incarnation 0))",
        ),
    )


def test_a_loss_that_is_no_number_differs_from_one_that_is() -> None:
    groups = all_groups()
    groups[1] = with_step(groups[1], 5, loss=NAN)
    assert steps_of(lost_steps(groups)) == [5]


def test_equal_losses_that_are_no_numbers_do_not_differ() -> None:
    assert lost_steps([with_step(group, 5, loss=NAN) for group in all_groups()]) == ()


def test_a_group_that_caught_up_may_not_know_the_loss_but_if_it_does_it_counts() -> None:
    groups = all_groups()
    groups[1] = with_step(groups[1], 5, loss=NAN, attempts=0)
    assert lost_steps(groups) == ()
    groups[1] = with_step(groups[1], 5, loss=3.0, attempts=0)
    assert steps_of(lost_steps(groups)) == [5]


def test_a_step_that_nobody_reports() -> None:
    groups = [without_step(group, 6) for group in all_groups()]
    assert lost_steps(groups) == (LostStep(6, "no group reports it, although later steps were committed"),)


def test_the_first_step_is_missed_as_well() -> None:
    assert steps_of(lost_steps([without_step(group, 1) for group in all_groups()])) == [1]


def test_a_step_that_one_group_reports_is_not_missing() -> None:
    groups = [all_groups()[0], *(without_step(group, 6) for group in all_groups()[1:])]
    assert lost_steps(groups) == ()


def test_reasons_come_in_the_order_of_the_steps() -> None:
    groups = [without_step(group, 9) for group in all_groups()]
    groups[0] = with_step(groups[0], 4, shards=(0, 0))
    groups[2] = with_step(groups[2], 2, loss=0.5)
    assert steps_of(lost_steps(groups)) == [2, 4, 9]
