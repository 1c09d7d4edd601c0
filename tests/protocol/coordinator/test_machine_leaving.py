"""Silence, leaving on purpose, and the end of a job."""

from jaxft_protocol import messages as m
from jaxft_protocol.coordinator import quorums
from jaxft_protocol.coordinator.job import GroupPhase

from .helpers import Desk, Done, committed, healing, members, orphaned, running, tried_again

# ---- silence ----


def test_a_silent_group_is_put_out_after_the_heartbeat_timeout():
    desk = running("a", "b")
    quiet = desk.wait(5.0, silent=("b",))
    assert all(done.only(m.Evicted) == {} for done in quiet)
    evicted = [done.only(m.Evicted)["b"] for done in desk.wait(0.2, silent=("b",)) if done.only(m.Evicted)]
    assert evicted == [m.Evicted("no heartbeat for 5.1 s", may_return=True)]
    assert members(desk) == ["a"]


def test_votes_are_signs_of_life():
    desk = running("a", "b")
    for _ in range(12):
        desk.tick(1.0, silent=("b",))
        desk.commit()
    assert members(desk) == ["a", "b"]
    desk.wait(6.2, silent=("b",))
    assert members(desk) == ["a"]


def test_the_votes_of_others_are_no_sign_of_life():
    desk = running("a", "b")
    healing(desk, "c")
    desk.ready("c")
    for _ in range(12):
        desk.tick(0.5, silent=("c",))
        desk.vote("a")
        desk.vote("b")
        if "c" in members(desk):
            break
    desk.wait(5.3, silent=("c",))
    assert "c" not in desk.job.groups


def test_groups_that_fall_silent_together_cost_one_quorum():
    desk = running("a", "b", "c", "d")
    desk.wait(5.3, silent=("b", "c", "d"))
    assert members(desk) == ["a"]
    assert desk.quorum.quorum_id == 2


def test_a_clock_gap_of_the_coordinator_itself_evicts_nobody():
    desk = running("a", "b")
    desk.tick()
    done = desk.tick(60.0, silent=("a", "b"))
    assert done.only(m.Evicted) == {}
    assert members(desk) == ["a", "b"]
    desk.wait(4.9, silent=("b",))
    assert members(desk) == ["a", "b"]
    desk.wait(0.3, silent=("b",))
    assert members(desk) == ["a"]


def test_the_first_tick_judges_nobody_by_the_time_before():
    desk = running("a", "b")
    desk.now_s = 3.0
    desk.tick(silent=("a", "b"))
    assert members(desk) == ["a", "b"]


def test_groups_that_compile_or_heal_must_be_heard_as_well():
    desk = running("a")
    desk.hello("compiles")
    heal_id = healing(desk, "heals")
    done = desk.wait(5.2, silent=("compiles", "heals"))
    assert sorted(desk.job.groups) == ["a"]
    assert [release for each in done for release in each.only(m.Release).values()] == [m.Release(heal_id)]


# ---- leaving ----


def test_a_leaver_goes_at_once_if_others_hold_the_state():
    desk = running("a", "b", "c")
    done = desk.leave("b")
    assert done.to("b") == [m.Goodbye()]
    assert done.closed == ["b"]
    again = tried_again(done)
    assert again is not None
    assert [(change.group, change.reason) for change in again.left] == [("b", "it left")]
    assert quorums._quorum_line(again).endswith(": a, c; b left"), "and not lost"


def test_a_leaver_is_not_kept_by_a_group_that_others_can_heal():
    desk = running("a", "b")
    desk.hello("compiles for an hour")
    assert desk.leave("b").to("b") == [m.Goodbye()]


def test_a_leaver_stays_a_donor_until_the_heals_it_serves_are_done():
    desk = running("a", "b")
    healing(desk, "c")
    assert desk.leave("b").to("b") == [m.Waiting("c to fetch this group's state", held=True)]
    assert desk.group("b").phase is GroupPhase.LEAVING
    desk.ready("c")
    assert desk.commit().to("b") == []  # c is a member now, but may still fetch the last sum
    assert desk.commit().only(m.Goodbye) == {"b": m.Goodbye()}


def test_a_leaver_goes_when_its_joiner_dies():
    desk = running("a", "b")
    healing(desk, "c")
    desk.leave("b")
    assert desk.close("c").only(m.Goodbye) == {"b": m.Goodbye()}


def test_new_joiners_heal_from_those_who_stay():
    desk = running("a", "b")
    healing(desk, "c")
    desk.leave("b")
    done = desk.come("d", digest="fresh")
    assert [donor.group for donor in done.only(m.Heal)["d"].donors] == ["a"]
    assert sorted(done.only(m.Pin)) == ["a"]


def test_the_last_holder_that_leaves_stays_for_those_who_need_its_state():
    desk = running("a")
    desk.commit()
    desk.hello("b")
    assert desk.leave("a").to("a") == [m.Waiting("b to fetch this group's state", held=True)]
    assert [donor.group for donor in desk.join("b", digest="x").only(m.Heal)["b"].donors] == ["a"]
    assert sorted(desk.ready("b").only(m.NewQuorum)) == ["b"]
    assert desk.commit().only(m.Goodbye) == {"a": m.Goodbye()}


def heard(done: Done, name: str) -> list[str]:
    return [message.reason for message in done.to(name) if isinstance(message, m.Waiting)]


def test_a_leaver_is_told_for_which_joiners_it_stays():
    """A joiner that compiles when the others have ended: the coordinator is not to blame for the wait."""
    desk = running("a")
    desk.commit()
    desk.hello("b")
    assert heard(desk.leave("a"), "a") == ["b to fetch this group's state"]
    done = desk.hello("c")
    assert heard(done, "a") == ["b, c to fetch this group's state"]
    assert heard(desk.join("b", digest="x"), "a") == []
    assert heard(desk.close("c"), "a") == ["b to fetch this group's state"]
    desk.ready("b")
    assert desk.commit().only(m.Goodbye) == {"a": m.Goodbye()}


def test_each_leaver_is_told_and_once():
    desk = running("a", "b")
    desk.commit()
    healing(desk, "c")
    expected = ["c to fetch this group's state"]
    assert heard(desk.leave("a", finished=True), "a") == expected
    done = desk.leave("b", finished=True)
    assert (heard(done, "a"), heard(done, "b")) == ([], expected)


def test_a_leaver_that_holds_nothing_goes_at_once():
    desk = running("a")
    desk.hello("b")
    assert desk.leave("b").to("b") == [m.Goodbye()]
    healing(desk, "c")
    assert desk.leave("c").to("c") == [m.Goodbye()]


def test_a_leaver_that_holds_something_else_than_it_did_goes_at_once():
    desk = orphaned("a")
    desk.come("a", step=desk.step - 1, digest="", history=desk.job.history)
    assert desk.group("a").holder in desk.job.frontier.holders  # pyright: ignore[reportOptionalMemberAccess]
    desk.come("b", digest="another")
    done = desk.leave("a")
    assert done.to("a") == [m.Goodbye()]
    assert done.closed == ["a"]
    assert done.only(m.Heal) == {}


def test_a_leaver_takes_no_part_in_the_vote():
    desk = running("a", "b", "c")
    desk.vote("a")
    desk.vote("b")
    assert committed(desk.leave("c")) == ["a", "b"]


def test_a_leavers_ok_does_not_count():
    desk = running("a", "b", "c")
    desk.vote("a")
    desk.leave("a")
    desk.vote("b")
    assert committed(desk.vote("c")) == ["b", "c"]


# ---- the end ----


def test_a_job_is_finished_when_its_last_holder_has_left_so():
    desk = running("a", "b")
    desk.commit()
    desk.leave("a", finished=True)
    assert desk.job.finished is None
    desk.leave("b", finished=True)
    assert desk.job.finished == 1
    assert desk.job.groups == {}


def test_a_job_is_not_finished_by_those_who_leave_early():
    desk = running("a", "b")
    desk.commit()
    desk.leave("b", finished=True)
    desk.leave("a", finished=False)
    assert desk.job.finished is None


def test_a_job_is_not_finished_by_those_who_do_not_hold_its_state():
    desk = running("a")
    desk.commit()
    healing(desk, "b")
    desk.close("a")
    desk.leave("b", finished=True)
    assert desk.job.finished is None


def test_those_who_finish_together_cost_one_quorum():
    desk = running(*(f"g-{i}" for i in range(20)))
    for i in range(15):
        desk.leave(f"g-{i}", finished=True)
    assert desk.quorum.quorum_id == 1
    desk.tick()
    assert desk.quorum.quorum_id == 2
    assert members(desk) == [f"g-{i}" for i in range(15, 20)]


def test_a_late_returner_is_told_that_the_job_is_over():
    desk = running("a")
    desk.commit()
    desk.leave("a", finished=True)
    done = desk.come("b", digest="fresh")
    assert done.to("b") == [m.Finished(1), m.Goodbye()]
    assert done.closed == ["b"]
    assert desk.job.groups == {}


def died_where_another_finished(*, finished: bool = True) -> Desk:
    """A job at step 1, where a has ended its loop, and then b has died; b comes again with nothing."""
    desk = running("a", "b")
    desk.commit()
    desk.leave("a", finished=finished)
    desk.tick()
    assert members(desk) == ["b"]
    desk.close("b")
    desk.come("b", digest="fresh", incarnation=2)
    return desk


def test_where_the_last_holder_dies_after_another_has_finished_the_job_is_over_after_the_heartbeat_timeout():
    desk = died_where_another_finished()
    assert all(done.only(m.Finished) == {} for done in desk.wait(4.8))
    done = desk.wait(0.4)
    assert [each.to("b") for each in done if each.sent] == [[m.Finished(1), m.Goodbye()]]
    text = "finished at step 1: a group has ended its loop there, and no other is left that holds it"
    assert [f"[job] {text}"] == [report for each in done for report in each.reports if "finished" in report]
    assert desk.job.finished == 1
    assert desk.job.groups == {}


def test_it_is_over_where_a_checkpoint_comes_but_too_few_groups_are_left_to_resume_from_it():
    desk = running("a", "b", min_replicas=2)
    desk.commit()
    desk.commit()
    desk.leave("a", finished=True)
    desk.close("b")
    desk.come("b", step=1, history=desk.job.history, incarnation=2)
    done = desk.wait(5.2)
    assert [each.to("b") for each in done if each.only(m.Finished)] == [[m.Finished(2), m.Goodbye()]]


def test_it_is_not_over_where_the_other_left_early():
    desk = died_where_another_finished(finished=False)
    desk.wait(60.0)
    assert desk.job.finished is None


def test_it_is_not_over_where_a_step_was_committed_since():
    desk = running("a", "b")
    desk.leave("a", finished=True)
    desk.tick()
    desk.vote("b")
    desk.close("b")
    desk.come("b", digest="fresh", incarnation=2)
    desk.wait(60.0)
    assert desk.job.finished is None


def test_one_that_holds_the_last_step_and_comes_back_in_time_goes_on():
    desk = running("a", "b")
    desk.commit()
    desk.leave("a", finished=True)
    desk.tick()
    desk.close("b")
    desk.come("c", digest="fresh")
    desk.wait(4.0)
    desk.come("b", step=1, history=desk.job.history)
    desk.wait(4.0)
    assert desk.job.finished is None
    assert members(desk) == ["b"]


def test_one_that_still_compiles_is_waited_for_since_it_may_bring_a_checkpoint():
    desk = running("a", "b", join_timeout_s=60.0)
    desk.commit()
    desk.commit()
    desk.leave("a", finished=True)
    desk.tick()
    desk.close("b")
    desk.hello("c")
    desk.come("b", digest="fresh", incarnation=2)
    desk.wait(50.0)
    assert desk.job.finished is None
    desk.join("c", step=1, history=desk.job.history)
    desk.wait(6.0)
    assert (desk.job.finished, members(desk)) == (None, ["c"])


def test_those_who_heal_from_groups_that_have_finished_and_are_too_few_hear_the_end():
    desk = running("a", "b", "c", "d", min_replicas=4)
    desk.commit()
    healing(desk, "e")
    desk.tick(away=("d",))
    desk.leave("a", finished=True)
    desk.leave("b", finished=True)
    desk.close("c")
    assert desk.job.finished is None  # d is about to end its loop, too
    desk.close("d")
    assert desk.job.finished == 1
    assert {"a", "b"} <= desk.job.groups.keys()  # e needs them
    assert healing(desk, "c", incarnation=2)
    assert desk.ready("c").only(m.Finished) == {"c": m.Finished(1)}
    done = desk.ready("e")
    assert (done.only(m.Finished), sorted(done.only(m.Goodbye))) == (
        {"e": m.Finished(1)},
        ["a", "b", "c", "e"],
    )
    assert desk.job.groups == {}


def test_a_member_that_wants_a_further_step_and_is_too_few_hears_the_end():
    desk = running("a", "b", min_replicas=2)
    desk.commit()
    desk.leave("a", finished=True)
    assert [done.only(m.Finished) for done in desk.wait(1.0) if done.only(m.Finished)] == [
        {"b": m.Finished(1)}
    ]


def test_they_go_on_if_groups_that_have_died_make_them_enough():
    desk = running("a", "b", "c", "d", min_replicas=3)
    desk.commit()
    healing(desk, "e")
    desk.leave("a", finished=True)
    for name in "bcd":
        desk.close(name)
    desk.ready("e")
    desk.wait(60.0)
    assert desk.job.finished is None  # three places, and b, c and d may take them
    for name in "bc":
        healing(desk, name, incarnation=2)
        desk.ready(name)
    assert members(desk) == ["b", "c", "e"]


def test_a_joiner_still_gets_the_final_state_from_the_leavers():
    desk = running("a", "b")
    desk.commit()
    healing(desk, "c")
    desk.leave("a", finished=True)
    desk.leave("b", finished=True)
    assert desk.job.finished == 1
    assert {"a", "b"} <= desk.job.groups.keys()
    done = desk.ready("c")
    assert done.to("c") == [m.Finished(1), m.Goodbye()]
    assert sorted(done.only(m.Goodbye)) == ["a", "b", "c"]
    assert desk.job.groups == {}


def test_a_joiner_behind_the_end_catches_up_first():
    desk = running("a")
    healing(desk, "b")
    desk.commit()
    desk.leave("a", finished=True)
    assert desk.ready("b", step=0).sent == []
    assert desk.ready("b", step=1).only(m.Finished) == {"b": m.Finished(1)}


def test_a_group_with_the_very_final_state_is_told_too():
    # A rerun of a finished job: all groups restore the last checkpoint and have nothing to do.
    desk = Desk.open()
    desk.come("a", step=9, history=7)
    desk.hello("b")
    desk.leave("a", finished=True)
    assert desk.job.finished == 9
    assert desk.join("b", step=9, history=7).only(m.Finished) == {"b": m.Finished(9)}


# ---- streams of one process ----


def test_a_greeting_of_an_earlier_stream_that_comes_late_changes_nothing():
    """The network held back the Hello of a stream that its process has given up since."""
    desk = Desk.open()
    desk.hello("a", stream=2)
    desk.join("a")
    desk.commit()
    present, before = desk.sessions["a"], desk.job
    late = desk.hello("a", stream=1)
    assert late.closed == ["a"]
    assert late.sent == []
    assert desk.job == before
    desk.sessions["a"] = present
    desk.leave("a", finished=True)
    assert desk.job.finished == 1


def test_a_greeting_of_a_later_stream_takes_the_place_of_the_earlier_one():
    desk = Desk.open()
    desk.hello("a", stream=1)
    later = desk.hello("a", stream=2)
    assert later.closed == ["old a"]
    assert list(desk.job.sessions) == [desk.sessions["a"]]
