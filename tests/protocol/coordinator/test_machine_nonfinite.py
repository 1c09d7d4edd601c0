"""Votes that report means that are not finite: the job halts for all groups, and the step is not committed."""

import pytest
from jaxft_protocol.coordinator import durable
from jaxft_protocol.messages import Commit, Halted, HaltKind

from .helpers import committed, members, running, tried_again

NOTE = "pmean['w'] is nan at [3]"


def test_the_job_halts_for_all_when_all_have_voted():
    desk = running("a", "b", "c")
    desk.commit()
    assert desk.vote("b", nonfinite=NOTE).sent == []
    desk.vote("a", nonfinite=NOTE)
    done = desk.vote("c", nonfinite=NOTE)
    halted = done.only(Halted)
    reason = f"the means of step 1 of job 'job' are not finite: {NOTE}"
    assert halted == dict.fromkeys("abc", Halted(reason, HaltKind.NONFINITE))
    assert not done.only(Commit)
    assert sorted(done.closed) == ["a", "b", "c"]
    assert desk.job.frontier is not None
    assert desk.job.frontier.step == 1
    assert desk.job.quorum is None


def test_one_that_says_so_speaks_for_all_and_for_one_that_was_lost():
    desk = running("a", "b", "c")
    desk.vote("b", nonfinite=NOTE)
    desk.close("b")
    desk.vote("a")
    assert desk.vote("c").only(Halted).keys() == {"a", "c"}


def test_those_who_join_are_told_as_well():
    desk = running("a", "b")
    desk.commit()
    desk.come("c")
    desk.vote("a", nonfinite=NOTE)
    assert desk.vote("b", nonfinite=NOTE).only(Halted).keys() == {"a", "b", "c"}


def test_what_an_attempt_that_failed_has_said_counts_for_nothing():
    desk = running("a", "b", "c")
    desk.vote("a", nonfinite=NOTE)
    desk.fail("b")
    assert tried_again(desk.vote("c", nonfinite=NOTE)) is not None
    assert committed(desk.votes(a=None, b=None, c=None)) == ["a", "b", "c"]


def test_an_odd_state_is_put_out_first_for_its_error_may_be_the_cause():
    desk = running("a", "b", "c")
    desk.vote("a", digest=1, nonfinite=NOTE)
    desk.vote("b", digest=2, nonfinite=NOTE)
    assert tried_again(desk.vote("c", digest=1, nonfinite=NOTE)) is not None
    assert members(desk) == ["a", "c"]
    assert committed(desk.votes(a=1, c=1)) == ["a", "c"]


def test_a_group_that_comes_back_goes_on_from_the_frontier():
    desk = running("a", "b")
    desk.commit()
    desk.vote("a", nonfinite=NOTE)
    desk.vote("b", nonfinite=NOTE)
    desk.come("a", step=1, digest="x", incarnation=2, history=desk.job.history)
    desk.wait(6.0)
    assert members(desk) == ["a"]
    assert desk.vote("a", nonfinite=NOTE).only(Halted).keys() == {"a"}


@pytest.mark.parametrize("steps", [0, 1])
def test_one_whose_stream_broke_hears_of_the_halt_when_it_is_back(steps: int):
    """The groups that it would wait for have ended; at the first step the job is already empty."""
    desk = running("a", "b", "c", min_replicas=3)
    for _ in range(steps):
        desk.commit()
    desk.vote("c")
    desk.close("c")
    desk.vote("a", nonfinite=NOTE)
    desk.vote("b", nonfinite=NOTE)
    if desk.job.empty:
        desk.job = durable.emptied(desk.job)  # as the shell does
    (halted,) = desk.come("c", step=steps, digest="x").to("c")
    assert isinstance(halted, Halted)
    assert halted.kind is HaltKind.NONFINITE
    assert halted.reason.endswith("(found while 'c' was not connected)")
    for name in ("a", "b", "c"):
        desk.come(name, step=steps, digest="d", incarnation=2, history=desk.job.history)
    desk.wait(6.0)
    assert members(desk) == ["a", "b", "c"]
    assert desk.job.halted is None


def test_a_long_text_is_cut():
    desk = running("a")
    (halted,) = desk.vote("a", nonfinite="x" * 5000).only(Halted).values()
    assert len(halted.reason) < 400
