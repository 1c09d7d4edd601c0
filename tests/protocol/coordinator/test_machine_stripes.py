"""Which donors keep which stripe for a joiner, and what happens if a donor is lost."""

from collections import Counter

import pytest
from jaxft_protocol import messages as m
from jaxft_protocol.coordinator.donors import MAX_DONORS
from jaxft_protocol.coordinator.job import GroupPhase

from .helpers import Desk, Done, healing, members, running

GROUPS = tuple(f"g{number}" for number in range(7))


def asked_by(done: Done) -> dict[str, m.Stripe]:
    """Which stripe each donor is asked to keep for one heal."""
    pins = done.only(m.Pin)
    assert len({pin.heal_id for pin in pins.values()}) <= 1
    return {name: pin.stripe for name, pin in pins.items()}


def untold(*groups: str) -> Desk:
    """A job at step 1 whose donors do not send the digest of their state yet."""
    desk = running(*groups)
    desk.commit()
    desk.tells_digests = False
    return desk


@pytest.mark.parametrize(("groups", "donors"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (7, 4)])
def test_the_stripes_of_a_heal_make_up_the_whole(groups: int, donors: int):
    desk = running(*GROUPS[:groups])
    done = desk.come("new", digest="fresh")
    asked = asked_by(done)
    assert [asked[name] for name in sorted(asked)] == [m.Stripe(number, donors) for number in range(donors)]
    assert [donor.group for donor in done.only(m.Heal)["new"].donors] == sorted(asked)


def test_joiners_that_come_together_are_spread_over_the_donors():
    desk = running(*GROUPS)
    served: Counter[str] = Counter()
    for number in range(7):
        served.update([*asked_by(desk.come(f"new-{number}", digest="fresh"))])
        assert max(served.values()) - min(served[name] for name in GROUPS) <= 1
    assert set(served.values()) == {MAX_DONORS}


def test_joiners_that_come_one_after_another_are_spread_too():
    desk = running(*GROUPS)
    served: Counter[str] = Counter()
    for _ in range(14):
        served.update([*asked_by(desk.come("new", digest="fresh"))])
        desk.close("new")
    assert set(served) == set(GROUPS)


def test_a_heal_that_is_over_is_no_load():
    desk = running("a", "b", "c", "d", "e")
    first = asked_by(desk.come("new", digest="fresh"))
    (spared,) = {"a", "b", "c", "d", "e"} - set(first)
    assert spared in asked_by(desk.come("other", digest="fresh"))
    desk.close("new")
    desk.close("other")
    again = [asked_by(desk.come(f"more-{number}", digest="fresh")) for number in range(5)]
    assert Counter(name for asked in again for name in asked) == dict.fromkeys("abcde", 4)


def test_a_donor_that_is_drained_is_the_last_choice():
    desk = running("a", "b", "c", "d", "e")
    desk.say("c", m.Drain())
    assert set(asked_by(desk.come("new", digest="fresh"))) == {"a", "b", "d", "e"}
    for name in ("a", "b"):
        desk.close(name)
    assert set(asked_by(desk.come("other", digest="fresh"))) == {"c", "d", "e"}


def test_a_donor_that_is_away_is_the_last_choice():
    """Its digest takes until it comes back."""
    desk = running("a", "b", "c", "d", "e")
    desk.say("b", m.Heartbeat(away=True))
    assert set(asked_by(desk.come("new", digest="fresh"))) == {"a", "c", "d", "e"}


# ---- a stripe that is lost ----


def test_a_heal_that_has_failed_asks_all_donors_for_all():
    """The same donors may be out of its reach again."""
    desk = running(*GROUPS)
    healing(desk, "new")
    desk.commit()
    done = desk.heal_failed("new")
    assert asked_by(done) == dict.fromkeys(GROUPS, m.WHOLE)
    assert done.only(m.Heal)["new"].step == 1
    assert {donor.group for donor in done.only(m.Heal)["new"].donors} == set(GROUPS)


def test_if_that_fails_too_it_is_stripes_again():
    """Where no donor has room for the whole state, none can ever keep it."""
    desk = running(*GROUPS)
    healing(desk, "new")
    asked = [asked_by(desk.heal_failed("new"))]
    for _ in range(3):
        desk.heal_failed("new")
        waited = [done for done in desk.wait(10.2) if done.only(m.Pin)]
        asked.append(asked_by(waited[0]))
    assert [len(each) for each in asked] == [7, 4, 7, 4]
    assert [m.WHOLE in each.values() for each in asked] == [True, False, True, False]


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_donors_that_die_before_they_have_told_leave_the_rest_to_the_others(lost: int):
    """A state that is not donated yet can be had of any of them: the joiner finds out."""
    desk = untold(*GROUPS[:4])
    asked = sorted(asked_by(desk.come("new", digest="fresh")))
    for name in asked[lost:]:
        desk.pinned(name, "new")
    done = [desk.close(name) for name in asked[:lost]][-1]
    assert [donor.group for donor in done.only(m.Heal)["new"].donors] == asked[lost:]


def test_a_stripe_that_is_lost_can_be_had_of_the_others_until_they_donate_it():
    desk = untold(*GROUPS[:3])
    lost, *others = sorted(asked_by(desk.come("new", digest="fresh")))
    for name in others:
        desk.pinned(name, "new")
    assert [donor.group for donor in desk.close(lost).only(m.Heal)["new"].donors] == others


# ---- donors that nothing confirms ----


@pytest.mark.parametrize("how", ["die", "cannot tell", "say nothing"])
def test_one_donor_of_four_is_not_believed_where_others_can_tell(how: str):
    desk = untold(*GROUPS)
    first, *others = sorted(asked_by(desk.come("new", digest="fresh")))
    desk.pinned(first, "new", digest=2)
    match how:
        case "die":
            done = [desk.close(name) for name in others][-1]
        case "cannot tell":
            done = [desk.pinned(name, "new", digest=None) for name in others][-1]
        case _:
            done = next(done for done in desk.wait(61) if done.only(m.Pin))
    assert not done.only(m.Heal)
    left = set(GROUPS) - set(others) if how == "die" else set(GROUPS)
    assert asked_by(done) == dict.fromkeys(left, m.WHOLE)
    assert any(f"only {first} of 4 donors has sent the digest" in report for report in done.reports)


def test_donors_that_all_say_nothing_serve_their_stripes():
    """They are in a step that is longer than the heartbeat timeout, and so would all the others be."""
    desk = untold(*GROUPS)
    asked = asked_by(desk.come("new", digest="fresh"))
    done = next(done for done in desk.wait(7) if done.only(m.Heal))
    assert {donor.group for donor in done.only(m.Heal)["new"].donors} == set(asked)
    assert not done.only(m.Pin)


def test_one_donor_is_enough_where_only_one_other_is_left():
    """That one would be asked alone, and nothing would confirm it either."""
    desk = untold(*GROUPS[:5])
    first, *others = sorted(asked_by(desk.come("new", digest="fresh")))
    desk.pinned(first, "new")
    desk.leave(first)
    done = [desk.close(name) for name in others][-1]
    assert [donor.group for donor in done.only(m.Heal)["new"].donors] == [first]


def test_where_no_other_can_tell_one_donor_is_enough():
    desk = untold(*GROUPS[:4])
    first, *others = sorted(asked_by(desk.come("new", digest="fresh")))
    desk.pinned(first, "new")
    done = [desk.close(name) for name in others][-1]
    assert [donor.group for donor in done.only(m.Heal)["new"].donors] == [first]


# ---- donors that differ ----


def test_if_a_few_donors_differ_all_are_asked():
    desk = untold(*GROUPS)
    first, *others = sorted(asked_by(desk.come("new", digest="fresh")))
    heal_id = desk.group("new").heal_id
    desk.pinned(first, "new", digest=2)
    done = [desk.pinned(name, "new", digest=1) for name in others][-1]
    assert done.only(m.Evicted) == {}
    assert {release.heal_id for release in done.only(m.Release).values()} == {heal_id}
    assert asked_by(done) == dict.fromkeys(GROUPS, m.WHOLE)
    assert done.only(m.Waiting)["new"].reason.startswith("the digest of state 1 at g0, g1")
    assert any("does not heal" in report and "asks all donors" in report for report in done.reports)


def test_two_corrupt_donors_of_four_that_were_asked_do_not_halt_a_job_of_seven():
    desk = untold(*GROUPS)
    corrupt = sorted(asked_by(desk.come("new", digest="fresh")))[:2]
    for name in sorted(dict(desk.group("new").donors)):
        desk.pinned(name, "new", digest=2 if name in corrupt else 1)
    done = [desk.pinned(name, "new", digest=2 if name in corrupt else 1) for name in GROUPS][-1]
    assert sorted(done.only(m.Evicted)) == corrupt
    assert [donor.group for donor in done.only(m.Heal)["new"].donors] == sorted(set(GROUPS) - set(corrupt))
    assert members(desk) == sorted(set(GROUPS) - set(corrupt))


def test_where_all_were_asked_a_tie_still_halts():
    desk = untold(*GROUPS[:4])
    desk.come("new", digest="fresh")
    for number, name in enumerate(GROUPS[:3]):
        desk.pinned(name, "new", digest=number // 2)
    assert desk.pinned(GROUPS[3], "new", digest=1).only(m.Halted).keys() == {*GROUPS[:4], "new"}


def test_donors_that_differ_twice_are_not_asked_for_ever():
    desk = untold(*GROUPS)
    desk.come("new", digest="fresh")
    for name in sorted(dict(desk.group("new").donors)):
        desk.pinned(name, "new", digest=int(name[1:]))
    assert desk.group("new").phase is GroupPhase.HEALING
    done = [desk.pinned(name, "new", digest=int(name[1:])) for name in GROUPS][-1]
    assert "new" in done.only(m.Halted)


def test_those_who_follow_keep_all_donors():
    desk = running(*GROUPS)
    done = desk.come("late")
    assert done.only(m.Heal)["late"].log_only
    assert set(done.only(m.Pin)) == set(GROUPS)
    assert all(pin.log_only and pin.stripe == m.WHOLE for pin in done.only(m.Pin).values())
