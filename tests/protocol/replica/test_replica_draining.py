"""A group that is drained ends its loop at a boundary; a group of a paused job waits there."""

import pytest
from jaxft_protocol.messages import Drain, Drained, Evicted, Goodbye, Leave, Paused, QuorumId, Step
from jaxft_protocol.replica.state import (
    Applied,
    Apply,
    Attempt,
    Connected,
    Disconnected,
    DrainNow,
    Exchanged,
    LeaveJob,
    LeaveNow,
    Phase,
    Wait,
)

from .test_replica import Group, applying, commit, connected, joining, quorum, voted, working


def test_it_finishes_its_step_then_ends_its_loop_and_leaves():
    group = working().on(DrainNow())
    assert group.sent == [Drain()]
    assert isinstance(group.directive, Attempt)
    group.on(Exchanged(QuorumId(1), Step(0))).hear(commit(1, 0)).hear(Drained())
    assert group.directive == Apply(QuorumId(1), Step(0))
    group.on(Applied(Step(1)))
    assert (group.phase, group.directive) == (Phase.DRAINED, LeaveJob())
    assert group.on(LeaveNow(finished=False)).sent == [Leave(finished=False)]
    assert group.hear(Goodbye()).phase is Phase.LEFT


def test_an_operator_may_drain_it_as_well():
    group = applying().hear(Drained()).on(Applied(Step(1)))
    assert group.directive == LeaveJob()


@pytest.mark.parametrize("group", [connected(), joining(), working(), voted()])
def test_in_any_other_phase_it_ends_at_once(group: Group):
    if group.phase is Phase.GREETING:
        assert group.on(DrainNow()).phase is Phase.LEFT
    else:
        assert group.hear(Drained()).phase is Phase.DRAINED
    assert group.directive == LeaveJob()


def test_sigterm_twice_is_said_once():
    group = working().on(DrainNow())
    assert group.on(DrainNow()).sent == []


def test_without_the_coordinator_nobody_waits_for_it():
    group = working().on(DrainNow()).on(Disconnected("gone"))
    assert (group.phase, group.directive) == (Phase.LEFT, LeaveJob())
    offline = working().on(Disconnected("gone")).on(DrainNow())
    assert (offline.phase, offline.directive) == (Phase.LEFT, LeaveJob())
    assert offline.on(Connected()).sent == []


def test_a_stream_that_ends_after_the_drain_is_the_end():
    group = applying().hear(Drained()).on(Disconnected("closed"))
    assert group.on(Applied(Step(1))).directive == LeaveJob()


def test_after_its_end_it_is_too_late():
    group = working().hear(Drained()).on(LeaveNow(finished=True)).on(DrainNow())
    assert group.phase is Phase.LEAVING
    assert working().on(DrainNow()).hear(Evicted("its state", may_return=True)).phase is Phase.WORKING


def paused() -> Group:
    return voted().hear(Paused()).hear(commit(1, 0))


def test_a_paused_group_begins_no_step_until_the_next_quorum():
    group = paused()
    assert isinstance(group.directive, Apply)
    group.on(Applied(Step(1)))
    assert group.directive == Wait("an operator to resume the job, which is paused before step 1")
    group.hear(quorum(2, 1))
    assert group.directive == Attempt(group.replica.quorum, Step(1))  # pyright: ignore[reportArgumentType]
    assert "from step 1" in group.notes[-1]


def test_a_pause_ends_with_the_stream():
    group = paused().on(Applied(Step(1))).on(Disconnected("gone"))
    assert not group.replica.paused


def test_a_paused_group_may_be_drained():
    assert paused().on(Applied(Step(1))).hear(Drained()).directive == LeaveJob()
