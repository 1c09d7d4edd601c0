"""Who writes for the job is a function of the quorum that committed the state."""

import logging

import pytest
from jaxft_protocol.messages import GroupName, Incarnation, Member, NewQuorum, QuorumId, Step

import jaxft
from jaxft._replica._runner import Writer
from jaxft._report import Record


def quorum(*names: str) -> NewQuorum:
    members = tuple(Member(GroupName(name), Incarnation(1), "127.0.0.1:1") for name in names)
    return NewQuorum(QuorumId(1), Step(0), len(members), members)


def test_the_first_of_the_quorum_that_committed_writes_as_long_as_the_job_has_it() -> None:
    writer = Writer("b")
    assert not writer.is_it(quorum("b", "c"))
    writer.committed(("a", "b"), 1)
    assert not writer.is_it(quorum("b"))
    writer.committed(("b", "c"), 2)
    assert writer.is_it(quorum("b", "c"))
    assert writer.is_it(quorum("a", "b")), "until its next call: the state is still (b, c)'s"
    assert not writer.is_it(quorum("c")), "the job continues without it"
    assert not writer.is_it(None)


def test_it_is_told_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer("b")
    with caplog.at_level(logging.INFO, "jaxft"):
        for step, members in enumerate([("a", "b"), ("b",), ("b", "c"), ("a", "b"), ("b",), ()], 1):
            writer.committed(members, step)
    assert [record.message for record in caplog.records] == [
        "[jaxft b] writes for the job, from step 2 on",
        "[jaxft b] no longer writes for the job, from step 4 on: a does",
        "[jaxft b] writes for the job, from step 5 on",
        "[jaxft b] no longer writes for the job, from step 6 on: it has healed",
    ]


def test_one_that_has_healed_to_a_state_has_not_committed_it() -> None:
    record = Record()
    record.entered(quorum("a", "b"))
    assert record.committed_by == ()
    record.attempts = 1
    assert record.committed_by == ("a", "b")
    assert record.report(3, "a").writer == "a"


def test_before_the_first_step_no_group_writes() -> None:
    assert not jaxft.Manager("localhost:1", group="g").is_writer
