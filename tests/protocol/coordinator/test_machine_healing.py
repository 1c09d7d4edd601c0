"""Joiners, donors and spares, and groups that come back."""

import pytest
from jaxft_protocol import messages as m
from jaxft_protocol.coordinator.job import Close, GroupPhase
from jaxft_protocol.values import changed

from .helpers import committed, healing, members, running, shards, tried_again

# ---- donors ----


def test_a_joiner_gets_all_of_a_few_holders_as_donors_and_each_of_them_a_pin():
    desk = running("a", "b")
    desk.commit()
    done = desk.come("c", digest="fresh")
    heal = done.only(m.Heal)["c"]
    assert (heal.step, [donor.address for donor in heal.donors]) == (1, ["a:1", "b:1"])
    assert done.only(m.Pin) == {
        name: m.Pin(heal.heal_id, m.Step(1), stripe=m.Stripe(number, 2)) for number, name in enumerate("ab")
    }


def test_pins_precede_the_heal_and_every_later_commit():
    desk = running("a")
    healing(desk, "b")
    desk.ready("b")
    done = desk.come("c", digest="fresh")
    kinds = [(name, type(message)) for name, message in done.sent]
    assert kinds == [("a", m.Pin), ("c", m.Heal)]
    assert all(not isinstance(message, m.Pin) for message in desk.commit().to("a"))


def test_a_joiner_that_fails_to_heal_is_pinned_anew_after_the_commit_that_moved_the_frontier():
    desk = running("a")
    first = healing(desk, "b")
    desk.commit()
    done = desk.heal_failed("b")
    assert [type(message) for message in done.to("a")] == [m.Release, m.Pin]
    heal = done.only(m.Heal)["b"]
    assert (heal.heal_id, heal.step) == (first + 1, 1)


def test_heal_ids_are_never_used_twice():
    desk = running("a")
    ids = [healing(desk, "b")]
    for _ in range(5):
        desk.heal_failed("b")
        desk.wait(10.2)
        assert desk.group("b").heal_id is not None
        ids.append(desk.group("b").heal_id)
    ids.append(healing(desk, "c"))
    assert len(set(ids)) == 7


def test_heals_that_keep_failing_begin_less_and_less_often():
    """As behind a firewall that stops this group alone. Each heal has donors keep a state."""
    desk = running("a", heartbeat_timeout_s=2.0)
    healing(desk, "b")
    desk.heal_failed("b")
    pauses_s: list[float] = []
    for failed in (*range(1, 8), 1100):  # 2 ** 1100 is no float
        desk.job = changed(
            desk.job, groups={**desk.job.groups, "b": changed(desk.group("b"), heals_failed=failed)}
        )
        desk.heal_failed("b")
        began_s = desk.now_s
        while desk.group("b").phase is GroupPhase.STALE:
            desk.tick(0.1)
        pauses_s.append(round(desk.now_s - began_s, 1))
    assert pauses_s[:6] == pytest.approx([0.4, 0.8, 1.6, 3.2, 4.0, 4.0], abs=0.11)
    assert max(pauses_s) < 4.2, "however often"
    desk.ready("b")
    desk.commit()
    desk.commit()
    healing(desk, "c")
    assert desk.heal_failed("c").only(m.Heal), "another group does not wait"


def test_a_just_admitted_group_donates_nothing_until_its_first_commit():
    desk = running("a")
    healing(desk, "b")
    desk.ready("b")
    desk.commit()
    assert members(desk) == ["a", "b"]
    assert [donor.group for donor in desk.come("c", digest="x").only(m.Heal)["c"].donors] == ["a"]
    desk.commit()
    assert [donor.group for donor in desk.come("d", digest="x").only(m.Heal)["d"].donors] == ["a", "b"]


def test_an_equal_step_number_proves_nothing():
    desk = running("a", "b")
    desk.commit()
    done = desk.come("c", step=1, digest="d")
    assert done.only(m.Heal)["c"].step == 1


def test_a_just_admitted_group_that_is_left_alone_without_the_last_sum_is_no_donor_either():
    desk = running("a")
    healing(desk, "b")
    desk.ready("b")
    desk.commit()
    desk.close("a")
    assert members(desk) == ["b"]  # it may have the sum already; if not it reports that
    assert desk.come("c", digest="x").only(m.Heal) == {}
    desk.heal_failed("b")
    assert desk.job.quorum is None
    assert "step 1 needs 1 groups that hold it, and 0 do (none)" in desk.tick().only(m.Waiting)["b"].reason


def test_when_no_member_lives_spares_that_healed_to_the_very_frontier_donate():
    desk = running("a", "b", min_replicas=2)
    desk.commit()
    healing(desk, "spare")
    desk.ready("spare")
    desk.wait(5.3, silent=("a", "b"))
    assert desk.job.quorum is None
    assert desk.group("spare").phase is GroupPhase.READY
    done = desk.come("c", digest="fresh")
    assert [donor.group for donor in done.only(m.Heal)["c"].donors] == ["spare"]
    assert sorted(desk.ready("c").only(m.NewQuorum)) == ["c", "spare"]


def test_a_just_admitted_group_says_that_it_has_the_last_sum_and_then_donates():
    # Otherwise, if the last founder dies now, the job would not know that a live group holds its state.
    desk = running("a", "b", min_replicas=2)
    healing(desk, "c")
    desk.ready("c")
    desk.commit()
    desk.ready("c")
    assert desk.group("c").phase is GroupPhase.MEMBER
    desk.close("a")
    desk.close("b")
    assert [donor.group for donor in desk.come("d", digest="x").only(m.Heal)["d"].donors] == ["c"]


def test_a_joiner_that_lacks_a_step_donates_nothing_even_if_it_is_the_last():
    desk = running("a")
    healing(desk, "b")
    desk.commit()
    desk.ready("b", step=0)
    desk.close("a")
    assert desk.come("c", digest="x").only(m.Heal) == {}


def test_a_spare_donates_only_if_there_is_no_member():
    desk = running("a")
    healing(desk, "spare")
    desk.ready("spare")
    assert [donor.group for donor in desk.come("b", digest="x").only(m.Heal)["b"].donors] == ["a"]


def test_a_joiner_without_donors_gets_them_as_soon_as_a_holder_is_back():
    desk = running("a")
    desk.commit()
    desk.close("a")
    assert desk.come("b", digest="fresh").only(m.Heal) == {}
    done = desk.come("a", step=1, digest="")
    assert done.only(m.Heal)["b"].step == 1
    assert members(desk) == ["a"]


# ---- entering ----


def test_joiners_are_told_when_the_frontier_moves():
    desk = running("a", "b")
    healing(desk, "c")
    healing(desk, "d")
    desk.ready("d")
    desk.hello("compiles")
    done = desk.commit()
    assert done.only(m.FrontierMoved) == {"c": m.FrontierMoved(m.Step(1)), "d": m.FrontierMoved(m.Step(1))}


def test_a_joiner_that_is_ready_at_the_frontier_enters_with_the_commit():
    desk = running("a", "b")
    healing(desk, "c")
    assert desk.ready("c").sent == []
    done = desk.commit()
    following = done.only(m.Commit)["a"].next
    assert following is not None
    assert (following.step, shards(following)) == (1, {"a": (0, 1), "b": (2, 3), "c": (4, 5)})
    assert done.only(m.NewQuorum) == {"c": following}
    assert [change.group for change in following.joined] == ["c"]


def test_a_joiner_that_is_one_more_step_behind_does_not_enter():
    desk = running("a", "b")
    healing(desk, "c")
    desk.commit()
    desk.ready("c", step=0)
    assert committed(desk.commit()) == ["a", "b"]
    assert members(desk) == ["a", "b"]
    desk.ready("c", step=2)
    desk.commit()
    assert members(desk) == ["a", "b", "c"]


def test_a_joiner_that_lacks_a_sum_is_nothing_without_those_who_have_it():
    desk = running("a")
    healing(desk, "late")
    desk.commit()
    desk.ready("late", step=0)
    desk.close("a")
    assert desk.job.quorum is None


def test_ready_of_a_heal_that_was_given_up_means_nothing():
    desk = running("a")
    old = healing(desk, "b")
    desk.heal_failed("b")
    desk.say("b", m.Ready(old, m.Step(0)))
    assert desk.group("b").phase is GroupPhase.HEALING


def test_a_member_that_cannot_get_the_last_sum_goes_back_to_healing_and_the_step_on_without_it():
    desk = running("a", "b")
    healing(desk, "c")
    desk.ready("c")
    desk.commit()
    done = desk.heal_failed("c")
    again = tried_again(done)
    assert again is not None
    assert shards(again) == {"a": (0, 1, 4), "b": (2, 3, 5)}
    assert [(change.group, change.reason) for change in again.left] == [("c", "it could not catch up")]
    assert done.only(m.Heal)["c"].step == 1


# ---- releasing pins ----


def test_donors_are_released_with_the_joiners_first_commit_and_not_before():
    desk = running("a", "b")
    heal_id = healing(desk, "c")
    desk.ready("c")
    assert desk.commit().only(m.Release) == {}
    done = desk.commit()
    assert done.only(m.Release) == {"a": m.Release(heal_id), "b": m.Release(heal_id)}
    assert desk.commit().only(m.Release) == {}


def test_donors_are_released_when_the_joiner_is_evicted_or_leaves():
    desk = running("a")
    first = healing(desk, "b")
    assert desk.leave("b").only(m.Release) == {"a": m.Release(first)}
    second = healing(desk, "c")
    released = [done.only(m.Release) for done in desk.wait(5.2, silent=("c",))]
    assert [each for each in released if each] == [{"a": m.Release(second)}]


# ---- groups that come back ----


def test_the_same_incarnation_at_the_frontier_needs_no_heal():
    desk = running("a", "b", min_replicas=2)
    desk.commit()
    desk.close("b")
    done = desk.come("b", step=1, digest="")
    assert done.only(m.Heal) == {}
    assert sorted(done.only(m.NewQuorum)) == ["a", "b"]


def test_an_incarnation_that_healed_is_believed_when_it_comes_back():
    desk = running("a", "b", min_replicas=2)
    healing(desk, "c")
    desk.ready("c")
    desk.close("a")
    desk.close("b")
    desk.close("c")
    assert desk.come("c", step=0, digest="").only(m.Heal) == {}
    assert desk.group("c").phase is GroupPhase.MEMBER


def test_an_incarnation_that_never_held_a_state_of_the_job_is_not_believed():
    desk = running("a", "b")
    healing(desk, "c")
    desk.close("c")
    assert desk.come("c", step=0, digest="fresh").only(m.Heal)["c"].step == 0


def test_founders_of_a_founding_that_came_to_nothing_are_not_believed():
    desk = running("a")
    desk.hello("b")
    desk.close("a")
    desk.join("b", digest="of another seed")
    assert members(desk) == ["b"]
    assert desk.come("a", digest="d").only(m.Heal)["a"].step == 0


def test_what_is_believed_is_kept_for_one_incarnation_of_each_name():
    desk = running("a")
    for incarnation in range(2, 30):
        healing(desk, "b", incarnation)
        desk.ready("b")
    assert desk.job.proven == {"a": 1, "b": 29}


def test_the_same_incarnation_behind_the_frontier_heals():
    desk = running("a", "b")
    desk.close("b")
    desk.commit()
    assert desk.come("b", step=0, digest="d").only(m.Heal)["b"].step == 1


def test_who_voted_ok_and_lost_its_stream_holds_the_frontier_once_that_counts():
    # It learns from Welcome that its step is committed, and applies it; if all others die, it still holds the state.
    desk = running("a", "b")
    desk.vote("b")
    desk.close("b")
    assert committed(desk.vote("a")) == ["a"]
    assert desk.hello("b").only(m.Welcome)["b"] == m.Welcome(
        1667, m.Step(1), m.QuorumId(1), frontier_held=True
    )
    desk.close("a")
    assert sorted(desk.join("b", step=1, digest="").only(m.NewQuorum)) == ["b"]


def test_who_voted_ok_and_left_does_not_hold_it():
    # A group that leaves no longer applies anything.
    desk = running("a", "b")
    desk.vote("b")
    desk.leave("b")
    desk.vote("a")
    assert [donor.group for donor in desk.come("c", digest="x").only(m.Heal)["c"].donors] == ["a"]


def test_another_process_with_the_name_of_a_group_is_turned_away():
    """As by a second launch of a job. The group may hold the only state."""
    desk = running("a", "b")
    before = desk.job
    done = desk.hello("b", incarnation=2, stream=1)
    (heard,) = done.only(m.Evicted).values()
    assert heard.reason.startswith(
        "another process takes part as 'b', at b:1. Each group of a job needs a unique name"
    )
    assert heard.may_return
    assert done.closed == ["new b"]
    assert desk.job == before
    assert len(done.reports) == 1
    assert desk.hello("b", incarnation=2, stream=2).reports == []


@pytest.mark.parametrize("goes", ["dies", "is silent", "leaves"])
def test_it_takes_the_name_once_that_group_is_gone(goes: str):
    desk = running("a", "b")
    if goes == "leaves":
        desk.leave("b")
    if goes == "is silent":
        desk.wait(5.2, silent=("b",))
    elif goes == "dies":
        desk.close("b")
    else:
        desk.commit()
        desk.close("b")
    assert "b" in desk.hello("b", incarnation=2).only(m.Welcome)
    assert desk.group("b").incarnation == 2


def test_a_reconnecting_group_ends_its_old_session():
    desk = running("a", "b")
    old = desk.sessions["b"]
    done = desk.hello("b")
    assert Close(old) in done.effects
    assert done.only(m.Evicted) == {}
    assert old not in desk.job.sessions


def test_the_late_end_of_an_old_session_does_not_touch_the_new_one():
    desk = running("a", "b")
    old = desk.sessions["b"]
    desk.come("b", incarnation=2)
    desk.sessions["old"] = old
    assert desk.close("old").effects == ()
    assert "b" in desk.job.groups


def test_nothing_is_kept_of_those_who_come_and_go():
    desk = running("a")
    for incarnation in range(2, 50):
        healing(desk, "b", incarnation)
        desk.hello("c", incarnation)
        desk.close("b")
    desk.close("c")
    assert list(desk.job.groups) == ["a"]
    assert len(desk.job.sessions) == 1
    assert desk.job.left == ()
