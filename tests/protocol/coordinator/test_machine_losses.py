"""Many members die at once: their losses are collected, and lead to one new quorum."""

from jaxft_protocol.coordinator.job import Tick
from jaxft_protocol.messages import Heartbeat, NewQuorum

from .helpers import Desk, Done, committed, members, running

CROWD = [f"group-{i}" for i in range(120)]


def crowd() -> Desk:
    return running(*CROWD, shards=120)


def after(desk: Desk, seconds: float) -> Done:
    """Let time pass without heartbeats, and return the effects of the next tick."""
    desk.now_s += seconds
    return desk.do(Tick())


def test_a_small_job_does_not_wait():
    desk = running("a", "b", "c")
    assert desk.close("b").only(NewQuorum).keys() == {"a", "c"}


def test_losses_at_once_make_one_quorum():
    desk = crowd()
    for name in CROWD[:40]:
        assert desk.close(name).sent == []
    done = after(desk, 0.1)
    assert len(done.only(NewQuorum)) == 80
    assert members(desk) == CROWD[40:]
    assert desk.quorum.quorum_id == 2


def test_the_first_sign_of_life_after_the_wait_ends_it():
    desk = crowd()
    desk.close(CROWD[3])
    desk.now_s += 0.004
    assert desk.say(CROWD[7], Heartbeat()).sent == []
    desk.now_s += 0.003
    assert len(desk.say(CROWD[8], Heartbeat()).only(NewQuorum)) == 119


def test_who_holds_the_sum_when_others_die_is_waited_for_as_ever():
    desk = crowd()
    desk.close(CROWD[0])
    for name in CROWD[1:]:
        done = desk.vote(name)
    assert len(committed(done)) == 119


def test_where_all_who_are_left_have_failed_nothing_is_waited_for():
    desk = crowd()
    desk.close(CROWD[0])
    for name in CROWD[1:]:
        done = desk.fail(name, CROWD[0])
    assert len(done.only(NewQuorum)) == 119


def test_losses_after_the_retry_are_gathered_anew():
    desk = crowd()
    desk.close(CROWD[0])
    desk.tick()
    assert desk.close(CROWD[1]).sent == []
    desk.close(CROWD[2])
    desk.tick()
    assert desk.quorum.quorum_id == 3
    assert len(desk.quorum.members) == 117


def test_a_tenth_of_many_that_dies_at_once():
    names = [f"group-{i}" for i in range(300)]
    desk = running(*names, shards=300)
    sent = [message for name in names[:30] for message in desk.close(name).sent]
    done = after(desk, 0.1)
    assert sent == []
    assert len(done.sent) == 270
    assert desk.quorum.quorum_id == 2
