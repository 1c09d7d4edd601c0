"""Drains and pauses take effect at a step boundary: no step is tried again for them."""

import pytest
from jaxft_protocol import messages as m
from jaxft_protocol.coordinator import durable
from jaxft_protocol.coordinator.job import DrainAsked, GroupPhase, PauseAsked, Persist, Saved

from .helpers import Desk, Done, healing, members, running, shards, tried_again
from .test_machine_spares import together

BY_OPERATOR = DrainAsked(m.GroupName("b"), "an operator asks for it")


def following(*regular: str, **options: float) -> Desk:
    """A job with a spare that stands by."""
    desk = together(*regular, **options)
    desk.commit()
    desk.ready("s")
    return desk


@pytest.mark.parametrize("by_operator", [True, False])
def test_a_spare_takes_over_at_the_boundary_of_the_same_step(*, by_operator: bool):
    desk = following("a", "b")
    asked = desk.do(BY_OPERATOR) if by_operator else desk.say("b", m.Drain())
    assert asked.sent == []
    assert members(desk) == ["a", "b"]
    desk.vote("a")
    done = desk.vote("b")
    commits = done.only(m.Commit)
    assert [type(message) for message in done.to("b")] == [m.Commit, m.Drained]
    assert (commits["a"].next, commits["b"].next) == (desk.quorum, None)
    assert (members(desk), desk.quorum.step) == (["a", "s"], 2)
    assert shards(desk.quorum) == {"a": (0, 1, 2), "s": (3, 4, 5)}
    assert [(change.group, change.reason) for change in desk.quorum.left] == [("b", "it was drained")]
    # The spare fetches the last sum from the drained group as well.
    assert desk.group("b").phase is GroupPhase.LEAVING
    assert desk.group("s").donors == (("a", 1), ("b", 1))


def test_without_a_spare_the_others_divide_its_shards_from_the_next_step_on():
    desk = running("a", "b", "c")
    desk.say("b", m.Drain())
    desk.commit()
    assert shards(desk.quorum) == {"a": (0, 1, 2), "c": (3, 4, 5)}
    assert desk.quorum.step == 1


def test_the_drained_group_donates_until_nobody_needs_it():
    desk = running("a", "b")
    heal_id = healing(desk, "c")
    desk.say("b", m.Drain())
    desk.commit()
    assert desk.group("c").heal_id == heal_id
    assert desk.leave("b").to("b") == [m.Waiting("c to fetch this group's state", held=True)]
    assert desk.ready("c", 1).to("b") == []  # in the next quorum, c may still lack a sum
    done = desk.commit()
    assert desk.group("c").phase is GroupPhase.MEMBER
    done = desk.commit()
    assert m.Goodbye() in done.to("b")
    assert done.closed == ["b"]


def test_it_gets_no_goodbye_before_its_training_thread_has_ended():
    desk = running("a", "b")
    desk.say("b", m.Drain())
    done = desk.commit()
    assert m.Goodbye() not in done.to("b")
    desk.commit()
    assert desk.group("b").phase is GroupPhase.LEAVING
    assert desk.leave("b").to("b") == [m.Goodbye()]


def test_a_loss_in_its_last_step_keeps_its_shards():
    desk = running("a", "b", "c")
    desk.say("b", m.Drain())
    before = shards(desk.quorum)["b"]
    quorum = tried_again(desk.close("c"))
    assert quorum is not None
    assert set(before) <= set(shards(quorum)["b"])
    assert [type(message) for message in desk.commit().to("b")] == [m.Commit, m.Drained]
    assert members(desk) == ["a"]


@pytest.mark.parametrize("phase", ["present", "stale", "healing"])
def test_a_group_that_holds_nothing_goes_at_once(phase: str):
    desk = running("a")
    if phase == "healing":
        healing(desk, "b")
    else:
        desk.hello("b")
    if phase == "stale":
        desk.say("a", m.Drain())
        desk.commit()
        desk.close("a")
        desk.join("b", digest="fresh")
        assert desk.group("b").phase is GroupPhase.STALE
    done = desk.do(BY_OPERATOR)
    assert done.to("b") == [m.Drained()]
    assert done.closed == ["b"]
    assert "b" not in desk.job.groups


def test_one_that_is_in_no_quorum_goes_at_once_and_keeps_the_state_for_joiners():
    desk = running("a", "b", min_replicas=2)
    desk.commit()
    desk.close("a")
    done = desk.say("b", m.Drain())
    assert done.to("b") == [m.Drained()]
    healing(desk, "c")
    desk.leave("b")
    assert [donor for donor, _ in desk.group("c").donors] == ["b"]


def test_the_last_group_may_be_drained():
    desk = running("a")
    desk.say("a", m.Drain())
    done = desk.commit()
    assert [type(message) for message in done.to("a")] == [m.Commit, m.Drained]
    assert desk.job.quorum is None
    assert desk.leave("a").to("a") == [m.Goodbye()]
    assert desk.job.finished is None


def test_a_group_that_finishes_with_its_last_step_ends_the_job():
    desk = running("a")
    desk.say("a", m.Drain())
    desk.commit()
    desk.leave("a", finished=True)
    assert desk.job.finished == 1


def test_one_that_is_put_out_meanwhile_is_told_to_end_and_not_to_come_back():
    desk = running("a", "b", "c", join_timeout_s=1.0)
    desk.do(BY_OPERATOR)
    for name in ("a", "c"):
        desk.vote(name)
    done = [done for done in desk.wait(20.0, away=("b",)) if done.to("b")]
    assert [
        message for each in done for message in each.to("b") if isinstance(message, m.Evicted | m.Drained)
    ] == [m.Drained()]


def test_one_that_holds_the_frontier_and_has_just_come_back_joins_first():
    desk = running("a", "b")
    desk.commit()
    desk.close("b")
    desk.close("a")
    desk.hello("b")
    assert desk.do(BY_OPERATOR).sent == []
    done = desk.say("b", m.Join(m.Step(1), 7, {}, history=desk.job.history, total_shards=6))
    assert m.Drained() in done.to("b")
    assert desk.group("b").phase is GroupPhase.LEAVING


def test_a_second_drain_and_one_of_an_unknown_group_change_nothing():
    desk = running("a", "b")
    desk.do(BY_OPERATOR)
    before = desk.job
    desk.do(BY_OPERATOR)
    desk.do(DrainAsked(m.GroupName("x"), "?"))
    assert desk.job == before


def test_a_drain_outlives_the_stream_of_its_group():
    desk = running("a", "b")
    desk.commit()
    desk.do(BY_OPERATOR)
    desk.close("b")
    desk.hello("b")
    done = desk.say("b", m.Join(m.Step(1), 7, {}, history=desk.job.history, total_shards=6))
    assert m.Drained() in done.to("b")
    assert members(desk) == ["a"]
    desk.leave("b")
    desk.come("b", incarnation=2)
    assert not desk.group("b").draining


def test_a_drain_outlives_the_coordinator():
    desk = running("a", "b")
    (record,) = [each.record for each in desk.do(BY_OPERATOR).effects if isinstance(each, Persist)]
    assert isinstance(record, Saved)
    new_desk = Desk(durable.restored(record, desk.job.options, 0.0))
    for name in ("a", "b"):
        new_desk.hello(name)
    for name in ("a", "b"):
        new_desk.join(name)
    new_desk.wait(20.0)
    assert members(new_desk) == ["a"]


# ---- pauses ----


def pause(desk: Desk) -> Done:
    """Pause the job in a step, and let that step be committed."""
    desk.do(PauseAsked(paused=True))
    return desk.commit()


def test_a_paused_job_stands_after_its_step_and_goes_on_with_the_same_members():
    desk = running("a", "b")
    done = pause(desk)
    assert [type(message) for message in done.to("a")][:2] == [m.Paused, m.Commit]
    assert done.only(m.Commit)["a"].next is None
    assert desk.job.quorum is None
    heard = desk.wait(500.0)
    assert not any(each.only(m.Evicted) or each.only(m.NewQuorum) for each in heard)
    assert desk.job.waiting == "an operator has paused the job before step 1; resume the job to continue"
    quorum = tried_again(desk.do(PauseAsked(paused=False)))
    assert quorum is not None
    assert (members(desk), quorum.step) == (["a", "b"], 1)
    assert desk.job.waiting == ""


def test_votes_on_the_next_step_that_were_on_their_way_count_for_nothing():
    desk = running("a", "b")
    quorum_id = desk.quorum.quorum_id
    pause(desk)
    for name in ("a", "b"):
        assert desk.say(name, m.Vote(quorum_id, m.Step(1), ok=True)).sent == []
    assert desk.step == 1


def test_the_step_of_a_pause_is_tried_again_without_a_lost_member():
    desk = running("a", "b")
    desk.do(PauseAsked(paused=True))
    assert tried_again(desk.close("b")) is not None
    desk.commit()
    assert desk.job.quorum is None


def test_groups_heal_and_are_drained_while_the_job_is_paused():
    desk = running("a", "b")
    pause(desk)
    assert m.Heal in {type(message) for message in desk.come("c", digest="fresh").to("c")}
    assert desk.say("b", m.Drain()).to("b") == [m.Drained()]
    desk.ready("c")
    desk.do(PauseAsked(paused=False))
    assert members(desk) == ["a", "c"]


def test_a_pause_survives_the_coordinator():
    desk = running("a", "b")
    (record,) = [
        each.record for each in desk.do(PauseAsked(paused=True)).effects if isinstance(each, Persist)
    ]
    assert isinstance(record, Saved)
    desk.commit()
    new_desk = Desk(durable.restored(durable.saved(desk.job), desk.job.options, 0.0))
    history = desk.job.history
    for name in ("a", "b"):
        new_desk.hello(name)
    for name in ("a", "b"):
        new_desk.say(name, m.Join(m.Step(1), 7, {}, history=history, total_shards=6))
    new_desk.wait(20.0)
    assert new_desk.job.quorum is None
    new_desk.do(PauseAsked(paused=False))
    assert members(new_desk) == ["a", "b"]
