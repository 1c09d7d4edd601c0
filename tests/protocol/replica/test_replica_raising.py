"""An exception of the user's code in a step: the group leaves the quorum, and comes back with its next call."""

import pytest
from jaxft_protocol.messages import Evicted, FrontierMoved, Halted, HaltKind, Join, QuorumId, Step, Vote
from jaxft_protocol.replica import state as r

from .test_replica import Group, applying, commit, connected, joining, quorum, voted, welcome, working

RAISED = r.Raised(Step(0), "OSError: cannot read sample 17", 3)
ASIDE = Evicted("its code raised OSError", may_return=True, aside=True)


def away() -> Group:
    """Its code has raised, it was put aside, and its user has not called the step again."""
    return working().on(RAISED).hear(ASIDE).on(r.Disconnected("closed", busy=True))


def test_the_job_is_told_the_text_and_the_shard():
    group = working().on(RAISED)
    assert group.sent == [Vote(QuorumId(1), Step(0), ok=False, reason=RAISED.reason, raised=True, shard=3)]
    assert group.directive == r.Wait(
        "the other groups to try step 0, in which this group's code raised an exception"
    )


def test_its_next_call_joins_with_the_state_that_it_holds():
    group = away()
    assert group.phase is r.Phase.OFFLINE
    group = _again(group)
    assert group.phase is r.Phase.PRESENT
    assert group.sent == []
    assert not isinstance(group.directive, r.TakeDigest), "its training thread is elsewhere"
    group.on(r.Idle())
    assert [type(message) for message in group.sent] == [Join]
    assert group.hear(quorum(3, 0)).phase is r.Phase.WORKING
    assert group.replica.vote is None


def _again(group: Group, frontier: int | None = None) -> Group:
    return group.on(r.Connected()).hear(welcome(frontier))


def test_it_learns_that_the_others_could_do_the_step():
    group = _again(away())
    assert group.hear(FrontierMoved(Step(1))).replica.frontier_step == 1
    assert group.phase is r.Phase.PRESENT


def test_it_learns_that_the_job_has_stopped():
    group = _again(away()).hear(Halted("shard 3 of step 0 fails in every group", HaltKind.RAISED))
    assert isinstance(group.directive, r.Fail)
    assert "Repair the data or the code" in group.directive.failure.text


def test_an_error_of_the_coordinator_meanwhile_ends_it_as_any_other_group():
    group = _again(away()).hear(Halted("the coordinator failed on this job", HaltKind.FAILED))
    assert group.phase is r.Phase.FAILED
    assert isinstance(group.directive, r.Fail)
    assert group.directive.failure.kind is r.FailureKind.JOB_HALTED


def test_a_quorum_that_has_replaced_the_attempt_is_left_as_well():
    group = working().hear(quorum(2, 0, "a")).on(RAISED)
    assert group.sent == [Vote(QuorumId(2), Step(0), ok=False, reason=RAISED.reason, raised=True, shard=3)]


@pytest.mark.parametrize(
    "group", [voted(), applying(), joining(), away(), connected(), applying().on(r.Applied(Step(1)))]
)
def test_after_the_vote_or_without_a_quorum_there_is_nothing_to_report(group: Group):
    phase = group.phase
    assert group.on(RAISED).sent == []
    assert group.phase is phase


def test_a_vote_that_was_given_before_the_exception_still_counts():
    """Ctrl-C while the group waits for the decision: the next call applies."""
    group = working().on(r.Exchanged(QuorumId(1), Step(0))).on(RAISED).hear(commit(1, 0))
    assert group.phase is r.Phase.APPLYING


def test_a_fresh_state_that_no_group_can_heal_is_said_at_once():
    """A notebook cell that is run again: its first run has committed, and is gone."""
    group = connected().hear(welcome(5))
    (note,) = group.on(r.Prepared(Step(0), 0xD1)).notes
    assert "job 'job' has committed 5 steps and no group that holds its state is connected" in note
    assert "waits up to 60 s" in note
    assert "choose another job name" in note
