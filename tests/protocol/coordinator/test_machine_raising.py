"""Votes that report an exception of the user's code: the group's own failure, or the job's if every group has it."""

from jaxft_protocol import messages as m
from jaxft_protocol.coordinator import raising
from jaxft_protocol.coordinator.job import GroupPhase

from .helpers import Desk, Done, committed, healing, members, running, shards, tried_again

UNREADABLE = "OSError: cannot read sample 17"


def raises(desk: Desk, name: str, text: str = UNREADABLE, shard: int | None = 3, **other: int) -> Done:
    quorum_id, step = other.get("quorum_id", desk.quorum.quorum_id), other.get("step", desk.step)
    vote = m.Vote(quorum_id, m.Step(step), ok=False, reason=text, raised=True, shard=shard)  # pyright: ignore[reportArgumentType]
    return desk.say(name, vote)


def test_the_others_take_its_shards_at_once_and_hear_why():
    desk = running("a", "b", "c")
    done = raises(desk, "b")
    reason = f"its code raised {UNREADABLE} (step 0, shard 3)"
    assert done.to("b") == [m.Evicted(reason, may_return=True, aside=True)]
    assert done.closed == ["b"]
    quorum = tried_again(done)
    assert quorum is not None
    assert quorum.left == (m.Change(m.GroupName("b"), reason),)
    assert sorted(shard for held in shards(quorum).values() for shard in held) == [0, 1, 2, 3, 4, 5]
    assert f"[job] goes on without b: {reason}" in done.reports


def test_it_is_not_blamed_and_may_come_back_for_the_same_step():
    desk = running("a", "b")
    raises(desk, "b")
    assert not desk.job.blamed
    desk.come("b", step=0, incarnation=1)
    assert desk.group("b").phase is GroupPhase.READY
    assert committed(desk.vote("a")) == ["a"]
    assert members(desk) == ["a", "b"]


def test_once_the_step_counts_it_learns_that_the_failure_was_its_own():
    desk = running("a", "b")
    raises(desk, "b")
    desk.hello("b", step=0, history=desk.job.history)
    done = desk.vote("a")
    assert done.to("b") == [m.FrontierMoved(m.Step(1))]
    assert not desk.job.raised
    desk.hello("c")
    assert not desk.commit().to("c"), "a group that has not raised does not wait for it"


def test_a_shard_that_fails_in_every_group_stops_the_job_once():
    desk = running("a", "b", "c")
    raises(desk, "a")
    desk.hello("a", step=0, history=desk.job.history)
    raises(desk, "c")
    done = raises(desk, "b")
    reason = f"shard 3 of step 0 of job 'job' fails in every group: a, c, b: {UNREADABLE}"
    assert done.only(m.Halted) == dict.fromkeys("ab", m.Halted(reason, m.HaltKind.RAISED))
    assert not done.only(m.Commit)
    assert [text for text in done.reports if "halts" in text] == [f"[job] halts: {reason}"]
    # It was between two streams.
    late = desk.hello("c", step=0, history=desk.job.history)
    assert late.only(m.Halted)["c"].kind is m.HaltKind.RAISED
    assert late.closed == ["c"]


def test_what_fails_outside_of_a_shard_is_the_step():
    desk = running("a", "b")
    raises(desk, "a", shard=None)
    text = raises(desk, "b", shard=None).only(m.Halted)["b"].reason
    assert text == f"step 0 of job 'job' fails in every group: a, b: {UNREADABLE}"


def test_different_failures_are_all_named():
    desk = running("a", "b")
    raises(desk, "a", "ValueError: a", shard=1)
    done = raises(desk, "b", "ValueError: b", shard=None)
    text = done.only(m.Halted)["b"].reason
    assert text == "step 0 of job 'job' fails in every group: a: ValueError: a; b: ValueError: b"


def test_a_group_alone_is_not_stopped():
    desk = running("a")
    for _ in range(2):
        assert not raises(desk, "a").only(m.Halted)
        desk.come("a", step=0, history=desk.job.history)
        assert members(desk) == ["a"]
    assert committed(desk.vote("a")) == ["a"]


def test_nor_is_one_whose_peers_are_here_but_busy_until_they_could_try():
    desk = running("a", "b")
    desk.close("b")
    desk.hello("b", step=0, history=desk.job.history)
    for _ in range(2):
        assert not raises(desk, "a").only(m.Halted)
        desk.tick()
        assert "its code raised OSError" in desk.job.waiting
        desk.come("a", step=0, history=desk.job.history)
        assert members(desk) == ["a"]
    desk.join("b", step=0, history=desk.job.history)
    assert not raises(desk, "a").only(m.Halted)
    assert members(desk) == ["b"]
    assert raises(desk, "b").only(m.Halted)


def test_one_that_is_ready_to_take_part_is_tried_before_the_job_stops():
    desk = running("a", "b")
    raises(desk, "b")
    desk.come("b", step=0)
    assert not raises(desk, "a").only(m.Halted)
    assert members(desk) == ["b"]
    assert raises(desk, "b").only(m.Halted)


def test_below_min_replicas_a_shard_that_fails_in_every_group_stops_the_job_too():
    desk = running("a", "b", "c", min_replicas=3)
    assert members(desk) == ["a", "b", "c"]
    trial = tried_again(raises(desk, "b"))
    assert trial is not None
    assert sorted(shard for held in shards(trial).values() for shard in held) == [0, 1, 2, 3, 4, 5]
    # Groups whose code has raised wait until it is known whether the others can do it.
    assert not desk.hello("b", step=0, history=desk.job.history).only(m.Waiting)
    assert not desk.tick().only(m.Waiting)
    assert not raises(desk, "c").only(m.Halted)
    assert members(desk) == ["a"]
    desk.hello("c", step=0, history=desk.job.history)
    done = raises(desk, "a")
    reason = f"shard 3 of step 0 of job 'job' fails in every group: b, c, a: {UNREADABLE}"
    assert done.only(m.Halted) == dict.fromkeys("abc", m.Halted(reason, m.HaltKind.RAISED))


def test_below_min_replicas_the_others_try_and_commit_nothing():
    desk = running("a", "b", min_replicas=2)
    assert tried_again(raises(desk, "b")) is not None
    assert members(desk) == ["a"]
    done = desk.vote("a")
    assert not done.only(m.Commit)
    assert done.to("a") == [m.AllComputed(m.QuorumId(2), m.Step(0))], "it is free for other directives"
    assert desk.job.quorum is None
    assert desk.step == 0
    desk.hello("b", step=0, history=desk.job.history)
    done = desk.tick()
    assert done.only(m.Waiting).keys() == {"a", "b"}
    assert "its code raised OSError" in desk.job.waiting
    # Nor do they try again, until another raises.
    assert desk.job.quorum is None
    desk.join("b", step=0, history=desk.job.history)
    assert members(desk) == ["a", "b"]
    assert shards(desk.quorum) == {"a": (0, 1, 2, 3, 4, 5), "b": ()}, "computed shards are kept"
    assert committed(desk.commit()) == ["a", "b"]
    assert shards(desk.quorum) == {"a": (0, 1, 2), "b": (3, 4, 5)}


def test_a_group_that_is_back_ends_no_trial_and_takes_part_after_it():
    desk = running("a", "b", min_replicas=2)
    raises(desk, "b", "KeyboardInterrupt", shard=None)
    trial = desk.quorum
    desk.come("b", step=0, history=desk.job.history)
    assert desk.group("b").phase is GroupPhase.READY
    assert desk.quorum == trial
    assert not desk.vote("a").only(m.Commit)
    assert members(desk) == ["a", "b"]


def test_a_trial_whose_members_die_is_over():
    desk = running("a", "b", min_replicas=2)
    raises(desk, "b")
    desk.close("a")
    assert desk.job.quorum is None
    desk.come("b", step=0, history=desk.job.history)
    assert desk.job.quorum is None, "it has raised, and proves nothing alone"
    desk.come("a", step=0, history=desk.job.history)
    assert members(desk) == ["a", "b"]


def test_without_fixed_shards_the_others_cannot_try_what_is_its_own():
    desk = running("a", "b", shards=None, min_replicas=2)
    assert not raises(desk, "b").only(m.Halted)
    assert desk.job.quorum is None
    desk.tick()
    assert "its code raised OSError" in desk.job.waiting


def test_a_report_of_a_quorum_that_was_replaced_for_the_same_step_counts():
    desk = running("a", "b", "c")
    old = desk.quorum.quorum_id
    desk.close("c")
    assert raises(desk, "b", quorum_id=old).closed == ["b"]
    assert members(desk) == ["a"]


def test_a_report_of_an_earlier_step_or_of_one_that_is_out_counts_for_nothing():
    desk = running("a", "b")
    desk.commit()
    assert raises(desk, "b", step=0).effects == ()
    healing(desk, "c")
    assert raises(desk, "c").effects == ()
    assert members(desk) == ["a", "b"]


def test_texts_and_their_number_are_bounded():
    names = [f"g{i}" for i in range(raising.MAX_KEPT + 5)]
    desk = running(*names, shards=None)
    for name in names[:-1]:
        raises(desk, name, f"{name} " + "x" * 5000)
    assert len(desk.job.raised) == raising.MAX_KEPT
    text = raises(desk, names[-1], "last").only(m.Halted)[names[-1]].reason
    assert len(text) < 4000


def test_what_was_raised_in_a_later_step_does_not_count_after_a_resume():
    """Found by seed 426787: the job halted at step 2 because another group had raised in step 5."""
    desk = running("a", "b")
    history = desk.job.history
    for _ in range(2):
        desk.commit()
    raises(desk, "b")
    desk.close("a")
    desk.wait(0.2)
    assert desk.job.raised
    desk.come("c", step=1, history=history, incarnation=5)
    desk.wait(60.0, away=("c",))
    assert desk.step == 1
    assert members(desk) == ["c"]
    assert not desk.job.raised
