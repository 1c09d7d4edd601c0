"""All holders of the job's state are gone: it resumes from the best checkpoint, and never from a fresh state."""

from jaxft_protocol import messages as m
from jaxft_protocol.coordinator.job import GroupPhase

from .helpers import Desk, committed, digest_of, healing, members, orphaned, running, tried_again

# The states in these tests are of the job that `running` founded, whose history is named after incarnation 1, unless
# they are of this one.
OTHER = 0xABC


def bring(desk: Desk, name: str, step: int, *, incarnation: int = 9, **fields: object) -> None:
    """A group comes with a checkpoint of the job."""
    desk.come(name, step=step, incarnation=incarnation, **{"history": desk.job.history, **fields})


# ---- when ----


def test_a_fresh_group_alone_never_founds_anew():
    desk = orphaned("a", "b")
    desk.come("fresh")
    desk.wait(600.0)
    assert (desk.job.quorum, desk.step) == (None, 3)
    assert desk.group("fresh").phase is GroupPhase.STALE


def test_a_group_of_the_jobs_history_resumes_it_after_the_heartbeat_timeout():
    desk = orphaned("a", "b", heartbeat_timeout_s=5.0)
    bring(desk, "c", step=2)
    desk.wait(4.8)
    assert desk.job.quorum is None
    reports = [text for done in desk.wait(0.4) for text in done.reports]
    assert (members(desk), desk.step) == (["c"], 2)
    text = (
        "[job] resumes at step 2 with the state of c: no group is left that held step 3; 1 step is done again"
    )
    assert text in reports
    assert committed(desk.commit()) == ["c"]


def test_it_may_begin_again_from_the_state_with_which_it_began():
    desk = orphaned("a", "b")
    bring(desk, "a", step=0, incarnation=9)
    bring(desk, "b", step=0, incarnation=10)
    desk.come("fresh")
    reports = [text for done in desk.wait(6.0) for text in done.reports]
    assert (members(desk), desk.step) == (["a", "b"], 0)
    text = (
        "resumes at step 0 with the state of a, b: no group is left that held step 3; 3 steps are done again"
    )
    assert f"[job] {text}" in reports
    assert desk.group("fresh").phase is GroupPhase.HEALING


def test_the_timeout_counts_from_the_last_holders_death_and_not_from_the_candidates_coming():
    desk = orphaned("a")
    desk.wait(20.0)
    bring(desk, "c", step=2)
    assert members(desk) == ["c"]


def test_a_holder_that_was_back_in_between_starts_the_wait_anew():
    desk = orphaned("a")
    desk.wait(4.0)
    desk.come("a", step=3, digest="")
    desk.wait(10.0)
    desk.close("a")
    bring(desk, "c", step=2)
    desk.wait(4.8)
    assert desk.job.quorum is None
    desk.wait(0.4)
    assert members(desk) == ["c"]


def test_the_wait_starts_anew_after_each_resume():
    desk = orphaned("a")
    desk.wait(20.0)
    bring(desk, "c", step=2)
    desk.close("c")
    bring(desk, "d", step=1)
    desk.wait(4.8)
    assert desk.job.quorum is None
    desk.wait(0.4)
    assert members(desk) == ["d"]


def test_a_holder_that_reconnects_first_prevents_it():
    desk = orphaned("a", "b")
    bring(desk, "c", step=2)
    desk.wait(4.0)
    desk.come("a", step=3, digest="")
    assert (members(desk), desk.step) == (["a"], 3)
    assert desk.group("c").phase is GroupPhase.HEALING


def test_a_holder_that_is_present_but_never_joins_does_not_prevent_it_for_ever():
    desk = orphaned("a", "b", join_timeout_s=10.0)
    bring(desk, "c", step=2)
    desk.hello("a")
    desk.wait(9.5)
    assert desk.job.quorum is None
    desk.wait(1.0)
    assert (members(desk), desk.step) == (["c"], 2)


def test_another_life_of_a_holder_prevents_nothing():
    desk = orphaned("a", "b")
    bring(desk, "a", step=2, incarnation=2)
    desk.wait(6.0)
    assert members(desk) == ["a"]


def test_groups_that_compile_are_waited_for_up_to_the_join_timeout():
    desk = orphaned("a", join_timeout_s=10.0)
    desk.hello("slow")
    desk.wait(20.0)
    bring(desk, "c", step=1)
    desk.wait(9.8)
    assert desk.job.quorum is None
    desk.wait(0.4)
    assert (members(desk), desk.step) == (["c"], 1)


def test_one_that_compiles_may_bring_a_newer_state():
    desk = orphaned("a")
    desk.hello("slow", incarnation=9)
    bring(desk, "c", step=1)
    desk.wait(20.0)
    desk.join("slow", step=2, history=desk.job.history)
    assert (members(desk), desk.step) == (["slow"], 2)
    assert desk.group("c").phase is GroupPhase.HEALING


def test_everybody_is_told_what_would_help():
    desk = orphaned("a")
    desk.come("fresh")
    reason = desk.tick().only(m.Waiting)["fresh"].reason
    assert "step 3 needs 1 groups that hold it, and 0 do (none); fresh (stale)" in reason
    assert reason.endswith(
        "no group is left that holds the job's state: the job resumes when a group brings a checkpoint of it"
    )


def test_a_finished_job_does_not_resume():
    desk = running("a")
    desk.commit()
    desk.commit()
    history = desk.job.history
    desk.leave("a", finished=True)
    desk.wait(20.0)
    done = desk.come("c", step=1, history=history, incarnation=9)
    assert done.only(m.Finished)["c"].step == 2
    assert desk.step == 2


# ---- on which state ----


def test_the_highest_step_is_gone_on_from():
    desk = orphaned("a")
    for name, step in (("c", 1), ("e", 2), ("d", 1)):
        bring(desk, name, step)
    desk.come("fresh", step=2)  # of no history
    done = desk.wait(6.0)
    assert (members(desk), desk.step) == (["e"], 2)
    heals = {name: heal for each in done for name, heal in each.only(m.Heal).items()}
    assert heals.keys() == {"c", "d", "fresh"}
    assert {donor.group for heal in heals.values() for donor in heal.donors} == {"e"}


def test_of_equal_steps_the_majority():
    desk = orphaned("a")
    for name, digest in (("group-0", "x"), ("group-1", "y"), ("group-2", "y"), ("group-3", "y")):
        bring(desk, name, step=2, digest=digest)
    done = desk.wait(6.0)
    assert members(desk) == ["group-1", "group-2", "group-3"]
    assert [name for each in done for name in each.only(m.Heal)] == ["group-0"]


def test_without_a_majority_the_job_says_so_and_stops():
    desk = orphaned("a")
    bring(desk, "group-10", step=2, digest="x")
    bring(desk, "group-2", step=2, digest="y")
    bring(desk, "older", step=1, digest="z")
    halted = {name: message for done in desk.wait(6.0) for name, message in done.only(m.Halted).items()}
    assert sorted(halted) == ["group-10", "group-2", "older"]
    assert halted["older"].kind is m.HaltKind.DIVERGED
    text = halted["older"].reason
    assert "the groups of job 'job' bring different states 2, and no majority shows which is right" in text
    assert f"(group-2: {digest_of('y'):016x}; group-10: {digest_of('x'):016x}). Start only the groups" in text
    assert (desk.job.groups, desk.job.quorum) == ({}, None)
    # Started only with the trusted state, it continues.
    bring(desk, "group-2", step=2, digest="y", incarnation=77)
    desk.wait(6.0)
    assert members(desk) == ["group-2"]


def test_a_group_whose_digest_is_unknown_has_no_say():
    desk = orphaned("a")
    bring(desk, "group-0", step=2, digest="")
    bring(desk, "group-1", step=2, digest="")
    bring(desk, "group-2", step=2, digest="y")
    desk.wait(6.0)
    assert members(desk) == ["group-2"]


def test_what_a_joiner_was_ready_with_counts_though_it_could_not_follow_any_further():
    desk = running("a")
    healing(desk, "late")
    desk.ready("late")
    desk.commit()
    assert "late" in members(desk), "its donor has the last sum"
    desk.close("a")
    desk.heal_failed("late", step=0)
    assert desk.step == 1
    desk.wait(6.0)
    assert (members(desk), desk.step) == (["late"], 0)


def test_what_a_joiner_had_healed_to_counts_though_the_heal_failed():
    # It came with a fresh state, and now holds state 5: newer than any checkpoint.
    desk = running("a")
    healing(desk, "late")
    for _ in range(6):
        desk.commit()
    desk.close("a")
    bring(desk, "c", step=4)
    desk.heal_failed("late", step=5)
    desk.wait(6.0)
    assert (members(desk), desk.step) == (["late"], 5)


def test_what_it_had_healed_to_is_not_the_state_whose_digest_it_joined_with():
    desk = running("a")
    desk.come("late", digest="x")
    for _ in range(6):
        desk.commit()
    desk.close("a")
    bring(desk, "z", step=5, digest="x")
    desk.heal_failed("late", step=5)
    done = desk.wait(6.0)
    assert members(desk) == ["z"]
    assert [name for each in done for name in each.only(m.Heal)] == ["late"]


def test_a_heal_that_failed_before_it_brought_anything_makes_no_candidate():
    desk = running("a")
    healing(desk, "late")
    desk.commit()
    desk.close("a")
    desk.heal_failed("late", step=0)
    desk.wait(100.0)
    assert (desk.job.quorum, desk.step) == (None, 1)


def test_the_history_stays_and_is_told():
    desk = orphaned("a")
    history = desk.job.history
    assert history == 1  # of the incarnation that founded it
    bring(desk, "c", step=2)
    quorums = [each.only(m.NewQuorum)["c"] for each in desk.wait(6.0) if each.only(m.NewQuorum)]
    assert [quorum.history for quorum in quorums] == [history]
    assert desk.come("d", digest="fresh").only(m.Heal)["d"].history == history


# ---- groups that come later ----


def test_a_state_of_another_history_is_refused():
    desk = running("a")
    desk.commit()
    desk.commit()
    done = desk.come("old", step=1, history=OTHER)
    (refused,) = done.to("old")
    assert isinstance(refused, m.Refused)
    assert refused.reason.startswith(
        f"group 'old' brings step 1 of another history of job 'job' (history {OTHER:016x}; this one is {1:016x}): "
        "the job has been started again since that state was saved"
    )
    assert done.closed == ["old"]


def test_the_first_state_of_another_history_is_nothing_that_could_be_lost():
    desk = running("a")
    desk.commit()
    heal = desk.come("old", step=0, history=OTHER).only(m.Heal)["old"]
    assert heal.step == 1
    assert desk.group("old").history == 0


def test_groups_whose_states_can_only_be_replaced_are_told_so():
    """Otherwise a group with a history would wait forever for others to resume with."""
    desk = orphaned("a", "b")
    desk.come("fresh")
    desk.wait(1.0)
    assert desk.come("undone", step=0, history=OTHER).only(m.Waiting)["undone"].fresh
    assert not desk.come("c", step=2, history=desk.job.history).only(m.Waiting)["c"].fresh
    (heard,) = (done.only(m.Waiting) for done in desk.wait(1.0) if done.only(m.Waiting))
    assert {name: waiting.fresh for name, waiting in heard.items()} == {
        "fresh": True,
        "undone": True,
        "c": False,
    }


def test_so_is_one_whose_state_is_distrusted():
    desk = running("a", "b", "c")
    desk.votes(a=1, b=1, c=2)
    for name in ("a", "b"):
        desk.close(name)
    desk.wait(6.0)
    desk.come("c", step=1, history=desk.job.history)
    heard = [waiting for done in desk.wait(6.0) for waiting in done.only(m.Waiting).values()]
    assert [(waiting.fresh, waiting.held) for waiting in heard] == [(True, False)]


# ---- a newer state of this run comes later ----


def test_the_job_goes_on_from_a_newer_state_that_comes_late():
    desk = resumed_at(1)
    desk.commit()
    done = desk.come("a", step=3, history=desk.job.history)
    evicted = done.only(m.Evicted)["c"]
    assert evicted.may_return
    assert "a brings step 3 of this run, but the coordinator only knew step 2" in evicted.reason
    bring(desk, "c", step=2, digest="c's")
    reports = [text for done in desk.wait(6.0) for text in done.reports]
    assert (members(desk), desk.step) == (["a"], 3)
    assert "[job] resumes at step 3 with the state of a: no group is left that held step 2" in reports
    assert desk.group("c").phase is GroupPhase.HEALING


def test_while_it_goes_back_for_a_newer_state_a_corrupt_group_heals():
    """No group holds the job's state then, but this does not mean that the job has halted."""
    desk = running("a", "b", "c")
    desk.votes(a=1, b=1, c=2)
    desk.come("new", step=3, history=desk.job.history)
    assert desk.come("c", step=0).only(m.Halted) == {}
    desk.wait(6.0)
    assert (members(desk), desk.group("c").phase) == (["new"], GroupPhase.HEALING)


def test_the_peers_of_the_newer_state_are_waited_for_and_the_majority_decides():
    desk = resumed_at(1)
    history = desk.job.history
    desk.come("a", step=3, digest="odd", history=history)
    desk.wait(2.0)
    for name in ("b", "d"):
        desk.come(name, step=3, digest="sound", history=history)
    desk.wait(4.0)
    assert (members(desk), desk.step) == (["b", "d"], 3)


def test_a_finished_job_gives_way_to_nothing():
    desk = resumed_at(1)
    desk.leave("c", finished=True)
    desk.hello("stays")
    assert desk.job.finished == 1
    desk.come("a", step=3, history=desk.job.history)
    assert desk.job.finished == 1


def test_a_corrupt_state_is_never_newer():
    desk = running("a", "b", "c")
    for _ in range(4):
        desk.commit()
    desk.votes(a=1, b=2, c=1)
    desk.close("a")
    desk.close("c")
    bring(desk, "d", step=2)
    desk.wait(6.0)
    assert (members(desk), desk.step) == (["d"], 2)
    (refused,) = desk.come("b", step=4, digest="", history=m.HistoryId(0)).to("b")
    assert isinstance(refused, m.Refused)
    done = desk.come("b", step=4, digest="", history=desk.job.history)
    assert (members(desk), desk.step) == (["d"], 2)
    assert done.only(m.Heal)["b"].step == 2


def test_a_sleeper_whose_step_happens_to_be_that_of_the_job_heals():
    desk = running("b", "sleeper")
    desk.commit()
    desk.close("sleeper")
    desk.commit()
    desk.close("b")
    bring(desk, "c", step=1, digest="x")
    desk.wait(6.0)
    assert desk.step == 1
    heal = desk.come("sleeper", step=1, digest="", history=desk.job.history).only(m.Heal)["sleeper"]
    assert not heal.log_only


def test_those_who_follow_one_that_is_out_of_reach_say_anew_what_they_hold():
    """It is alive, so they notice no failure; a follower may hold the newest state."""
    desk = running("a")
    desk.come("s", digest="fresh", spare=True)
    desk.ready("s")
    for _ in range(3):
        desk.commit()
    desk.close("a")
    bring(desk, "c", step=1)
    evicted = [done.only(m.Evicted) for done in desk.wait(5.5)]
    (heard,) = [each["s"] for each in evicted if each]
    assert heard.may_return
    assert desk.job.quorum is None
    desk.come("s", step=2, history=desk.job.history, spare=True)  # "a" has given it two sums
    desk.wait(6.0)
    assert (members(desk), desk.step) == (["s"], 2)


# ---- a coordinator that has lost its store ----


def test_a_history_counts_more_than_a_fresh_state_of_the_same_step():
    desk = Desk.open(min_replicas=2)
    desk.come("a", digest="fresh")
    done = desk.come("b", digest="restored", history=OTHER)
    assert list(done.only(m.Heal)) == ["a"]
    assert desk.job.history == OTHER


def test_a_fresh_founding_gives_way_to_a_history():
    desk = running("a", "b")
    healing(desk, "late")
    desk.vote("a")
    done = desk.come("old", step=7, history=OTHER, incarnation=9)
    assert (members(desk), desk.step, desk.job.history) == (["old"], 7, OTHER)
    assert [donor.group for heal in done.only(m.Heal).values() for donor in heal.donors] == ["old"] * 3
    assert done.only(m.Heal).keys() == {"a", "b", "late"}
    assert desk.vote("b", quorum_id=1, step=0).effects == ()
    assert committed(desk.commit()) == ["old"]


def test_one_that_has_healed_to_a_founding_that_gives_way_heals_to_the_history():
    desk = Desk.open(min_replicas=3)
    desk.hello("c")
    desk.come("a", digest="a's")
    desk.come("b", digest="b's")
    desk.join("c", digest="a's")
    desk.ready("b")
    assert members(desk) == ["a", "b", "c"]
    desk.close("c")
    done = desk.come("old", step=3, history=OTHER)
    assert done.only(m.Refused) == {}
    assert {desk.group(name).history for name in ("a", "b")} == {0}
    assert done.only(m.Heal).keys() == {"a", "b"}


def test_the_first_state_of_a_forgotten_founding_is_as_fresh_as_any():
    """Otherwise no group could found the job once its holder is gone: an uncommitted state has no checkpoint."""
    desk = Desk.open()
    desk.come("a", step=0, digest="", history=OTHER)
    assert (members(desk), desk.job.history) == (["a"], OTHER)
    desk.close("a")
    desk.come("b", digest="fresh", incarnation=7)
    desk.wait(60.0)
    assert (members(desk), desk.step, desk.job.history) == (["b"], 0, 7)


def test_the_first_state_of_a_forgotten_founding_gives_way_to_what_was_committed():
    desk = Desk.open()
    desk.come("a", step=0, digest="", history=4)
    desk.come("old", step=7, history=OTHER)
    assert (members(desk), desk.step, desk.job.history) == (["old"], 7, OTHER)


def test_one_that_healed_to_the_founding_state_and_comes_again_undoes_nothing():
    desk = running("a", "b")
    healing(desk, "late")
    desk.ready("late")
    desk.close("late")
    assert tried_again(desk.come("late", step=0, digest="", history=desk.job.history)) is None
    assert members(desk) == ["a", "b"]
    assert desk.group("late").phase is GroupPhase.READY


def resumed_at(step: int) -> Desk:
    """A job of a and b that died at step 3 and continues from c's checkpoint."""
    desk = orphaned("a", "b")
    bring(desk, "c", step, digest="x")
    desk.wait(6.0)
    assert (members(desk), desk.step) == (["c"], step)
    return desk


def test_it_resumes_only_with_as_many_groups_as_a_step_needs():
    # Otherwise the frontier would go back to an old state, and a group with a newer one would have to discard it.
    desk = orphaned("a", "b", min_replicas=2)
    bring(desk, "c", step=1)
    desk.wait(60.0)
    assert (desk.job.quorum, desk.step) == (None, 3)
    bring(desk, "d", step=2)
    assert (desk.job.quorum, desk.step) == (None, 2)
    desk.ready("c", step=2)
    assert members(desk) == ["c", "d"]


# ---- after a heal that failed ----


def test_one_that_has_healed_to_the_first_state_resumes_from_it():
    """Its step is still 0, but its state is now the founders' and not its own."""
    desk = running("a")
    healing(desk, "b")
    desk.commit()
    desk.close("a")
    desk.say("b", m.HealFailed(desk.group("b").heal_id, "no donor answers", m.Step(0), desk.job.history))
    desk.wait(5.5)
    assert (members(desk), desk.step) == (["b"], 0)


def test_what_is_of_another_history_counts_as_fresh():
    desk = running("a")
    healing(desk, "b")
    desk.commit()
    desk.close("a")
    desk.say("b", m.HealFailed(desk.group("b").heal_id, "no donor answers", m.Step(0), m.HistoryId(OTHER)))
    desk.wait(60.0)
    assert (desk.job.quorum, desk.step) == (None, 1)


def test_where_a_resumed_job_loses_all_again_no_fresh_group_founds_it():
    desk = orphaned("a")
    bring(desk, "c", step=0)
    desk.wait(5.5)
    assert (members(desk), desk.step) == (["c"], 0)
    desk.hello("fresh")
    desk.close("c")
    desk.join("fresh", digest="fresh")
    desk.wait(60.0)
    assert desk.job.quorum is None
    bring(desk, "c", step=0, incarnation=10)
    assert members(desk) == ["c"]


def test_a_founding_that_was_resumed_before_any_commit_may_still_be_founded_anew():
    desk = Desk.open(min_replicas=1)
    desk.come("a")
    healing(desk, "b")
    desk.ready("b")
    desk.close("a")
    assert desk.job.frontier is not None
    assert desk.job.frontier.fresh
    desk.close("b")
    bring(desk, "b", step=0, digest="")
    desk.wait(6.0)
    assert members(desk) == ["b"]
    assert desk.job.frontier.fresh
    desk.hello("fresh")
    desk.close("b")
    desk.join("fresh", digest="fresh")
    desk.wait(6.0)
    assert members(desk) == ["fresh"]
