"""A group that hangs differs from groups that wait for it, although its heartbeats continue."""

import pytest
from jaxft_protocol.coordinator import progress
from jaxft_protocol.coordinator.assign import LEAST_MEMBERS
from jaxft_protocol.messages import AllComputed, Evicted, Heartbeat, QuorumId, Step, Waiting

from tests.protocol.coordinator.helpers import Desk, healing, members, running, shards

# Patience with fast steps, at a heartbeat timeout of 5 s.
PATIENCE_S = 10.0
# `join_timeout_s`: the job waits at least this long for a member that is away.
AWAY_S = 60.0


def computed(desk: Desk, name: str, *, quorum_id: int | None = None, step: int | None = None) -> None:
    known = desk.quorum.quorum_id if quorum_id is None else QuorumId(quorum_id)
    desk.say(name, Heartbeat(known, desk.step if step is None else Step(step)))


def measured(*names: str, step_s: float = 0.1, **options: float) -> Desk:
    """A running job whose steps have taken `step_s`."""
    desk = running(*names, **options)
    for _ in range(3):
        desk.wait(step_s)
        desk.commit()
    return desk


def test_one_that_does_not_compute_while_others_wait_is_put_out():
    desk = measured("a", "b", "c")
    computed(desk, "a")
    computed(desk, "c")
    desk.wait(PATIENCE_S)
    assert members(desk) == ["a", "b", "c"]
    out = desk.tick(0.2)
    assert out.closed == ["b"]
    evicted = out.only(Evicted)["b"]
    assert evicted.may_return
    assert "it hangs: it has not computed its shards of step 3" in evicted.reason
    assert "waited for it for 10." in evicted.reason
    assert members(desk) == ["a", "c"]
    assert desk.quorum.step == 3


def test_all_that_hang_are_put_out_at_once():
    desk = measured("a", "b", "c")
    computed(desk, "b")
    desk.wait(PATIENCE_S + 0.3)
    assert members(desk) == ["b"]


def test_while_nobody_is_ahead_nobody_hangs():
    desk = measured("a", "b")
    desk.wait(100.0)
    assert members(desk) == ["a", "b"]


def test_patience_begins_when_the_first_waits_not_with_the_step():
    desk = measured("a", "b")
    desk.wait(60.0)
    computed(desk, "a")
    desk.wait(PATIENCE_S - 0.5)
    assert members(desk) == ["a", "b"]
    desk.wait(1.0)
    assert members(desk) == ["a"]


def test_one_that_does_not_vote_while_others_hold_the_sum_is_put_out():
    desk = measured("a", "b")
    computed(desk, "a")
    computed(desk, "b")
    desk.vote("a")
    desk.wait(PATIENCE_S + 0.3)
    # The vote of a is enough: it holds the complete sum.
    assert (members(desk), desk.step) == (["a"], 4)


def test_slow_steps_earn_more_patience():
    desk = measured("a", "b", step_s=5.0)
    computed(desk, "a")
    desk.wait(progress.STEPS_OF_PATIENCE * 5.0 - 0.5)
    assert members(desk) == ["a", "b"]
    desk.wait(1.5)
    assert members(desk) == ["a"]


def after_stalls(stalls: int) -> Desk:
    """A job whose steps take 0.1 s, except for some of 20 s."""
    desk = measured("a", "b")
    for _ in range(10):
        desk.wait(20.0 if stalls else 0.1)
        stalls -= bool(stalls)
        desk.commit()
    return desk


def test_one_stall_does_not_make_the_job_patient():
    desk = after_stalls(1)
    assert progress.patience_s(desk.job) == PATIENCE_S
    computed(desk, "a")
    desk.wait(PATIENCE_S + 0.3)
    assert members(desk) == ["a"]


def test_two_slow_steps_are_what_steps_are_like_for_a_while():
    desk = after_stalls(2)
    assert progress.patience_s(desk.job) == pytest.approx(160.0)
    for _ in range(progress.REMEMBERED_STEPS):
        desk.tick()
        desk.commit()
    assert progress.patience_s(desk.job) == PATIENCE_S


def test_the_time_in_which_one_hung_before_its_vote_is_no_part_of_the_step():
    desk = running("a", "b", "c")
    for name in ("a", "b", "c"):
        computed(desk, name)
    desk.wait(0.5)
    desk.vote("a")
    desk.vote("b")
    desk.wait(progress.UNMEASURED_PATIENCE * AWAY_S + 0.5)
    assert (members(desk), desk.step) == (["a", "b"], 1)
    assert progress.patience_s(desk.job) == PATIENCE_S


def test_the_first_steps_count_as_they_are():
    desk = running("a", "b")
    desk.wait(5.0)
    desk.commit()
    assert progress.patience_s(desk.job) == pytest.approx(40.0)
    for _ in range(progress.ENOUGH_STEPS):
        desk.tick()
        desk.commit()
    assert progress.patience_s(desk.job) == PATIENCE_S


def test_one_that_gets_on_does_not_hang_however_long_it_takes():
    """Many shards after an uneven assignment, or a slow link: any progress extends the time."""
    desk = measured("a", "b", "c")
    desk.computed("a", "c")
    desk.wait(10 * PATIENCE_S, moving=("b",))
    assert members(desk) == ["a", "b", "c"]
    desk.wait(PATIENCE_S - 0.5)
    assert members(desk) == ["a", "b", "c"]
    desk.wait(1.0)
    assert members(desk) == ["a", "c"]


def test_in_its_first_step_one_has_more_time():
    desk = measured("a", "b")
    healing(desk, "c")
    desk.ready("c")
    desk.commit()
    assert members(desk) == ["a", "b", "c"]
    computed(desk, "a")
    computed(desk, "b")
    desk.wait(AWAY_S - 0.5)
    assert members(desk) == ["a", "b", "c"]
    desk.wait(1.0)
    assert members(desk) == ["a", "b"]


# ---- away ----


def test_one_that_is_away_is_waited_for_and_then_stood_aside_without_blame():
    desk = measured("a", "b", "c")
    computed(desk, "a")
    computed(desk, "c")
    desk.wait(AWAY_S - 0.5, away=("b",))
    assert members(desk) == ["a", "b", "c"]
    done = desk.wait(1.0, away=("b",))
    (evicted,) = [each.only(Evicted)["b"] for each in done if each.only(Evicted)]
    assert (evicted.aside, evicted.may_return) == (True, True)
    assert "it is away from training" in evicted.reason
    assert "its next call of the step brings it back" in evicted.reason
    reports = [line for each in done for line in each.reports]
    assert any(line.startswith("[job] goes on without b: it is away") for line in reports)
    assert not any("evicts" in line for line in reports)
    assert members(desk) == ["a", "c"]
    assert desk.job.blamed == {}
    assert sorted(shard for held in shards(desk.quorum).values() for shard in held) == list(range(6))


def test_one_that_was_stood_aside_comes_back_at_the_next_boundary():
    desk = measured("a", "b", "c")
    for life in range(2):  # as often as it likes
        computed(desk, "a")
        computed(desk, "c")
        desk.wait(AWAY_S + 1.0, away=("b",))
        assert members(desk) == ["a", "c"]
        desk.commit()
        healing(desk, "b", incarnation=life + 2)
        desk.ready("b")
        desk.commit()
        assert members(desk) == ["a", "b", "c"]
        desk.commit()


def test_one_that_comes_back_in_time_computes_in_its_own_time():
    desk = measured("a", "b")
    computed(desk, "a")
    desk.wait(AWAY_S - 1.0, away=("b",))
    desk.wait(PATIENCE_S - 0.5)
    assert members(desk) == ["a", "b"]
    desk.commit()
    assert desk.step == 4


def test_one_that_is_back_and_then_hangs_is_put_out():
    desk = measured("a", "b")
    computed(desk, "a")
    desk.wait(AWAY_S - 1.0, away=("b",))
    done = desk.wait(PATIENCE_S + 0.5)
    (evicted,) = [each.only(Evicted)["b"] for each in done if each.only(Evicted)]
    assert not evicted.aside
    assert desk.job.blamed.keys() == {"b"}


def test_all_may_be_away_for_any_time():
    desk = measured("a", "b")
    desk.wait(700.0, away=("a", "b"))
    assert members(desk) == ["a", "b"]


def test_while_all_are_away_one_that_stands_ready_waits_long():
    desk = measured("a", "b")
    healing(desk, "c")
    desk.ready("c")
    desk.wait(599.0, away=("a", "b"))
    assert members(desk) == ["a", "b"]
    desk.wait(2.0, away=("a", "b"))
    assert members(desk) == ["c"]


def test_time_away_is_no_part_of_a_step():
    desk = measured("a", "b")
    for _ in range(5):
        desk.wait(30.0, away=("b",))
        desk.commit()  # before a heartbeat reports that it is back
    assert progress.patience_s(desk.job) == PATIENCE_S


def test_one_that_the_job_cannot_go_on_without_is_waited_for_and_named():
    desk = measured("a", "b", min_replicas=2)
    computed(desk, "a")
    done = desk.wait(10 * AWAY_S, away=("b",))
    heard = [each.only(Waiting)["a"] for each in done if each.only(Waiting)]
    (waiting,) = heard
    assert "step 3 waits for b, away from training" in waiting.reason
    assert "needs 2 groups, and cannot continue without" in waiting.reason
    assert members(desk) == ["a", "b"]
    desk.tick()
    assert desk.job.waiting == ""
    desk.commit()
    assert desk.step == 4


def test_one_that_is_needed_is_stood_aside_when_another_can_take_its_place():
    desk = measured("a", "b", min_replicas=2)
    computed(desk, "a")
    desk.wait(AWAY_S + 1.0, away=("b",))
    assert members(desk) == ["a", "b"]
    healing(desk, "c")
    desk.ready("c")
    desk.wait(0.2, away=("b",))
    assert members(desk) == ["a", "c"]


# ---- all have computed ----


def test_all_members_are_told_once_when_the_last_has_computed():
    desk = measured("a", "b", "c")
    assert not desk.computed("a", "b").sent
    heard = desk.computed("c").only(AllComputed)
    assert heard == dict.fromkeys("abc", AllComputed(desk.quorum.quorum_id, Step(3)))
    assert not desk.computed("c", "b", "a").sent


def test_one_that_has_voted_has_computed():
    desk = measured("a", "b")
    desk.vote("a")
    assert desk.computed("b").only(AllComputed).keys() == {"a", "b"}


def test_a_new_attempt_tells_once_more():
    desk = measured("a", "b", "c")
    desk.computed("a", "b", "c")
    desk.close("c")
    heard = desk.computed("a", "b").only(AllComputed)
    assert heard == dict.fromkeys("ab", AllComputed(desk.quorum.quorum_id, Step(3)))


def test_several_that_have_computed_are_left_to_the_deadlines_of_their_exchange():
    desk = measured("a", "b")
    computed(desk, "a")
    computed(desk, "b")
    healing(desk, "c")
    desk.ready("c")
    desk.wait(599.0)
    assert members(desk) == ["a", "b"]
    desk.wait(2.0)
    assert members(desk) == ["c"]


# Four of a large quorum are in a row; all others are done.
CROWD = [f"group-{number}" for number in range(LEAST_MEMBERS)]
ROW = CROWD[:4]


def test_of_a_row_that_lacks_the_sum_only_the_one_that_the_others_name_is_put_out():
    """One stands still at the end of the exchange, and its row waits for it."""
    desk = measured(*CROWD, join_timeout_s=60.0)
    desk.computed(*CROWD)
    for name in CROWD[4:]:
        desk.vote(name)
    desk.wait(59.0)
    assert members(desk) == CROWD
    for name in ROW[1:]:
        desk.fail(name, ROW[0])
    desk.wait(2.0)
    assert members(desk) == CROWD[1:]


def test_of_a_row_that_lacks_the_sum_all_are_put_out_if_none_names_another():
    desk = measured(*CROWD, join_timeout_s=60.0)
    desk.computed(*CROWD)
    for name in CROWD[4:]:
        desk.vote(name)
    desk.wait(60.0 + 1.5 * PATIENCE_S - 0.5)
    assert members(desk) == CROWD
    desk.wait(1.0)
    assert members(desk) == CROWD[4:]


def test_of_a_small_quorum_several_that_lack_the_sum_are_put_out_as_one_is():
    desk = measured("a", "b", "c", join_timeout_s=60.0)
    desk.computed("a", "b", "c")
    desk.vote("a")
    desk.wait(PATIENCE_S - 0.5)
    assert members(desk) == ["a", "b", "c"]
    desk.wait(1.0)
    assert members(desk) == ["a"]


def test_before_a_step_was_measured_one_that_never_votes_is_put_out_in_the_end():
    desk = running("a", "b")
    desk.vote("a")
    computed(desk, "b")
    desk.wait(599.0)
    assert members(desk) == ["a", "b"]
    (reason,) = (m.reason for done in desk.wait(2.0) for m in done.only(Evicted).values())
    assert "it has not voted of step 0, and others have waited for it for 600." in reason
    assert members(desk) == ["a"]


def test_one_that_stands_ready_may_go_on_without_a_member_that_hangs():
    desk = measured("a")
    healing(desk, "b")
    desk.ready("b")
    desk.wait(PATIENCE_S - 0.5)
    assert members(desk) == ["a"]
    desk.wait(1.0)
    assert (members(desk), desk.step) == (["b"], 3)


def test_where_the_coordinator_stood_still_itself_the_wait_is_judged_by_the_next_tick():
    desk = measured("a", "b")
    computed(desk, "a")
    desk.wait(1.0)
    desk.tick(after_s=60.0)
    assert members(desk) == ["a", "b"]


def test_one_that_is_put_out_again_and_again_is_let_in_later_each_time():
    desk = measured("a", "b", "c")
    waited_s: list[float] = []
    for life in range(5):
        computed(desk, "a")
        computed(desk, "b")
        desk.wait(PATIENCE_S + 0.3)
        assert members(desk) == ["a", "b"]
        healing(desk, "c", incarnation=life + 2)
        desk.ready("c")
        began_s = desk.now_s
        while "c" not in members(desk):
            desk.tick()
            desk.commit()
            if "c" in desk.job.groups and desk.group("c").step < desk.step:
                desk.ready("c")
        waited_s.append(desk.now_s - began_s)
        desk.commit()  # in its first step it would have more time
    assert waited_s[0] < 0.5
    assert waited_s == sorted(waited_s)
    assert waited_s[-1] > 10.0


def test_one_that_is_held_back_is_let_in_where_too_few_are_left():
    desk = measured("a", "b", "c", min_replicas=2)
    for life in range(3):
        computed(desk, "a")
        computed(desk, "b")
        desk.wait(PATIENCE_S + 0.3)
        healing(desk, "c", incarnation=life + 2)
        desk.ready("c")
        if life < 2:
            while "c" not in members(desk):
                desk.tick()
                desk.commit()
                desk.ready("c")
    desk.close("b")
    assert members(desk) == ["a", "c"]


def test_each_time_somebody_is_put_out_without_a_commit_patience_doubles():
    """So if all steps have become slow, the groups do not evict each other in turn forever."""
    desk = measured("a", "b", "c", "d")
    for times, behind in enumerate(("d", "c", "b")):
        patience_s = PATIENCE_S * 2**times
        for name in members(desk):
            if name != behind:
                computed(desk, name)
        desk.wait(patience_s - 0.5)
        assert behind in members(desk)
        desk.wait(1.0)
        assert behind not in members(desk)
    assert progress.patience_s(desk.job) == 8 * PATIENCE_S
    desk.commit()
    assert progress.patience_s(desk.job) == PATIENCE_S


def test_one_that_hung_takes_no_others_place_before_the_next_commit():
    desk = measured("a", "b", "c")
    computed(desk, "a")
    computed(desk, "b")
    desk.wait(PATIENCE_S + 0.5)
    assert members(desk) == ["a", "b"]
    healing(desk, "c")
    desk.ready("c")
    computed(desk, "a")
    desk.wait(2 * PATIENCE_S + 0.5)
    assert members(desk) == ["a"], "c has just hung, and would be waited for as long once more"
    desk.commit()
    assert members(desk) == ["a", "c"]


def test_when_a_quorum_ends_without_another_its_members_wait_for_nobody():
    """Evicted members may keep their connections open: nothing else would end the wait."""
    desk = measured("a", "b", min_replicas=2)
    desk.computed("a")
    heard = desk.close("b").only(AllComputed)
    assert heard == {"a": AllComputed(QuorumId(1), Step(3))}
    assert desk.job.quorum is None


def test_so_are_they_when_it_ends_with_a_commit():
    desk = measured("a", "b", "c", min_replicas=3)
    desk.vote("a")
    desk.vote("b")
    desk.vote("c")
    assert desk.job.quorum is not None
    desk.vote("a")
    desk.vote("b")
    heard = desk.close("c").only(AllComputed)
    assert heard == dict.fromkeys("ab", AllComputed(QuorumId(1), Step(5)))
    assert desk.job.quorum is None
