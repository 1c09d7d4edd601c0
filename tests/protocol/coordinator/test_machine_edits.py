"""Edits of the state: the whole job makes the same one before a step, or the step is not committed."""

from jaxft_protocol.messages import Evicted, Halted, HaltKind, NewQuorum

from .helpers import committed, members, running


def test_the_same_edit_is_committed():
    desk = running("a", "b", "c")
    desk.vote("a", edit=7)
    desk.vote("b", edit=7)
    assert committed(desk.vote("c", edit=7)) == ["a", "b", "c"]


def test_the_odd_one_is_put_out_for_good():
    for odd, own, others in (("b", 0, 7), ("b", 7, 0), ("a", 8, 7)):
        desk = running("a", "b", "c")
        rest = [name for name in ("a", "b", "c") if name != odd]
        desk.vote(rest[0], edit=others)
        desk.vote(odd, edit=own)
        done = desk.vote(rest[1], edit=others)
        evicted = done.only(Evicted)
        assert evicted.keys() == {odd}
        assert not evicted[odd].may_return
        assert "did not make the same edit of state 0" in evicted[odd].reason
        assert done.only(NewQuorum).keys() == set(rest)
        assert members(desk) == rest
        desk.vote(rest[0], edit=others)
        assert committed(desk.vote(rest[1], edit=others)) == rest


def test_without_a_majority_the_job_halts():
    desk = running("a", "b")
    desk.vote("a", edit=7)
    halted = desk.vote("b").only(Halted)
    assert halted.keys() == {"a", "b"}
    assert halted["a"].kind is HaltKind.FAILED
    assert "edited by a; not edited by b. Whether" in halted["a"].reason


def test_different_edits_of_all_are_told_apart():
    desk = running("a", "b")
    desk.vote("a", edit=7)
    reason = desk.vote("b", edit=8).only(Halted)["a"].reason
    assert (
        "edited by a, b; and the edits have different digests, a: 0000000000000007; b: 0000000000000008."
        in reason
    )


def test_what_a_member_edited_counts_after_it_is_lost():
    # Its contribution is in the sum of the living members.
    desk = running("a", "b", "c")
    desk.vote("b", edit=7)
    desk.close("b")
    desk.vote("a")
    assert not committed(desk.vote("c"))
    desk.vote("a")
    assert committed(desk.vote("c")) == ["a", "c"]


def test_edits_count_for_one_step_only():
    desk = running("a", "b")
    desk.vote("a", edit=7)
    assert committed(desk.vote("b", edit=7)) == ["a", "b"]
    desk.vote("a")
    assert committed(desk.vote("b")) == ["a", "b"]


def test_a_corrupt_state_is_not_blamed_on_the_program():
    # An edit is a function of the state, so a group whose state differs makes another edit of it.
    desk = running("a", "b", "c")
    desk.vote("a", digest=1, edit=7)
    desk.vote("b", digest=2, edit=8)
    evicted = desk.vote("c", digest=1, edit=7).only(Evicted)
    assert evicted["b"].may_return
    assert "its state is not the majority's" in evicted["b"].reason
