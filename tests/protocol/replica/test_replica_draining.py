"""A group that is drained ends its loop at a boundary; a group of a paused job waits there."""

import pytest
from jaxft_protocol.messages import Drain, Drained, Evicted, Goodbye, Leave, Paused, QuorumId, Step
from jaxft_protocol.replica import state as r

from .test_replica import Group, applying, commit, connected, joining, quorum, voted, working


def test_it_finishes_its_step_then_ends_its_loop_and_leaves():
    group = working().on(r.DrainNow())
    assert group.sent == [Drain()]
    assert isinstance(group.directive, r.Attempt)
    group.on(r.Exchanged(QuorumId(1), Step(0))).hear(commit(1, 0)).hear(Drained())
    assert group.directive == r.Apply(QuorumId(1), Step(0))
    group.on(r.Applied(Step(1)))
    assert (group.phase, group.directive) == (r.Phase.DRAINED, r.LeaveJob())
    assert group.on(r.LeaveNow(finished=False)).sent == [Leave(finished=False)]
    assert group.hear(Goodbye()).phase is r.Phase.LEFT


def test_in_a_round_of_inner_steps_it_leaves_at_once():
    group = working().on(r.DrainNow(at_once=True))
    assert group.sent == []
    assert (group.phase, group.directive) == (r.Phase.DRAINED, r.LeaveJob())
    assert group.on(r.LeaveNow(finished=False)).sent == [Leave(finished=False)]
    assert group.hear(Goodbye()).phase is r.Phase.LEFT


def test_once_it_has_voted_it_waits_for_the_decision():
    group = voted().on(r.DrainNow(at_once=True))
    assert group.sent == [Drain()]
    assert group.phase is r.Phase.VOTED


def test_an_operator_may_drain_it_as_well():
    group = applying().hear(Drained()).on(r.Applied(Step(1)))
    assert group.directive == r.LeaveJob()


@pytest.mark.parametrize("group", [connected(), joining(), working(), voted()])
def test_in_any_other_phase_it_ends_at_once(group: Group):
    if group.phase is r.Phase.GREETING:
        assert group.on(r.DrainNow()).phase is r.Phase.LEFT
    else:
        assert group.hear(Drained()).phase is r.Phase.DRAINED
    assert group.directive == r.LeaveJob()


def test_sigterm_twice_is_said_once():
    group = working().on(r.DrainNow())
    assert group.on(r.DrainNow()).sent == []


def test_without_the_coordinator_nobody_waits_for_it():
    group = working().on(r.DrainNow()).on(r.Disconnected("gone"))
    assert (group.phase, group.directive) == (r.Phase.LEFT, r.LeaveJob())
    offline = working().on(r.Disconnected("gone")).on(r.DrainNow())
    assert (offline.phase, offline.directive) == (r.Phase.LEFT, r.LeaveJob())
    assert offline.on(r.Connected()).sent == []


def test_a_stream_that_ends_after_the_drain_is_the_end():
    group = applying().hear(Drained()).on(r.Disconnected("closed"))
    assert group.on(r.Applied(Step(1))).directive == r.LeaveJob()


def test_after_its_end_it_is_too_late():
    group = working().hear(Drained()).on(r.LeaveNow(finished=True)).on(r.DrainNow())
    assert group.phase is r.Phase.LEAVING
    assert working().on(r.DrainNow()).hear(Evicted("its state", may_return=True)).phase is r.Phase.WORKING


def paused() -> Group:
    return voted().hear(Paused()).hear(commit(1, 0))


def test_a_paused_group_begins_no_step_until_the_next_quorum():
    group = paused()
    assert isinstance(group.directive, r.Apply)
    group.on(r.Applied(Step(1)))
    assert group.directive == r.Wait("an operator to resume the job, which is paused before step 1")
    group.hear(quorum(2, 1))
    assert group.directive == r.Attempt(group.replica.quorum, Step(1))  # pyright: ignore[reportArgumentType]
    assert "from step 1" in group.notes[-1]


def test_a_pause_ends_with_the_stream():
    group = paused().on(r.Applied(Step(1))).on(r.Disconnected("gone"))
    assert not group.replica.paused


def test_a_paused_group_may_be_drained():
    assert paused().on(r.Applied(Step(1))).hear(Drained()).directive == r.LeaveJob()
