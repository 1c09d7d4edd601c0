"""Copies of a job with changes: equal to the results of `dataclasses.replace`, but faster."""

from dataclasses import FrozenInstanceError, replace

import pytest
from jaxft_protocol.coordinator.job import Ballot, Job, Options
from jaxft_protocol.messages import GroupName, QuorumId
from jaxft_protocol.values import LongWait, changed

JOB = Job("job", Options(), places=3, positions={GroupName("a"): 0})
BALLOT = Ballot(ok=5, digests={GroupName("a"): 7})


def test_a_changed_copy_is_what_replace_makes():
    assert changed(JOB, places=4, last_quorum_id=QuorumId(9)) == replace(
        JOB, places=4, last_quorum_id=QuorumId(9)
    )
    assert changed(BALLOT, failed=2) == replace(BALLOT, failed=2)
    assert changed(JOB) == JOB


def test_the_original_stays_as_it_was():
    copy = changed(BALLOT, ok=7)
    assert (BALLOT.ok, copy.ok) == (5, 7)
    assert changed(copy, ok=5) == BALLOT


def test_a_changed_copy_is_frozen():
    with pytest.raises(FrozenInstanceError):
        changed(JOB, places=4).places = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_a_field_that_is_not_there_cannot_be_changed():
    with pytest.raises(AssertionError):
        changed(JOB, position=4)


def test_a_long_wait_is_mentioned_after_5_s_and_each_time_it_has_doubled() -> None:
    wait = LongWait(began_s=100.0)
    logged = [round(found) for tenth in range(1000) if (found := wait.to_say(100.0 + tenth / 10)) is not None]
    assert logged == [5, 10, 20, 40, 80]
