"""Which steps count as lost, from handmade events."""

from dataclasses import replace

import pytest

from jaxft_launch.storm._lost import LostStep, lost_steps
from jaxft_launch.storm._record import History
from tests.chaos.cases import disturbed, history, step_event, undisturbed, with_step, without_step

NAN = float("nan")


def steps_of(lost: tuple[LostStep, ...]) -> list[int]:
    return [reason.step for reason in lost]


def changed(group: int, step: int, **changes: object) -> list[History]:
    """An undisturbed run of which one event is another."""
    groups = list(undisturbed().histories)
    groups[group] = with_step(groups[group], step, **changes)
    return groups


def test_nothing_is_lost_when_survivors_share_out_what_the_victim_did() -> None:
    assert lost_steps(undisturbed().histories) == lost_steps(disturbed().histories) == ()
    assert lost_steps([]) == lost_steps([History(group="group-0")]) == ()


def test_a_shard_that_one_group_computed_twice_counts_although_it_caught_up_in_the_end() -> None:
    why = "computed shard 1 2 times"
    assert lost_steps(changed(0, 4, shards=(0, 1, 1))) == (LostStep(4, f"group-0 (incarnation 0) {why}"),)
    assert steps_of(lost_steps(changed(2, 4, shards=(4, 4), attempts=0))) == [4]


def test_a_shard_that_two_groups_or_two_incarnations_computed_for_a_step_that_both_committed() -> None:
    assert lost_steps(changed(0, 4, shards=(0, 1, 2))) == (
        LostStep(4, "shard 2 was computed by group-0 (incarnation 0) and by group-1 (incarnation 0)"),
    )
    lost = lost_steps([history("group-1", range(1, 4)), history("group-1", range(3, 6), incarnation=1)])
    assert set(steps_of(lost)) == {3}
    assert "group-1 (incarnation 0) and by group-1 (incarnation 1)" in lost[0].why
    caught_up = replace(history("group-2", range(4, 5)), steps=(step_event("group-0", 4, attempts=0),))
    assert lost_steps([*undisturbed().histories[:2], caught_up]) == ()


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
    behind = replace(step_event("group-1", 4), attempts=0, shards=())
    later = History(group="group-1", incarnation=1, steps=(behind,))
    assert lost_steps([history("group-1", range(1, 6)), later]) == ()


def test_groups_that_report_different_losses_or_states() -> None:
    assert lost_steps(changed(1, 5, loss=2.0000000000000004)) == (
        LostStep(
            5,
            "groups report different losses: 2.0 (group-0 (incarnation 0)), "
            "2.0000000000000004 (group-1 (incarnation 0))",
        ),
    )
    assert steps_of(lost_steps(changed(1, 5, loss=NAN))) == [5]
    assert lost_steps([with_step(group, 5, loss=NAN) for group in undisturbed().histories]) == ()
    # A group that caught up may not know the loss, but if it does, that counts.
    assert lost_steps(changed(1, 5, loss=NAN, attempts=0)) == ()
    assert steps_of(lost_steps(changed(1, 5, loss=3.0, attempts=0))) == [5]
    one, *others = undisturbed().histories
    states = [with_step(one, 5, digest="a"), *(with_step(other, 5, digest="b") for other in others)]
    assert steps_of(lost_steps(states)) == [5]


def test_a_step_that_nobody_reports() -> None:
    groups = [without_step(without_step(group, 6), 1) for group in undisturbed().histories]
    why = "no group reports it, although later steps were committed"
    assert lost_steps(groups) == (LostStep(1, why), LostStep(6, why))
    assert lost_steps([undisturbed().histories[0], *groups[1:]]) == ()
