"""The replica's part in comparing states, in resuming, and in standing by: the core alone."""

from dataclasses import replace

import pytest
from jaxft_protocol import messages as m
from jaxft_protocol.replica import state as r

from .test_replica import (
    DONORS,
    SETTINGS,
    Group,
    applying,
    commit,
    connected,
    finished,
    following,
    heal,
    healing,
    joining,
    quorum,
    voted,
    welcome,
    working,
)

HISTORY = m.HistoryId(77)
TIMEOUT_S = 60.0  # of the group
SAVED = m.HistoryId(55)


def standing_by(heal_id: int, step: int) -> m.Heal:
    return m.Heal(m.HealId(heal_id), m.Step(step), DONORS, log_only=True, history=HISTORY)


def returning(group: Group, frontier_step: int = 0) -> m.Join:
    """Let `group` lose its stream and come back; return its messages."""
    group.on(r.Disconnected("reset")).on(r.Connected()).hear(welcome(frontier_step))
    (join,) = group.sent
    assert isinstance(join, m.Join)
    return join


# ---- following the log without the state ----


def test_a_joiner_that_holds_the_frontier_follows_without_fetching():
    group = joining().hear(standing_by(5, 0))
    assert group.phase is r.Phase.FOLLOWING
    assert group.directive == r.Wait("the boundary after step 0, to enter the quorum")
    group.hear(m.FrontierMoved(m.Step(1)))
    assert group.directive == r.Replay(standing_by(5, 0), m.Step(0), m.Step(1))
    assert group.on(r.Replayed(m.HealId(5), m.Step(1))).sent == [m.Ready(m.HealId(5), m.Step(1))]


@pytest.mark.parametrize("group", [working(), voted()])
def test_a_member_that_is_relieved_in_a_step_follows_from_there(group: Group):
    group.hear(standing_by(5, 0))
    assert (group.phase, group.replica.quorum) == (r.Phase.FOLLOWING, None)
    group.hear(m.FrontierMoved(m.Step(1)))
    assert group.directive == r.Replay(standing_by(5, 0), m.Step(0), m.Step(1))
    assert group.on(r.Replayed(m.HealId(5), m.Step(1))).sent == [m.Ready(m.HealId(5), m.Step(1))]
    assert group.hear(quorum(4, 1)).directive == r.Attempt(quorum(4, 1), m.Step(1))


def test_a_relieved_member_whose_donor_turns_out_corrupt_heals_once_it_has_applied():
    """It was stopped while it applied; meanwhile the coordinator found that its donor's state is not the job's."""
    group = applying().hear(standing_by(5, 1), heal(6, 2))
    assert group.phase is r.Phase.APPLYING
    assert group.directive == r.Apply(m.QuorumId(1), m.Step(0))
    group.on(r.Applied(m.Step(1)))
    assert group.directive == r.HealFrom(heal(6, 2))


def test_what_was_exchanged_before_it_was_relieved_is_no_vote():
    assert working().hear(standing_by(5, 0)).on(r.Exchanged(m.QuorumId(1), m.Step(0))).sent == []


def test_a_member_that_is_relieved_with_the_commit_applies_it_first():
    group = voted().hear(commit(1, 0), standing_by(5, 1))
    assert group.directive == r.Apply(m.QuorumId(1), m.Step(0))
    group.on(r.Applied(m.Step(1)))
    assert group.phase is r.Phase.FOLLOWING
    assert isinstance(group.directive, r.Wait)
    assert group.hear(m.FrontierMoved(m.Step(2))).directive == r.Replay(
        standing_by(5, 1), m.Step(1), m.Step(2)
    )


def test_a_step_that_is_committed_while_it_applies_is_replayed_afterwards():
    group = applying().hear(standing_by(5, 1), m.FrontierMoved(m.Step(2)))
    assert group.directive == r.Apply(m.QuorumId(1), m.Step(0))
    assert group.on(r.Applied(m.Step(1))).directive == r.Replay(standing_by(5, 1), m.Step(1), m.Step(2))


def test_one_that_is_relieved_and_called_again_while_it_applies_takes_part():
    group = applying().hear(standing_by(5, 1), quorum(2, 1)).on(r.Applied(m.Step(1)))
    assert group.directive == r.Attempt(quorum(2, 1), m.Step(1))


def test_a_member_that_was_a_joiner_once_works_on_after_a_commit():
    # Its earlier heal does not mean that it stands by.
    group = following().hear(quorum(2, 3)).on(r.Exchanged(m.QuorumId(2), m.Step(3))).hear(commit(2, 3))
    assert group.on(r.Applied(m.Step(4))).phase is r.Phase.WORKING


def test_a_spare_says_for_what_it_waits():
    group = connected().hear(welcome()).on(r.Prepared(m.Step(0), 0xD1, SETTINGS, 2, spare=True))
    (join,) = group.sent
    assert isinstance(join, m.Join)
    assert join.spare
    assert group.hear(standing_by(5, 0)).directive == r.Wait("the commit of step 0, as a spare")


def test_a_log_that_cannot_be_followed_is_reported_with_the_step_that_it_holds():
    group = (
        joining().hear(standing_by(5, 0), m.FrontierMoved(m.Step(2))).on(r.Replayed(m.HealId(5), m.Step(1)))
    )
    assert group.on(r.HealBroke(m.HealId(5), "gone")).sent == [
        m.HealFailed(m.HealId(5), "gone", m.Step(1), HISTORY)
    ]
    assert group.phase is r.Phase.JOINING


def test_a_log_only_pin_is_passed_on_as_such():
    assert working().hear(m.Pin(m.HealId(2), m.Step(0), log_only=True)).effects == (
        r.PinState(m.HealId(2), m.Step(0), log_only=True),
    )


# ---- which state it holds is not known while something is under way ----


@pytest.mark.parametrize("end", [r.Healed(m.HealId(5), m.Step(3)), r.HealBroke(m.HealId(5), "reset")])
def test_who_loses_its_stream_in_a_fetch_joins_when_the_fetch_has_stopped(end: r.Healed | r.HealBroke):
    group = healing().on(r.Disconnected("reset", busy=True)).on(r.Connected()).hear(welcome(4, 2))
    assert (group.sent, group.phase) == ([], r.Phase.PRESENT)
    (join,) = group.on(end).sent
    assert isinstance(join, m.Join)
    assert join.step == (3 if isinstance(end, r.Healed) else 0)
    assert group.phase is r.Phase.JOINING


def test_in_a_replay_as_well():
    group = following().hear(m.FrontierMoved(m.Step(4))).on(r.Disconnected("reset", busy=True))
    group.on(r.Connected()).hear(welcome(4, 2))
    assert group.sent == []
    assert [
        join.step for join in group.on(r.Replayed(m.HealId(5), m.Step(4))).sent if isinstance(join, m.Join)
    ] == [4]


def test_what_has_stopped_while_it_was_offline_delays_nothing():
    group = healing().on(r.Disconnected("reset", busy=True)).on(r.Healed(m.HealId(5), m.Step(3)))
    assert (group.sent, group.phase) == ([], r.Phase.OFFLINE)
    join = returning(group, 3)
    assert (join.step, group.phase) == (3, r.Phase.JOINING)


def test_a_second_loss_of_the_stream_does_not_forget_it():
    group = healing().on(r.Disconnected("reset", busy=True)).on(r.Connected()).on(r.Disconnected("refused"))
    assert group.on(r.Connected()).hear(welcome(4, 2)).sent == []


# ---- history ----


def test_a_fresh_state_has_no_history_until_a_step_is_committed_on_it():
    group = joining().hear(replace(quorum(1, 0), history=HISTORY))
    assert returning(group).history == 0
    group.hear(replace(quorum(2, 0), history=HISTORY))
    group.on(r.Exchanged(m.QuorumId(2), m.Step(0))).hear(commit(2, 0))
    assert group.replica.history == 0
    group.on(r.Applied(m.Step(1)))
    assert returning(group, 1).history == HISTORY


def test_a_checkpoints_history_is_said():
    group = connected().hear(welcome(9, 4)).on(r.Prepared(m.Step(8), 0xD1, SETTINGS, history=SAVED))
    assert [join.history for join in group.sent if isinstance(join, m.Join)] == [SAVED]
    assert returning(group, 9).history == SAVED


@pytest.mark.parametrize("log_only", [True, False])
def test_a_healed_state_is_of_the_jobs_history(*, log_only: bool):
    group = connected().hear(welcome()).on(r.Prepared(m.Step(0), 0xD1, SETTINGS, history=SAVED))
    group.hear(replace(standing_by(5, 0), log_only=log_only))
    assert group.replica.history == SAVED  # until it has healed
    end = r.Replayed(m.HealId(5), m.Step(1)) if log_only else r.Healed(m.HealId(5), m.Step(0))
    group.on(end)
    assert group.replica.history == HISTORY
    assert returning(group, 2).history == HISTORY


def test_a_next_quorum_that_comes_with_the_commit_tells_the_history_too():
    following_quorum = replace(quorum(2, 1), history=HISTORY)
    group = voted().hear(m.Commit(m.QuorumId(1), m.Step(0), following_quorum)).on(r.Applied(m.Step(1)))
    assert group.replica.history == HISTORY


# ---- resuming, and halting ----


def test_a_job_that_goes_on_from_an_older_state_is_mentioned():
    group = connected().hear(welcome(25, 9)).on(r.Prepared(m.Step(20), 0xD1, SETTINGS, history=SAVED))
    group.hear(quorum(10, 20))
    assert group.directive == r.Attempt(quorum(10, 20), m.Step(20))
    assert group.notes[0] == (
        "the job resumes at step 20: all groups that held step 25 are gone; 5 steps are done again"
    )


def test_a_spare_of_the_state_from_which_the_job_goes_on_follows_from_there():
    group = connected().hear(welcome(25, 9)).on(r.Prepared(m.Step(20), 0xD1, SETTINGS, spare=True))
    assert group.hear(standing_by(8, 20)).directive == r.Wait("the commit of step 20, as a spare")


def test_one_that_is_ahead_of_a_job_that_has_gone_back_heals_back():
    group = connected().hear(welcome(25, 9)).on(r.Prepared(m.Step(23), 0xD1, SETTINGS, history=HISTORY))
    back = m.Heal(m.HealId(8), m.Step(20), DONORS, history=HISTORY)
    assert group.hear(back).directive == r.HealFrom(back)
    group.on(r.Healed(m.HealId(8), m.Step(20)))
    assert group.sent == [m.Ready(m.HealId(8), m.Step(20))]
    assert group.replica.step == 20


@pytest.mark.parametrize("make", [connected, joining, working, voted, applying, healing, following])
def test_a_halted_job_is_an_error_that_says_what_to_do(make):
    group = make().hear(m.Halted("the groups of job 'job' hold different states 3 (a: 1; b: 2)"))
    assert isinstance(group.directive, r.Fail)
    assert group.directive.failure.kind is r.FailureKind.DIVERGED
    text = group.directive.failure.text
    assert text.startswith(
        "the coordinator coordinator:29510 has stopped job 'job': the groups of job 'job' hold different states 3 "
        "(a: 1; b: 2). Memory or a device has corrupted a state, or the groups' programs are not deterministic."
    )
    assert "Start the groups again: they resume from the newest checkpoint" in text
    assert group.on(r.Disconnected("ended")).on(r.LeaveNow(finished=False)).directive == group.directive


def test_where_meshes_may_differ_they_are_named_first_as_the_cause_of_states_that_do():
    group = connected().hear(welcome()).on(r.Prepared(m.Step(0), 0xD1, {**SETTINGS, "meshes": "any"}))
    group.hear(m.Halted("the groups of job 'job' hold different states 3 (a: 1; b: 2)"))
    assert isinstance(group.directive, r.Fail)
    text = group.directive.failure.text
    assert "Groups of this job may have different meshes" in text
    assert "jaxft.global_norm" in text
    assert "docs/meshes.md" in text
    assert text.index("different meshes") < text.index("memory or a device")


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        (m.HaltKind.DIVERGED, r.FailureKind.DIVERGED),
        (m.HaltKind.NONFINITE, r.FailureKind.NONFINITE),
        (m.HaltKind.FAILED, r.FailureKind.JOB_HALTED),
    ],
)
def test_each_kind_of_halt_has_its_failure(kind: m.HaltKind, failure: r.FailureKind):
    directive = working().hear(m.Halted("why", kind)).directive
    assert isinstance(directive, r.Fail)
    assert directive.failure.kind is failure


@pytest.mark.parametrize(
    "group", [working().on(r.LeaveNow(finished=True)), finished(), finished().hear(m.Goodbye())]
)
def test_for_one_that_goes_a_halt_is_no_error(group: Group):
    assert group.hear(m.Halted("different states")).phase is r.Phase.LEFT


# ---- digests ----


@pytest.mark.parametrize("digest", [None, 0, 0x9E30145E19D32AC3])
def test_the_fingerprint_of_its_state_goes_with_the_vote(digest: int | None):
    group = working().on(r.Exchanged(m.QuorumId(1), m.Step(0), digest))
    assert group.sent == [m.Vote(m.QuorumId(1), m.Step(0), ok=True, digest=digest)]


def test_one_with_a_state_of_the_jobs_history_waits_for_others_to_resume_with():
    group = connected().hear(welcome(9, 4))
    group.on(r.Prepared(m.Step(2), 0xD1, SETTINGS, history=HISTORY))
    group.now_s = 10_000.0
    assert isinstance(group.on(r.Tick()).directive, r.Wait)


def test_nor_does_it_wait_forever_if_the_job_takes_its_state_for_fresh():
    """Such as the first state of a founding that was undone, or a distrusted state."""
    group = connected().hear(welcome(9, 4))
    group.on(r.Prepared(m.Step(2), 0xD1, SETTINGS, history=HISTORY))
    group.hear(m.Waiting("step 9 needs 1 groups that hold it, and 0 do (none)", fresh=True))
    group.now_s += TIMEOUT_S - 1
    assert isinstance(group.on(r.Tick()).directive, r.Wait)
    group.now_s += 2
    directive = group.on(r.Tick()).directive
    assert isinstance(directive, r.Fail)
    assert directive.failure.kind is r.FailureKind.CANNOT_HEAL


def test_with_its_next_join_its_state_is_judged_again():
    group = connected().hear(welcome(9, 4))
    group.on(r.Prepared(m.Step(2), 0xD1, SETTINGS, history=HISTORY)).hear(m.Waiting("others", fresh=True))
    group.on(r.Disconnected("reset")).on(r.Connected()).hear(welcome(9, 4))
    group.now_s = 10_000.0
    assert isinstance(group.on(r.Tick()).directive, r.Wait)


# ---- leaving the checkpoint to others ----


def heals_only(frontier_step: int | None) -> Group:
    group = connected().hear(welcome(frontier_step))
    return group.on(r.Prepared(m.Step(0), 0xD1, SETTINGS, 2, heals_only=True))


def test_one_that_left_the_checkpoint_to_others_joins_a_job_that_goes_on():
    group = heals_only(20)
    (join,) = group.sent
    assert isinstance(join, m.Join)
    assert join.history == 0


@pytest.mark.parametrize("frontier_step", [None, 0])
def test_it_never_begins_a_job_that_the_coordinator_does_not_know(frontier_step: int | None):
    group = heals_only(frontier_step)
    assert not any(isinstance(message, m.Join) for message in group.sent)
    assert group.directive == r.ReadCheckpoint()


def test_nor_after_the_coordinator_has_lost_its_memory():
    group = heals_only(20)
    group.on(r.Disconnected("reset")).on(r.Connected()).hear(welcome(None))
    assert group.directive == r.ReadCheckpoint()
    group.on(r.Prepared(m.Step(20), 0xD2, SETTINGS, 2, history=HISTORY))
    (join,) = group.sent
    assert isinstance(join, m.Join)
    assert join.step == 20


def test_it_reads_the_checkpoint_itself_when_those_who_had_read_it_are_gone():
    group = heals_only(20)
    assert isinstance(group.directive, r.Wait)
    group.now_s += TIMEOUT_S + 1
    group.on(r.Tick())
    assert group.directive == r.ReadCheckpoint()
    assert "reads the checkpoint, which it had left" in group.notes[0]
    group.on(r.Prepared(m.Step(20), 0xD2, SETTINGS, 2, history=HISTORY))
    assert any(isinstance(effect, r.Close) for effect in group.effects)
    assert isinstance(group.directive, r.Wait)
    group.on(r.Disconnected("joins again")).on(r.Connected()).hear(welcome(20))
    (join,) = group.sent
    assert isinstance(join, m.Join)
    assert (join.step, join.history) == (20, HISTORY)


def test_it_leaves_it_to_others_once_more_if_they_read_right_now():
    group = heals_only(20)
    group.now_s += TIMEOUT_S + 1
    group.on(r.Tick()).on(r.Prepared(m.Step(0), 0xD1, SETTINGS, 2, heals_only=True))
    assert isinstance(group.directive, r.Wait)
    group.now_s += TIMEOUT_S / 2
    assert isinstance(group.on(r.Tick()).directive, r.Wait)
    group.now_s += TIMEOUT_S
    assert group.on(r.Tick()).directive == r.ReadCheckpoint()


def test_a_state_to_heal_from_that_comes_meanwhile_is_taken():
    group = heals_only(20)
    group.now_s += TIMEOUT_S + 1
    heal = m.Heal(m.HealId(5), m.Step(20), DONORS, history=HISTORY)
    group.on(r.Tick()).hear(heal)
    assert group.directive == r.HealFrom(heal)
    group.on(r.Prepared(m.Step(20), 0xD2, SETTINGS, 2, history=HISTORY))
    assert group.directive == r.HealFrom(heal)
