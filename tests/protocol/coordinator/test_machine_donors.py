"""Donors send the digest of the state that they keep before a joiner gets its list of donors."""

from jaxft_protocol import messages as m
from jaxft_protocol.coordinator.job import GroupPhase

from .helpers import Desk, committed, healing, members, running


def joined_by(*joiners: str, donors: tuple[str, ...] = ("a", "b", "c"), **options: float) -> Desk:
    """A job at step 1 whose donors were asked for the digest of their state, and have not sent it yet."""
    desk = running(*donors, **options)
    desk.commit()
    desk.tells_digests = False
    for name in joiners:
        desk.come(name, digest="fresh")
    return desk


def test_the_joiner_is_told_whom_to_ask_once_all_donors_have_told():
    desk = joined_by("new")
    assert desk.group("new").phase is GroupPhase.HEALING
    for donor in ("a", "b"):
        assert desk.pinned(donor, "new").only(m.Heal) == {}
    done = desk.pinned("c", "new")
    heal = done.only(m.Heal)["new"]
    assert (heal.step, [donor.group for donor in heal.donors]) == (1, ["a", "b", "c"])
    assert done.to("new") == [heal]


def test_until_then_it_is_told_for_what_it_waits():
    desk = running("a", "b")
    desk.tells_digests = False
    (waiting,) = desk.come("new", digest="fresh").to("new")
    assert waiting == m.Waiting("the digest of state 0 at a, b", held=True)


def test_a_donor_whose_training_thread_is_away_does_not_hold_up_a_joiner():
    desk = joined_by("new")
    heal_id = desk.group("new").heal_id
    for donor in ("a", "b"):
        desk.pinned(donor, "new")
    heard = [done for done in desk.wait(5.3) if done.only(m.Heal)]
    assert [donor.group for donor in heard[0].only(m.Heal)["new"].donors] == ["a", "b"]
    assert heard[0].only(m.Release) == {"c": m.Release(heal_id)}
    before = desk.job.frontier
    desk.say("c", m.Pinned(heal_id, 99))
    assert desk.job.frontier == before


def test_one_donor_of_two_that_is_corrupt_does_not_feed_a_joiner_while_the_other_is_away():
    """Otherwise the two would outvote the healthy group in the next step."""
    desk = joined_by("new", donors=("a", "c"))
    desk.pinned("c", "new", digest=2)
    assert not [done for done in desk.wait(20.0) if done.only(m.Heal)]
    assert desk.pinned("a", "new", digest=1).only(m.Halted).keys() == {"a", "c", "new"}


def test_a_minority_that_has_told_serves_in_the_end():
    desk = joined_by("new", donors=("a", "b"), join_timeout_s=10.0)
    desk.pinned("a", "new")
    assert not [done for done in desk.wait(9.0) if done.only(m.Heal)]
    (heard,) = [done for done in desk.wait(2.0) if done.only(m.Heal)]
    assert [donor.group for donor in heard.only(m.Heal)["new"].donors] == ["a"]


def test_where_all_donors_are_away_they_serve_without_being_compared():
    desk = joined_by("new")
    heals = [heal for done in desk.wait(5.3) for heal in done.only(m.Heal).values()]
    assert [[donor.group for donor in heal.donors] for heal in heals] == [["a", "b", "c"]]


def test_one_that_gets_its_donors_late_hears_how_far_the_job_is():
    desk = joined_by("new")
    desk.commit()
    desk.commit()
    for donor in ("a", "b"):
        desk.pinned(donor, "new")
    heal, moved = desk.pinned("c", "new").to("new")
    assert isinstance(heal, m.Heal)
    assert (heal.step, moved) == (1, m.FrontierMoved(m.Step(3)))


def test_a_corrupt_donor_feeds_no_joiner():
    desk = joined_by("new")
    desk.pinned("a", "new", digest=1)
    desk.pinned("b", "new", digest=2)
    done = desk.pinned("c", "new", digest=1)
    assert [donor.group for donor in done.only(m.Heal)["new"].donors] == ["a", "c"]
    assert "b: 0000000000000002" in done.only(m.Evicted)["b"].reason
    assert members(desk) == ["a", "c"]
    assert desk.come("b", step=1, digest="", history=desk.job.history).only(m.Pin).keys() == {"a", "c"}


def test_two_joiners_never_outvote_the_healthy_with_what_one_corrupt_donor_gave_them():
    desk = joined_by("new-1", "new-2")
    for joiner in ("new-1", "new-2"):
        for donor, digest in (("a", 1), ("b", 1), ("c", 2)):
            if donor in desk.job.groups:
                desk.pinned(donor, joiner, digest=digest)
    assert all("c" not in dict(desk.group(joiner).donors) for joiner in ("new-1", "new-2"))
    assert members(desk) == ["a", "b"]


def test_one_that_heals_again_because_a_commit_followed_is_given_the_new_state():
    desk = joined_by("new-1", "new-2")
    for joiner, heard in (("new-1", "abc"), ("new-2", "ab")):
        for donor in heard:
            desk.pinned(donor, joiner)
    desk.votes(a=None, b=None)
    done = desk.pinned(
        "c", "new-2", digest=8
    )  # it is evicted, all others have voted, and new-1 healed from it
    assert committed(done) == ["a", "b"]
    assert desk.step == 2
    for donor in ("a", "b"):
        after = done.to(donor)
        (pin,) = [message for message in after if isinstance(message, m.Pin)]
        assert pin.step == 2
        assert after.index(pin) > [isinstance(message, m.Commit) for message in after].index(True)


def test_of_two_donors_that_differ_neither_is_believed():
    desk = joined_by("new", donors=("a", "b"))
    desk.pinned("a", "new", digest=1)
    halted = desk.pinned("b", "new", digest=2).only(m.Halted)
    assert sorted(halted) == ["a", "b", "new"]
    assert "hold different states 1" in halted["new"].reason
    assert desk.job.groups == {}


def test_a_donor_that_dies_is_waited_for_no_longer():
    desk = joined_by("new")
    desk.pinned("a", "new")
    desk.pinned("b", "new")
    heal = desk.close("c").only(m.Heal)["new"]
    assert [donor.group for donor in heal.donors] == ["a", "b"]


def test_without_any_donor_left_it_is_given_others():
    desk = joined_by("new", donors=("a", "b"))
    desk.close("a")
    desk.close("b")
    assert desk.group("new").phase in (GroupPhase.STALE, GroupPhase.HEALING)
    done = desk.come("a", step=1, digest="")
    assert [donor.group for donor in done.only(m.Heal)["new"].donors] == ["a"]


def test_a_donor_that_cannot_take_it_is_let_go():
    desk = joined_by("new")
    desk.pinned("a", "new")
    heal_id = desk.group("new").heal_id
    assert desk.pinned("b", "new", digest=None).to("b") == [m.Release(heal_id)]
    heal = desk.pinned("c", "new").only(m.Heal)["new"]
    assert [donor.group for donor in heal.donors] == ["a", "c"]


def test_where_no_donor_can_take_it_a_joiner_asks_less_often():
    desk = joined_by("new", donors=("a", "b"))
    asked = 0
    for _ in range(100):
        if desk.group("new").heal_id is not None:
            asked += 1
            for donor in ("a", "b"):
                desk.pinned(donor, "new", digest=None)
        desk.tick(0.05)
    assert 2 <= asked <= 8  # in 5 s, each time but the first after a pause of 1 s


def test_a_digest_that_comes_late_or_from_another_means_nothing():
    desk = joined_by("new")
    heal_id = desk.group("new").heal_id
    assert heal_id is not None
    desk.come("other", digest="fresh")
    desk.say("other", m.Pinned(heal_id, 9))
    for donor in ("a", "b", "c"):
        desk.pinned(donor, "new")
    before = desk.job
    desk.say("a", m.Pinned(heal_id, 9))
    desk.say("a", m.Pinned(m.HealId(99), 9))
    assert desk.job == before


def test_a_group_that_is_at_the_frontier_needs_no_digest():
    desk = running("a", "b")
    desk.tells_digests = False
    heal = desk.come("late").only(m.Heal)["late"]
    assert heal.log_only


def test_a_leaver_that_alone_holds_the_state_tells_its_digest_too():
    desk = running("a")
    desk.commit()
    healing(desk, "old")
    desk.leave("a", finished=True)
    desk.tells_digests = False
    assert desk.come("new", digest="fresh").only(m.Heal).keys() == {"new"}
