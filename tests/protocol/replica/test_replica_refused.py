"""A group that was in its job is refused, by a coordinator that has taken the place of the former one."""

import pytest
from jaxft_protocol.messages import Evicted, Refused, Step
from jaxft_protocol.replica import state as r
from jaxft_protocol.replica.sessions import REFUSES

from .test_replica import SETTINGS, Group, connected, quorum, welcome


def in_its_job() -> Group:
    """At 100 s, with no coordinator any more."""
    group = connected().hear(welcome(term=3)).on(r.Prepared(Step(0), 0xD1, SETTINGS, 2)).hear(quorum(1, 0))
    group.now_s = 100.0
    return group.on(r.Disconnected("reset"))


def test_a_group_that_was_in_its_job_is_not_lost_by_a_coordinator_that_refuses_it():
    """It may hold the only state of the job, and an operator can repair the coordinator."""
    group, notes = in_its_job(), []
    for now_s in (120.0, 130.0):
        group.now_s = now_s
        group.on(r.Connected()).hear(Refused("protocol version 2 of group 'a' is not the coordinator's 3"))
        notes += group.notes
        assert group.phase is r.Phase.GREETING
        assert r.Close(REFUSES) in group.effects
        group.on(r.Disconnected(REFUSES)).on(r.Tick())
        assert group.phase is r.Phase.OFFLINE
    assert notes == [
        "the coordinator coordinator:29510 refused group 'a': protocol version 2 of group 'a' is not the "
        "coordinator's 3. This group was in its job before: it dials again, for 40 s more"
    ]
    group.now_s = 159.0
    group.on(r.Connected()).hear(welcome(0, 1, term=4))
    assert (group.phase, group.replica.refusal) == (r.Phase.JOINING, "")


def test_a_group_that_is_refused_for_the_whole_timeout_says_why():
    group = in_its_job()
    group.on(r.Connected()).hear(Refused("it does not know the token")).on(r.Disconnected(REFUSES))
    group.now_s = 160.1
    group.on(r.Tick())
    assert isinstance(group.directive, r.Fail)
    assert group.directive.failure.kind is r.FailureKind.JOIN_REFUSED
    assert "it does not know the token. This group was in its job before, and has dialled for 60 s." in (
        group.directive.failure.text
    )


def test_a_group_whose_hello_cannot_be_read_says_what_the_coordinator_says():
    why = "it broke the protocol: 'job' has 10001 characters"
    group = Group().on(r.Connected()).hear(Evicted(why, may_return=False))
    assert isinstance(group.directive, r.Fail)
    assert group.directive.failure.kind is r.FailureKind.JOIN_REFUSED
    assert f"the coordinator coordinator:29510 refused group 'a': {why}." in group.directive.failure.text


def test_a_group_that_was_in_its_job_waits_for_a_coordinator_that_can_read_its_hello():
    group = in_its_job().on(r.Connected()).hear(Evicted("it broke the protocol", may_return=False))
    assert group.phase is r.Phase.GREETING
    assert r.Close(REFUSES) in group.effects


@pytest.mark.parametrize("lost", ["connection refused", "no message from the coordinator for 2.0 s"])
def test_a_group_that_was_refused_and_then_finds_no_coordinator_says_that(lost: str):
    """It was stopped to put it right, which takes longer: the group is not to blame, and may be started again."""
    group = in_its_job()
    group.on(r.Connected()).hear(Refused("it does not know the token")).on(r.Disconnected(REFUSES))
    group.on(r.Disconnected(lost))
    group.now_s = 160.1
    group.on(r.Tick())
    assert isinstance(group.directive, r.Fail)
    assert group.directive.failure.kind is r.FailureKind.COORDINATOR_UNREACHABLE
    assert f"for 60 s (last: {lost})" in group.directive.failure.text


def test_a_coordinator_that_has_never_welcomed_the_group_refuses_it_at_once():
    group = Group().on(r.Connected()).hear(Refused("it does not know the token"))
    assert isinstance(group.directive, r.Fail)
    assert group.directive.failure.kind is r.FailureKind.JOIN_REFUSED


TAKEN = "another process takes part as 'a', at host:1"


def turned_away(group: Group) -> Group:
    return group.on(r.Connected()).hear(Evicted(TAKEN, may_return=True))


def test_a_group_whose_name_is_taken_dials_again_and_says_so_once():
    group, notes = Group(), []
    for now_s in (20.0, 21.0, 22.0):
        group.now_s = now_s
        notes += turned_away(group).notes
        group.on(r.Disconnected(REFUSES)).on(r.Tick())
        assert group.phase is r.Phase.OFFLINE
        assert group.directive == r.Wait("the other process of group 'a' to end")
    assert notes == [
        f"the coordinator coordinator:29510 does not admit group 'a': {TAKEN}. This process takes its place if that "
        "one ends: it dials again, for 40 s more"
    ]
    group.on(r.Connected()).hear(welcome())
    assert (group.phase, group.replica.refusal) == (r.Phase.PRESENT, "")


def test_a_group_whose_name_stays_taken_may_be_started_again():
    group = turned_away(Group()).on(r.Disconnected(REFUSES))
    group.now_s = 60.1
    group.on(r.Tick())
    assert isinstance(group.directive, r.Fail)
    assert group.directive.failure.kind is r.FailureKind.EVICTED
    assert (
        f"{TAKEN}. This process takes its place if that one ends, and has dialled for 60 s."
        in group.directive.failure.text
    )
