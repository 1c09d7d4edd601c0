"""One step: counting votes, commits, retries, and evictions."""

import pytest
from jaxft_protocol import messages as m
from jaxft_protocol.coordinator.job import GroupPhase

from .helpers import Desk, committed, healing, members, running, shards, tried_again

# ---- commit ----


def test_a_step_counts_when_every_member_has_voted_ok():
    desk = running("a", "b", "c")
    assert desk.vote("a").effects == ()
    assert desk.vote("b").effects == ()
    done = desk.vote("c")
    assert done.sent == [(name, m.Commit(m.QuorumId(1), m.Step(0))) for name in ("a", "b", "c")]
    assert desk.step == 1


def test_it_counts_although_a_member_died_after_all_others_had_voted_ok():
    desk = running("a", "b", "c")
    desk.vote("a")
    desk.vote("b")
    done = desk.close("c")
    assert committed(done) == ["a", "b"]
    following = done.only(m.Commit)["a"].next
    assert following is not None
    assert shards(following) == {"a": (0, 1, 2), "b": (3, 4, 5)}
    assert following.left == (m.Change(m.GroupName("c"), "its connection closed"),)


def test_it_counts_although_a_member_died_that_had_voted_ok():
    desk = running("a", "b", "c")
    desk.vote("a")
    desk.vote("b")
    desk.close("a")
    assert committed(desk.vote("c")) == ["b", "c"]


def test_a_commit_below_min_replicas_counts_and_then_the_job_waits():
    desk = running("a", "b", min_replicas=2)
    desk.vote("a")
    done = desk.close("b")
    assert done.only(m.Commit)["a"].next is None
    assert desk.step == 1
    assert desk.job.quorum is None
    desk.come("b", incarnation=2)
    assert sorted(desk.ready("b").only(m.NewQuorum)) == ["a", "b"]


# ---- immediate retries ----


def test_a_loss_before_any_vote_tries_the_step_again_at_once():
    desk = running("a", "b", "c")
    again = tried_again(desk.close("b"))
    assert again is not None
    assert (again.quorum_id, again.step) == (2, 0)
    assert shards(again) == {"a": (0, 1, 2), "c": (3, 4, 5)}
    assert desk.step == 0


def test_a_loss_tries_again_at_once_although_another_has_failed_already():
    # It usually accuses the dead member; and without an ok vote, waiting cannot lead to a commit.
    desk = running("a", "b", "c")
    assert desk.fail("a", "b").sent == []
    assert tried_again(desk.close("b")) is not None


def test_survivors_keep_their_shards_and_the_next_boundary_deals_evenly_again():
    desk = running("a", "b", "c")
    again = tried_again(desk.close("a"))
    assert again is not None
    assert shards(again) == {"b": (0, 2, 3), "c": (1, 4, 5)}
    desk.commit()
    assert shards(desk.quorum) == {"b": (0, 1, 2), "c": (3, 4, 5)}
    assert desk.quorum.quorum_id == 3


def test_survivors_keep_their_shards_while_the_job_waits_for_more_groups():
    desk = running("a", "b", "c", min_replicas=3)
    desk.close("a")
    assert desk.job.quorum is None
    desk.come("a", incarnation=2)
    assert shards(desk.quorum) == {"a": (0, 1), "b": (2, 3), "c": (4, 5)}


def test_who_comes_and_goes_a_hundred_times_is_told_once():
    desk = running("a", "b", "c", min_replicas=3)
    desk.close("c")
    for _ in range(100):
        desk.come("b")
        desk.close("b")
    assert desk.job.left == (
        m.Change(m.GroupName("c"), "its connection closed"),
        m.Change(m.GroupName("b"), "its connection closed"),
    )


# ---- grace ----


def test_after_an_ok_a_loss_waits_for_the_other_votes():
    desk = running("a", "b", "c")
    desk.vote("a")
    assert desk.close("c").sent == []
    desk.wait(0.9)
    assert desk.quorum.quorum_id == 1
    assert committed(desk.vote("b")) == ["a", "b"]


def test_the_grace_ends_and_the_step_is_tried_again_with_everyone_who_is_not_accused():
    desk = running("a", "b", "c")
    desk.vote("a")
    desk.close("c")
    desk.wait(1.3)
    assert members(desk) == ["a", "b"]
    assert desk.quorum.quorum_id == 2


def test_a_failed_vote_gives_the_accused_time_to_speak():
    desk = running("a", "b", "c")
    assert desk.fail("a", "b").sent == []
    assert desk.fail("c", "b").sent == []
    again = tried_again(desk.fail("b", "a"))
    assert again is not None
    assert sorted(shards(again)) == ["a", "b", "c"]


def test_a_failed_vote_gives_the_accused_time_to_die():
    desk = running("a", "b", "c")
    desk.fail("a", "b")
    desk.fail("c", "b")
    again = tried_again(desk.close("b"))
    assert again is not None
    assert sorted(shards(again)) == ["a", "c"]


def test_who_has_computed_is_accused_and_silent_is_evicted_when_the_grace_is_over():
    desk = running("a", "b", "c")
    desk.computed("a", "b", "c")
    desk.fail("a", "b", reason="no bytes for 30 s")
    desk.fail("c", "b", reason="timed out")
    evicted = [done.only(m.Evicted)["b"] for done in desk.wait(1.3) if done.only(m.Evicted)]
    assert evicted == [m.Evicted("a says: no bytes for 30 s; c says: timed out", may_return=True)]
    assert members(desk) == ["a", "c"]


def test_who_still_computes_is_not_put_out_for_its_silence():
    """Its connection was reset while it computed: the step is tried again with it."""
    desk = running("a", "b", "c")
    desk.computed("a", "c")
    desk.fail("a", "b", reason="connection reset")
    desk.fail("c", "b", reason="connection reset")
    (retried,) = [quorum for done in desk.wait(1.3) if (quorum := tried_again(done)) is not None]
    assert [member.group for member in retried.members] == ["a", "b", "c"]
    assert desk.job.blamed == {}


def test_who_still_computes_goes_when_its_link_keeps_failing():
    desk = running("a", "b", "c")
    for _ in range(2):
        assert members(desk) == ["a", "b", "c"]
        desk.fail("a", "b", reason="no route to host")
        desk.fail("c", "b", reason="no route to host")
        desk.wait(1.3)
    assert members(desk) == ["a", "c"]


def test_who_is_silent_but_not_accused_stays():
    desk = running("a", "b", "c")
    desk.fail("a")
    desk.wait(1.3)
    assert desk.quorum.quorum_id == 2
    assert members(desk) == ["a", "b", "c"]


def test_who_is_accused_but_speaks_stays():
    desk = running("a", "b", "c")
    desk.fail("a", "b")
    desk.vote("b")
    desk.wait(1.3)
    assert members(desk) == ["a", "b", "c"]
    assert desk.quorum.quorum_id == 2


def test_a_coordinator_that_stood_still_counts_the_votes_that_waited_before_it_judges():
    desk = running("a", "b", "c")
    desk.tick()
    desk.fail("a", "b")
    desk.now_s += 2.0  # the grace is long over, but b's vote may be the next message in line
    desk.fail("c", "b")
    desk.tick(0.0)
    assert "b" in desk.job.groups
    desk.fail("b", "a")
    assert members(desk) == ["a", "b", "c"]


def test_the_grace_is_short_where_the_heartbeat_timeout_is():
    desk = running("a", "b", "c", heartbeat_timeout_s=1.0)
    desk.vote("a")
    desk.close("c")
    desk.wait(0.4)
    assert desk.quorum.quorum_id == 2


# ---- the same members fail again ----


def test_a_dead_link_between_two_healthy_groups_costs_the_later_one_its_place():
    desk = running("a", "b", "c")
    _all_fail(desk, a=["b"], b=["a"], c=[])
    assert members(desk) == ["a", "b", "c"]
    _all_fail(desk, a=["b"], b=["a"], c=[])
    assert members(desk) == ["a", "c"]
    assert "b" not in desk.job.groups


def test_later_by_name_counts_numbers():
    desk = running("g-9", "g-10")
    for _ in range(2):
        desk.fail("g-9", "g-10")
        desk.fail("g-10", "g-9")
    assert members(desk) == ["g-9"]


def test_the_most_accused_goes_even_if_its_name_is_the_first():
    desk = running("a", "b", "c")
    for _ in range(2):
        _all_fail(desk, a=["b", "c"], b=["a"], c=["a"])
    assert members(desk) == ["b", "c"]


def test_who_only_passes_a_failure_on_stays_however_many_accuse_it():
    # As in rows and columns: b and f lost each other; the others saw connections close in a cascade.
    desk = running("a", "b", "c", "d", "e", "f")
    for _ in range(2):
        _all_fail(desk, a=["c"], b=["f"], c=["b"], d=["c"], e=["c"], f=["b"])
    assert members(desk) == ["a", "c", "d", "e", "f"]


def test_who_accuses_nobody_may_be_the_cause_of_a_cascade():
    desk = running("a", "b", "c", "d")
    for _ in range(2):
        _all_fail(desk, a=["c"], b=["c"], c=["d"], d=[])
    assert members(desk) == ["a", "b", "c"]


def test_accusations_in_a_circle_leave_the_most_accused():
    desk = running("a", "b", "c", "d")
    for _ in range(2):
        _all_fail(desk, a=["b"], b=["c"], c=["a"], d=["b"])
    assert members(desk) == ["a", "c", "d"]


def test_one_voice_is_one_accusation_however_often_it_is_raised():
    desk = running("a", "b", "c", "d")
    for _ in range(2):
        _all_fail(desk, a=["d"] * 9, b=["c"], c=[], d=["c"])
    assert members(desk) == ["a", "b", "d"]


def test_if_nobody_is_accused_the_last_of_those_who_failed_goes():
    desk = running("a", "b", "c")
    for _ in range(2):
        desk.fail("a")
        desk.fail("b")
        desk.vote("c")
    assert members(desk) == ["a", "c"]


def test_a_loss_in_between_gives_the_survivors_another_try():
    desk = running("a", "b", "c")
    _all_fail(desk, a=["b"], b=["a"], c=[])
    desk.close("c")
    desk.fail("a", "b")
    desk.fail("b", "a")
    assert members(desk) == ["a", "b"]


def test_a_commit_gives_everyone_another_try():
    desk = running("a", "b")
    for _ in range(3):
        _all_fail(desk, a=["b"], b=["a"])
        assert committed(desk.commit()) == ["a", "b"]


def test_reasons_for_people_stay_short():
    desk = running(*(f"g-{i}" for i in range(40)))
    for i in range(39):
        desk.fail(f"g-{i}", "g-39", reason="x" * 9000)
    desk.computed("g-39")
    (evicted,) = [done.only(m.Evicted)["g-39"] for done in desk.wait(1.3) if done.only(m.Evicted)]
    assert len(evicted.reason) < 4000
    assert evicted.reason.endswith("; 29 more")


# ---- votes that do not count ----


def test_a_vote_of_an_older_quorum_does_not_count():
    desk = running("a", "b", "c")
    desk.close("c")
    assert desk.vote("a", quorum_id=1).sent == []
    assert desk.vote("b", quorum_id=1).sent == []
    assert desk.step == 0


def test_a_vote_of_a_group_outside_the_quorum_does_not_count():
    desk = running("a", "b")
    desk.come("c")
    desk.vote("a")
    assert desk.vote("c").sent == []
    assert desk.step == 0


def test_a_vote_of_a_new_incarnation_does_not_count_for_the_old_one():
    desk = running("a", "b", "c")
    desk.vote("a")
    desk.close("b")
    desk.come("b", incarnation=2)
    assert desk.vote("b").sent == []
    assert committed(desk.vote("c")) == ["a", "c"]


@pytest.mark.parametrize("first", [True, False])
def test_a_vote_is_given_once(*, first: bool):
    desk = running("a", "b")
    for ok in (first, not first):
        desk.say("a", m.Vote(m.QuorumId(1), m.Step(0), ok, () if ok else (m.GroupName("b"),), ""))
    if first:
        assert committed(desk.vote("b")) == ["a", "b"]
    else:
        assert tried_again(desk.vote("b")) is not None


# ---- a member that comes back before the commit ----


def test_a_member_that_reconnects_before_the_commit_is_not_taken_for_one_that_has_the_sum():
    # Its stream broke after a had voted; it dialled again at once, and only then b's vote came.
    desk = running("a", "b", "c")
    desk.vote("a")
    desk.close("c")
    desk.come("c", step=0, digest="")
    assert desk.group("c").phase is GroupPhase.READY
    done = desk.vote("b")
    assert committed(done) == ["a", "b"]
    # It is let in at the boundary, with the log of the missing sum, and does not donate until it has caught up.
    assert members(desk) == ["a", "b", "c"]
    heals = desk.come("d", digest="fresh").only(m.Heal)
    assert [donor.group for donor in heals["d"].donors] == ["a", "b"]


def test_a_member_that_reconnects_is_back_with_the_next_try():
    desk = running("a", "b", "c")
    desk.vote("a")
    desk.close("c")
    desk.come("c", step=0, digest="")
    again = tried_again(desk.fail("b", "c"))
    assert again is not None
    assert shards(again) == {"a": (0, 1), "b": (2, 3), "c": (4, 5)}


def test_a_new_incarnation_on_an_old_seat_makes_a_new_quorum():
    # The same names and the same shards, but a member at another address and with another state.
    desk = running("a", "b", "c")
    desk.vote("a")
    desk.close("b")
    healing(desk, "b", incarnation=2)
    desk.ready("b")
    done = desk.vote("c")
    following = done.only(m.Commit)["a"].next
    assert following is not None
    assert [(member.group, member.incarnation) for member in following.members] == [
        ("a", 1),
        ("b", 2),
        ("c", 1),
    ]
    assert done.only(m.NewQuorum) == {"b": following}


def _all_fail(desk: Desk, **accusations: list[str]) -> None:
    for name, accused in accusations.items():
        desk.fail(name, *accused)


def test_one_that_has_left_and_is_back_before_the_commit_is_told_that_it_takes_part():
    # Same members and incarnations, but a new quorum, because the returned member waits for one.
    desk = running("a", "b")
    desk.vote("a")
    desk.leave("b", finished=True)
    desk.come("b")
    done = desk.tick()
    assert done.only(m.NewQuorum).keys() == {"b"}
    assert desk.quorum.quorum_id == 2
    assert members(desk) == ["a", "b"]
