"""Rank 0's core: it collects how an operation went in each rank, and gives one verdict."""

import pytest
from jaxft_protocol.ranks import leader as core
from jaxft_protocol.ranks.leader import (
    Awaits,
    Begins,
    Conclude,
    Done,
    Ended,
    GetsOn,
    GiveUp,
    Interrupt,
    Leader,
    Leaves,
    Looks,
    Lose,
    Mention,
    Moved,
    Redirected,
    Reported,
    Tell,
)
from jaxft_protocol.ranks.messages import CameApart, Judged, Outcome, StopWork, Verdict

FINE = Verdict()


def after(*events: core.Event | tuple[float, core.Event], size: int = 3) -> tuple[Leader, list[core.Effect]]:
    """The leader after events, each at time 0 or at its own."""
    leader, done = Leader.of(size, stuck_s=10.0), list[core.Effect]()
    for event in events:
        now_s, what = event if isinstance(event, tuple) else (0.0, event)
        leader, effects = core.step(leader, what, now_s)
        done += effects
    return leader, done


def reported(
    rank: int, failure: str = "", *accused: str, note: str = "", what: str = "exchange#1"
) -> Reported:
    return Reported(rank, Outcome(what, Verdict(failure, accused, note)))


def concluded(effects: list[core.Effect]) -> Verdict:
    (verdict,) = (effect.verdict for effect in effects if isinstance(effect, Conclude))
    assert Tell(Judged("exchange#1", verdict)) in effects
    return verdict


def test_there_is_no_verdict_before_every_rank_has_reported() -> None:
    for events in (
        [Done(FINE), reported(1)],
        [reported(1), reported(2), Looks()],
        [reported(2), Done(FINE), Looks()],
    ):
        assert after(Begins("exchange"), *events)[1] == []
    assert concluded(after(Begins("exchange"), reported(1), Done(FINE), reported(2), Looks())[1]) == FINE
    assert concluded(after(reported(2), Begins("exchange"), reported(1), Done(FINE))[1]) == FINE


def test_only_the_training_thread_gives_orders() -> None:
    _, effects = after(Begins("exchange"), Done(FINE), reported(1), reported(2, "its link broke"))
    assert effects == [Interrupt("rank 2 failed: its link broke")]


def test_the_failure_of_any_rank_is_that_of_the_group_and_all_accused_are_named() -> None:
    _, effects = after(Begins("exchange"), reported(1), reported(2, "its link broke", "b"), Done(FINE))
    assert concluded(effects) == Verdict("its link broke", ("b",))
    _, effects = after(Begins("exchange"), reported(1), reported(2), Done(Verdict("mine broke", ("c",))))
    assert concluded(effects) == Verdict("mine broke", ("c",))
    _, effects = after(
        Begins("exchange"),
        reported(1, "its link broke", "b", "a"),
        Done(Verdict("aborted", ("c",))),
        reported(2),
        Looks(),
    )
    assert concluded(effects) == Verdict("its link broke", ("a", "b", "c"))


def test_the_first_note_is_kept() -> None:
    _, effects = after(Begins("exchange"), reported(1, note="w"), reported(2, note="b"), Done(FINE))
    assert concluded(effects).note == "w"
    _, effects = after(Begins("exchange"), reported(1), reported(2, note="b"), Done(Verdict(note="x")))
    assert concluded(effects).note == "x"


def test_a_failure_interrupts_rank_0_and_stops_the_others_once() -> None:
    _, effects = after(
        Begins("exchange"), reported(1, "broke"), reported(2, "too"), Done(Verdict("aborted")), Looks()
    )
    assert effects[0] == Interrupt("rank 1 failed: broke")
    assert effects.count(Tell(StopWork("exchange#1"))) == 1
    assert sum(isinstance(effect, Interrupt) for effect in effects) == 1
    _, effects = after(Begins("exchange"), Done(Verdict("mine")), Looks(), Looks())
    assert effects == [Tell(StopWork("exchange#1"))]


def test_a_failure_that_came_before_rank_0_had_begun_interrupts_it_at_once() -> None:
    assert after(reported(1, "broke"), Begins("exchange"))[1] == [Interrupt("rank 1 failed: broke")]
    # An outcome of another operation proves nothing.
    assert after(reported(1, "broke", what="exchange#2"), Begins("exchange"))[1] == []


def test_who_is_directed_elsewhere_blames_no_one() -> None:
    _, effects = after(
        Begins("exchange"),
        Redirected(),
        Done(Verdict("aborted")),
        reported(1),
        reported(2, "stopped"),
        Looks(),
    )
    assert concluded(effects) == Verdict("aborted", stopped=True)
    assert not any(isinstance(effect, Interrupt) for effect in effects)
    for first in (Begins("exchange", redirected=True), Begins("exchange")):
        late = () if first.redirected else (Redirected(),)
        _, effects = after(reported(1, "broke"), first, *late, reported(2), Done(Verdict("aborted")))
        assert concluded(effects).stopped == first.redirected


def test_who_is_directed_elsewhere_while_it_waits_stops_the_others() -> None:
    _, effects = after(Begins("exchange"), Done(FINE), Redirected(), Looks())
    assert effects == [Tell(StopWork("exchange#1"))]


def test_a_next_operation_begins_with_nothing_of_the_last() -> None:
    leader, _ = after(
        Begins("exchange"), Redirected(), reported(1, "broke"), reported(2), Done(Verdict("x")), Leaves()
    )
    assert (leader.what, leader.own) == ("", None)
    leader, effects = core.step(leader, Begins("exchange"), 0.0)
    assert effects == ()
    assert (leader.what, leader.redirected, leader.interrupted, leader.stops) == (
        "exchange#2",
        False,
        False,
        False,
    )
    assert not any(rank.outcomes for rank in leader.ranks)


@pytest.mark.parametrize("rest", [[Done(FINE)], [reported(2), Done(FINE)], [Done(FINE), Looks()]])
def test_a_rank_at_another_operation_has_come_apart(rest: list[core.Event]) -> None:
    with pytest.raises(CameApart, match=r"rank 1 reports 'heal#1', and rank 0 is at 'exchange#1'"):
        after(Begins("exchange"), reported(1, what="heal#1"), *rest)


def test_a_rank_that_has_ended_gives_no_outcome() -> None:
    assert GiveUp(1, "OSError") in after(Begins("exchange"), Ended(1, "OSError"), Done(FINE))[1]
    # Its earlier report counts.
    _, effects = after(Begins("exchange"), reported(1), Ended(1, ""), reported(2), Done(FINE))
    assert concluded(effects) == FINE


def test_a_rank_without_progress_is_lost_and_one_that_moves_is_not() -> None:
    begun = [Begins("exchange"), (1.0, Done(FINE)), reported(1)]
    assert not any(isinstance(effect, Lose) for effect in after(*begun, (11.0, Looks()))[1])
    assert Lose(2, 10.5) in after(*begun, (11.5, Looks()))[1]
    moving = [(9.0, Moved(2, 1)), (12.0, Moved(2, 1)), (18.9, Looks())]
    assert not any(isinstance(effect, Lose) for effect in after(*begun, *moving)[1])
    assert Lose(2, 11.0) in after(*begun, *moving, (20.0, Looks()))[1]


def test_what_another_rank_moves_is_the_groups_progress_once_rank_0_waits_for_it() -> None:
    """Before that, rank 0 must show by its own part that it does not hang."""
    assert after(Begins("exchange"), Moved(1, 1), Moved(2, 1))[1] == []
    _, effects = after(Begins("exchange"), Done(FINE), Moved(1, 1), Moved(1, 1), Moved(1, 2))
    assert effects == [GetsOn(), GetsOn()]
    assert (
        after(Begins("exchange"), Done(FINE), reported(1), reported(2), Looks(), Moved(1, 1))[1][-1]
        != GetsOn()
    )
    assert after(Begins("exchange"), Done(FINE), reported(1), Moved(1, 1))[1] == []  # it has reported already


def test_what_another_rank_moves_is_progress_in_a_computation_of_all_ranks() -> None:
    """Rank 0 has its batch and cannot go on, while another rank still reads its own."""
    assert after(Awaits(now=True), Moved(1, 1), Moved(2, 5), Awaits(now=False), Moved(1, 2))[1] == [
        GetsOn(),
        GetsOn(),
    ]
    # The computation has raised an exception.
    assert after(Awaits(now=True), Begins("exchange"), Moved(1, 1))[1] == []


def test_both_of_two_silent_ranks_are_noticed() -> None:
    _, effects = after(Begins("exchange"), Done(FINE), (10.5, Looks()))
    assert [effect.rank for effect in effects if isinstance(effect, Lose)] == [1, 2]


def test_long_waits_are_mentioned_each_time_they_have_doubled() -> None:
    looks = [(float(second), Looks()) for second in range(1, 45)]
    moves = [(float(second), Moved(2, second)) for second in range(1, 45)]
    both = [event for pair in zip(moves, looks, strict=True) for event in pair]
    _, effects = after(Begins("exchange"), Done(FINE), reported(1), *both)
    assert [effect for effect in effects if isinstance(effect, Mention)] == [
        Mention(2, 5.0),
        Mention(2, 10.0),
        Mention(2, 20.0),
        Mention(2, 40.0),
    ]
