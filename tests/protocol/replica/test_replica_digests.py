"""Digests of the state that a group holds: for its Join, and for groups that heal from it."""

import pytest
from jaxft_protocol import messages as m
from jaxft_protocol.replica import state as r
from jaxft_protocol.values import changed

from .test_replica import DONORS, SETTINGS, Group, applying, commit, connected, voted, welcome, working

PIN = m.Pin(m.HealId(2), m.Step(0))


def heard(group: Group) -> list[m.Pinned]:
    return [message for message in group.sent if isinstance(message, m.Pinned)]


def slow(group: Group) -> Group:
    """Its training thread takes digests only when the test asks for it."""
    group.takes_digests = False
    return group


def moved() -> Group:
    """A group at state 1, whose digest it has not taken."""
    group = slow(working())
    group.on(r.Exchanged(m.QuorumId(1), m.Step(0))).hear(commit(1, 0)).on(r.Applied(m.Step(1)))
    assert group.phase is r.Phase.WORKING
    return group


# ---- coming back ----


def test_one_that_comes_back_takes_the_digest_of_what_it_holds_before_it_joins():
    group = moved().on(r.Disconnected("")).on(r.Connected()).hear(welcome(1, 1))
    assert (group.phase, group.sent, group.directive) == (r.Phase.PRESENT, [], r.TakeDigest(m.Step(1)))
    (join,) = group.on(r.Digested(m.Step(1), 0xABC)).sent
    assert join == m.Join(m.Step(1), 0xABC, SETTINGS, m.QuorumId(1), 2, members=2)


def test_a_digest_that_cannot_be_taken_keeps_no_group_outside():
    group = moved().on(r.Disconnected("")).on(r.Connected()).hear(welcome(1, 1))
    (join,) = group.on(r.Digested(m.Step(1), None)).sent
    assert isinstance(join, m.Join)
    assert join.digest is None


def test_the_digest_of_a_state_that_it_has_left_says_nothing():
    group = moved().on(r.Disconnected("")).on(r.Connected()).hear(welcome(1, 1))
    assert group.on(r.Digested(m.Step(0), 0xABC)).sent == []
    assert group.directive == r.TakeDigest(m.Step(1))


def test_it_says_how_many_members_its_last_quorum_had():
    assert working().replica.last_members == 2


# ---- as a donor ----


def test_a_donor_that_knows_the_digest_says_it_at_once():
    assert heard(slow(working()).hear(PIN)) == [m.Pinned(m.HealId(2), 0xD1)]


def test_the_digest_of_a_vote_answers_a_pin():
    group = moved().hear(m.Pin(m.HealId(2), m.Step(1)))
    assert (heard(group), group.directive) == ([], r.Attempt(group.replica.quorum, m.Step(1)))
    assert heard(group.on(r.Exchanged(m.QuorumId(1), m.Step(1), 0xE))) == [m.Pinned(m.HealId(2), 0xE)]


def test_a_donor_that_waits_for_the_decision_is_asked_for_it():
    group = moved().on(r.Exchanged(m.QuorumId(1), m.Step(1))).hear(m.Pin(m.HealId(2), m.Step(1)))
    assert group.directive == r.TakeDigest(m.Step(1))
    assert heard(group.on(r.Digested(m.Step(1), 5))) == [m.Pinned(m.HealId(2), 5)]
    assert isinstance(group.directive, r.Wait)


def test_the_decision_goes_before_the_digest():
    group = (
        moved().on(r.Exchanged(m.QuorumId(1), m.Step(1))).hear(m.Pin(m.HealId(2), m.Step(1)), commit(1, 1))
    )
    assert group.directive == r.Apply(m.QuorumId(1), m.Step(1))
    # The training thread takes it before it overwrites the state.
    assert m.Step(1) in group.replica.digests_due.values()
    assert heard(group.on(r.Digested(m.Step(1), 5))) == [m.Pinned(m.HealId(2), 5)]


def test_a_state_that_it_does_not_hold_yet_is_waited_for():
    group = slow(applying()).hear(m.Pin(m.HealId(2), m.Step(1)))
    assert heard(group) == []
    group.on(r.Applied(m.Step(1)))
    assert heard(group.on(r.Exchanged(m.QuorumId(1), m.Step(1), 3))) == [m.Pinned(m.HealId(2), 3)]


def test_a_leaver_still_tells_the_digest_of_its_last_state():
    group = moved().on(r.LeaveNow(finished=True)).hear(m.Pin(m.HealId(2), m.Step(1)))
    assert group.directive == r.TakeDigest(m.Step(1))
    assert heard(group.on(r.Digested(m.Step(1), 5))) == [m.Pinned(m.HealId(2), 5)]
    assert group.hear(m.Goodbye()).phase is r.Phase.LEFT


def test_what_was_asked_on_a_lost_stream_is_asked_no_more():
    group = moved().hear(m.Pin(m.HealId(2), m.Step(1))).on(r.Disconnected("", busy=True))
    assert group.replica.digests_due == {}


@pytest.mark.parametrize("make", [working, voted, applying])
def test_a_state_that_was_healed_has_another_digest(make):
    group = slow(make()).on(r.Disconnected("")).on(r.Connected()).hear(welcome(3, 2))
    if isinstance(group.directive, r.Apply):
        group.on(r.Applied(m.Step(1)))
    group.on(r.Digested(group.replica.step, 9)).hear(m.Heal(m.HealId(5), m.Step(3), DONORS))
    group.on(r.Healed(m.HealId(5), m.Step(3)))
    assert not group.replica.digest_taken


# ---- as a joiner ----


def test_a_joiner_whose_donors_are_there_waits_for_as_long_as_it_takes():
    group = connected().hear(welcome(9, 4)).on(r.Prepared(m.Step(0), 0xD1, SETTINGS))
    group.hear(m.Waiting("the digest of state 9 at b, c", held=True))
    group.now_s = 10_000.0
    assert isinstance(group.on(r.Tick()).directive, r.Wait)
    group.hear(m.Waiting("step 9 needs 1 groups that hold it, and 0 do (none)"))
    group.now_s += 59.0
    assert isinstance(group.on(r.Tick()).directive, r.Wait)
    group.now_s += 2.0
    assert isinstance(group.on(r.Tick()).directive, r.Fail)


def test_a_group_that_goes_back_says_so():
    group = moved()
    group.replica = changed(group.replica, history=m.HistoryId(7))
    group.hear(m.Heal(m.HealId(5), m.Step(0), DONORS, history=m.HistoryId(7)))
    (line,) = group.notes
    assert line.startswith("this group goes back from step 1 to step 0: the job resumed from an older state")
