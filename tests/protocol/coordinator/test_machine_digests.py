"""Digests in votes: a member that differs is evicted before its error spreads, or the job halts."""

import pytest
from jaxft_protocol.coordinator.job import GroupPhase
from jaxft_protocol.messages import Evicted, Halted, Heal, NewQuorum, Pin, Waiting

from .helpers import Desk, committed, healing, members, running, shards, tried_again

# ---- all agree ----


def test_equal_states_are_committed():
    assert committed(running("a", "b", "c").votes(a=1, b=1, c=1)) == ["a", "b", "c"]


def test_votes_without_a_digest_are_committed():
    assert committed(running("a", "b").votes(a=None, b=None)) == ["a", "b"]


def test_one_digest_alone_has_nothing_to_differ_from():
    desk = running("a", "b")
    desk.votes(a=1, b=1)
    assert committed(desk.votes(a=1, b=None)) == ["a", "b"]


def test_in_the_first_step_of_a_quorum_one_without_a_fingerprint_is_taken_for_odd():
    """All are compared in this step, and nothing is known about its state."""
    desk = running("a", "b", "c")
    evicted = desk.votes(a=1, b=None, c=1).only(Evicted)
    assert evicted.keys() == {"b"}
    assert "it sent no digest of its state in the first step of a quorum" in evicted["b"].reason
    assert members(desk) == ["a", "c"]
    assert committed(desk.votes(a=1, c=1)) == ["a", "c"]


def test_digests_count_for_one_step_only():
    desk = running("a", "b")
    desk.votes(a=1, b=1)
    assert committed(desk.votes(a=2, b=2)) == ["a", "b"]


def test_digests_of_an_attempt_that_failed_count_for_nothing():
    desk = running("a", "b", "c")
    desk.vote("a", digest=1)
    desk.fail("b")
    assert tried_again(desk.vote("c", digest=1)) is not None
    assert committed(desk.votes(a=2, b=2, c=2)) == ["a", "b", "c"]


def test_what_a_lost_member_gave_from_another_state_does_not_count():
    # It voted, so its contribution is in the sum of the living members.
    desk = running("a", "b", "c")
    desk.vote("b", digest=2)
    desk.close("b")
    desk.vote("a", digest=1)
    again = tried_again(desk.vote("c", digest=1))
    assert again is not None
    assert [member.group for member in again.members] == ["a", "c"]
    # Its history is ignored, although it brings the frontier's step.
    desk.hello("b")
    heals = desk.join("b", step=0, digest="", history=desk.job.history).only(Heal)
    assert not heals["b"].log_only


def test_of_two_a_lost_one_that_differs_stops_the_job_too():
    desk = running("a", "b")
    desk.vote("b", digest=2)
    desk.close("b")
    assert desk.vote("a", digest=1).only(Halted).keys() == {"a"}


# ---- one differs ----


@pytest.mark.parametrize(
    "digests", [{"a": 1, "b": 2, "c": 1}, {"a": 1, "c": 1, "b": 2, "d": 1}, {"a": 0, "b": 1, "c": 0}]
)
def test_the_odd_one_is_evicted_and_the_step_is_tried_again_without_it(digests: dict[str, int]):
    desk = running(*sorted(digests))
    desk.commit()
    done = desk.votes(**digests)
    again = tried_again(done)
    assert again is not None
    rest = sorted(digests.keys() - {"b"})
    assert (again.quorum_id, again.step, members(desk)) == (2, 1, rest)
    assert sorted(shard for held in shards(again).values() for shard in held) == list(range(6))
    (evicted,) = done.to("b")
    assert isinstance(evicted, Evicted)
    assert evicted.may_return
    listed = f"{', '.join(rest)}: {digests['a']:016x}; b: {digests['b']:016x}"
    assert evicted.reason == f"its state is not the majority's: {listed}"
    assert done.closed == ["b"]
    assert [(change.group, change.reason) for change in again.left] == [("b", evicted.reason)]


def test_an_odd_one_is_no_failure_of_those_who_stay():
    desk = running("a", "b", "c")
    desk.fail("a")
    desk.votes(b=1, c=1)  # tried again: the next failure of these three would cost one its place
    assert desk.votes(a=1, b=2, c=1).only(Evicted).keys() == {"b"}
    assert members(desk) == ["a", "c"]


def test_the_odd_one_is_no_holder_and_no_donor_any_more():
    desk = with_odd_b()
    assert [group.name for group in desk.job.groups.values()] == ["a", "c"]
    assert desk.job.frontier is not None
    assert desk.job.frontier.holders == {("a", 1), ("c", 1)}
    assert [donor.group for donor in desk.come("d", digest="fresh").only(Heal)["d"].donors] == ["a", "c"]


@pytest.mark.parametrize("digest", ["", "d"])
@pytest.mark.parametrize("steps", [0, 1])
def test_it_heals_on_return_though_it_stands_at_the_same_step(steps: int, digest: str):
    # At step 0 also with the digest of the founders' state: it was taken before the state was corrupted.
    desk = with_odd_b(steps)
    done = desk.come("b", step=steps, digest=digest, history=desk.job.history)
    heal = done.only(Heal)["b"]
    assert (heal.step, heal.log_only) == (steps, False)
    assert desk.group("b").phase is GroupPhase.HEALING
    desk.ready("b")
    desk.commit()
    assert members(desk) == ["a", "b", "c"]
    assert committed(desk.votes(a=5, b=5, c=5)) == ["a", "b", "c"]


def test_joiners_that_heal_from_an_odd_donor_start_over():
    desk = running("a", "b", "c")
    first = healing(desk, "late")
    done = desk.votes(a=1, b=2, c=1)
    heal = done.only(Heal)["late"]
    assert heal.heal_id == first + 1
    assert [donor.group for donor in heal.donors] == ["a", "c"]
    assert [pin.heal_id for pin in done.only(Pin).values()] == [heal.heal_id] * 2


@pytest.mark.parametrize("caught_up", [True, False])
def test_what_an_odd_donor_gave_to_a_joiner_is_no_state_of_the_job(*, caught_up: bool):
    """The coordinator has asked the joiner to start over, but its stream ended first."""
    desk = running("a", "b", "c")
    desk.commit()
    desk.come("late", step=0)
    if caught_up:
        desk.ready("late")
    desk.votes(a=1, b=2, c=1)
    desk.close("late")
    assert not desk.come("late", step=1, digest="").only(Heal)["late"].log_only


@pytest.mark.parametrize("step", [1, 2])
def test_nor_does_the_joiners_history_count_before_it_has_healed_from_others(step: int):
    """It brought a checkpoint of step 1, and fetched state 2, also from the donor that differs."""
    desk = running("a", "b", "c")
    desk.commit()
    desk.commit()
    desk.come("late", step=1, history=desk.job.history)
    desk.votes(a=1, b=2, c=1)
    desk.close("a")
    desk.close("c")
    desk.heal_failed("late", step=step)
    desk.wait(100.0)
    assert desk.job.quorum is None


def test_a_joiner_that_has_voted_with_the_majority_stays():
    desk = running("a", "b")
    healing(desk, "c")
    desk.ready("c")
    desk.commit()
    desk.votes(a=1, b=2, c=1)
    assert members(desk) == ["a", "c"]


def test_joiners_with_other_donors_go_on():
    desk = running("a", "b")
    healing(desk, "c")
    desk.ready("c")
    desk.commit()  # lets c in, which holds nothing yet and therefore does not donate
    first = healing(desk, "late")
    done = desk.votes(a=1, b=1, c=2)
    assert sorted(done.only(Evicted)) == ["c"]
    assert not done.only(Heal)
    assert desk.group("late").heal_id == first


def test_odd_ones_that_leave_too_few_are_waited_for():
    desk = running("a", "b", "c", min_replicas=3)
    done = desk.votes(a=1, b=2, c=1)
    assert done.only(Evicted).keys() == {"b"}
    assert desk.job.quorum is None
    assert "step 0 needs 3 groups that hold it, and 2 do (a, c)" in desk.tick().only(Waiting)["a"].reason
    desk.come("b")
    assert sorted(desk.ready("b").only(NewQuorum)) == ["a", "b", "c"]


def test_the_history_of_a_corrupt_state_counts_for_nothing():
    desk = with_odd_b()
    history = desk.job.history
    desk.close("a")
    desk.close("c")
    desk.come("b", step=1, digest="", history=history)
    desk.wait(100.0)
    assert desk.job.quorum is None
    desk.come("b", step=1, history=history, incarnation=2)  # the next life brings a checkpoint
    assert members(desk) == ["b"]


def test_its_history_counts_again_once_it_has_healed():
    desk = with_odd_b()
    history = desk.job.history
    desk.come("b", step=1, digest="")
    desk.ready("b")
    desk.close("b")
    desk.commit()
    desk.close("a")
    desk.close("c")
    desk.come("b", step=1, digest="", history=history)
    desk.wait(6.0)
    assert (members(desk), desk.step) == (["b"], 1)


@pytest.mark.parametrize(("meshes", "hinted"), [("any", True), ("equal", False)])
def test_an_eviction_names_other_meshes_as_a_cause_where_the_job_has_them(meshes: str, *, hinted: bool):
    """A step with a sum over a sharded array drifts apart there, and no memory is at fault."""
    desk = Desk.open(min_replicas=3)
    for name in "abc":
        desk.hello(name)
    for name in "abc":
        desk.join(name, settings={"meshes": meshes})
    (evicted,) = desk.votes(a=1, b=2, c=1).only(Evicted).values()
    assert ("docs/meshes.md" in evicted.reason) == hinted


# ---- no majority ----


@pytest.mark.parametrize("digests", [{"a": 1, "b": 2}, {"a": 1, "b": 1, "c": 2, "d": 2}])
def test_without_a_majority_everybody_is_stopped(digests: dict[str, int]):
    desk = running(*digests)
    desk.commit()
    desk.hello("compiles")
    healing(desk, "heals")
    done = desk.votes(**digests)
    all_groups = sorted([*digests, "compiles", "heals"])
    halted = done.only(Halted)
    assert sorted(halted) == sorted(done.closed) == all_groups
    (reason,) = {message.reason for message in halted.values()}
    assert "the groups of job 'job' hold different states 1, and no majority shows which is right" in reason
    assert f"b: {digests['b']:016x}" in reason
    assert [type(message) for message in done.to("a")] == [Halted]
    assert (desk.job.groups, desk.job.sessions, desk.job.quorum) == ({}, {}, None)
    assert desk.job.frontier is not None
    assert desk.job.frontier.holders == frozenset()


def test_one_that_has_not_heard_of_a_halt_is_told_when_it_comes_back():
    # Its stream has just ended, or the coordinator died before it sent Halted.
    desk = halted()
    done = desk.come("b", step=3, digest="", history=desk.job.history)
    (reason,) = [message.reason for message in done.to("b") if isinstance(message, Halted)]
    assert "hold different states 3, and no majority shows which is right" in reason
    assert done.closed == ["b"]
    assert (desk.job.groups, desk.job.quorum) == ({}, None)
    # After a restart, it brings its checkpoint.
    desk.come("b", step=2, history=desk.job.history, incarnation=2)
    desk.wait(6.0)
    assert (members(desk), desk.step) == (["b"], 2)


def test_one_that_has_not_heard_of_a_halt_heals_once_the_job_has_gone_on():
    desk = halted()
    desk.come("a", step=2, history=desk.job.history, incarnation=2)
    desk.wait(6.0)
    done = desk.come("b", step=3, digest="", history=desk.job.history)
    assert not any(isinstance(message, Halted) for message in done.to("b"))
    assert desk.job.groups["b"].phase is GroupPhase.HEALING


def test_after_a_halt_at_the_first_step_an_equal_digest_proves_nothing():
    desk = running("a", "b")
    desk.votes(a=1, b=2)
    desk.hello("c")
    desk.come("a", incarnation=2)
    assert desk.job.frontier is not None
    assert not desk.job.frontier.holders


def test_after_a_halt_the_job_resumes_from_a_checkpoint():
    desk = halted()
    desk.come("a", step=2, history=desk.job.history, incarnation=2)
    desk.wait(6.0)
    assert (members(desk), desk.step) == (["a"], 2)


def with_odd_b(steps: int = 1) -> Desk:
    """a, b and c after some steps; b was evicted because its state differs."""
    desk = running("a", "b", "c")
    for _ in range(steps):
        desk.commit()
    desk.votes(a=1, b=2, c=1)
    assert members(desk) == ["a", "c"]
    return desk


def halted() -> Desk:
    desk = running("a", "b")
    for _ in range(3):
        desk.commit()
    assert desk.votes(a=1, b=2).only(Halted)
    return desk
