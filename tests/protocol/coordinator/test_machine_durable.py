"""The records of a coordinator, and how it continues from them."""

import dataclasses
from typing import Any

import pytest
from jaxft_protocol.coordinator import durable
from jaxft_protocol.coordinator import job as j
from jaxft_protocol.messages import Commit, Difference, Heal, HealId, NewQuorum, Refused, Welcome
from jaxft_protocol.values import changed

from tests.protocol.coordinator.helpers import Desk, Done, healing, members, running


def records(done: Done) -> list[j.Record]:
    return [effect.record for effect in done.effects if isinstance(effect, j.Persist)]


class Log:
    """Drives a desk and keeps its records, as a coordinator does."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.known: dict[str, j.Saved] = {}
        self.effects: list[j.Effect] = []
        do = desk.do

        def log(event: object) -> Done:
            done = do(event)  # pyright: ignore[reportArgumentType]
            for record in records(done):
                self.known = durable.fold(self.known, record)
            return done

        desk.do = log  # pyright: ignore[reportAttributeAccessIssue]

    def restart(self, *, term: int = 5, **changed: Any) -> Desk:
        """`changed`: options of the coordinator that were others before."""
        heals_from = HealId(term << durable.HEALS_PER_LIFE_BITS)
        options = j.Options(
            **{"min_replicas": 1, "term": term, "durable": True, "heals_from": heals_from, **changed}
        )
        return Desk(durable.restored(self.known["job"], options, 0.0))


def logged(*names: str, steps: int = 2) -> Log:
    desk = Desk.open(min_replicas=1)
    log = Log(desk)
    for name in names:
        desk.hello(name)
    for name in names:
        desk.join(name)
    for _ in range(steps):
        desk.commit()
    return log


def test_a_decision_stands_behind_its_record():
    desk = running("a", "b")
    desk.vote("a")
    effects = desk.vote("b").effects
    assert effects[0] == j.Persist(j.Moved("job", desk.step, desk.quorum.quorum_id))
    assert [type(effect.message) for effect in effects[1:] if isinstance(effect, j.Send)] == [Commit, Commit]


def test_a_new_quorum_stands_behind_its_record():
    desk = running("a", "b")
    first, *others = desk.close("b").effects
    assert isinstance(first, j.Persist)
    assert isinstance(first.record, j.Saved)
    assert first.record.last_quorum_id == 2
    assert first.record.members == (("a", 1),)
    assert any(isinstance(effect, j.Send) and isinstance(effect.message, NewQuorum) for effect in others)


def test_a_commit_that_changes_the_members_is_written_down_in_full():
    desk = running("a", "b")
    healing(desk, "c")
    desk.ready("c")
    desk.vote("a")
    (record,) = records(desk.vote("b"))
    assert isinstance(record, j.Saved)
    assert record.members == (("a", 1), ("b", 1), ("c", 1))
    assert record.frontier == desk.job.frontier


def test_the_records_make_what_the_job_remembers():
    log = logged("a", "b", steps=5)
    assert log.known["job"] == durable.saved(log.desk.job)
    log.desk.close("b")
    log.desk.commit()
    assert log.known["job"] == durable.saved(log.desk.job)


def test_a_job_of_which_nothing_is_left_is_forgotten():
    desk = Desk.open(min_replicas=1)
    desk.hello("a")
    assert desk.job.empty is False
    assert records(desk.close("a")) == [j.Forgotten("job")]
    assert desk.job.empty
    assert records(desk.tick()) == []


def test_of_a_job_that_all_have_left_before_a_commit_the_ids_are_remembered():
    desk = running("a")
    (record,) = records(desk.close("a"))
    assert desk.job.empty
    assert record == durable.saved(durable.emptied(desk.job))
    assert isinstance(record, j.Saved)
    assert (record.last_quorum_id, record.settings, record.frontier) == (1, None, None)
    assert durable.emptied(desk.job).last_quorum_id == 1


def test_after_a_restart_a_job_without_a_commit_waits_for_its_groups_before_it_is_forgotten():
    desk = logged("a", "b", steps=0).restart()
    desk.wait(19.0)
    assert not desk.job.empty
    assert desk.come("a", digest="").only(Heal) == {}
    assert desk.group("a").phase is j.GroupPhase.MEMBER
    desk = logged("a", "b", steps=0).restart()
    desk.wait(21.0)
    assert desk.job.empty


def test_after_a_restart_a_first_state_whose_holders_are_gone_gives_way_to_another():
    desk = logged("a", "b", steps=0).restart()
    desk.come("c", digest="another", incarnation=7)
    desk.wait(4.8)
    assert desk.job.quorum is None, "a and b may still come back"
    desk.wait(0.4)
    assert (members(desk), desk.step) == (["c"], 0)


def test_a_job_that_has_resumed_is_not_forgotten_though_nothing_was_committed_since():
    desk = logged("a").restart()
    history = desk.job.history
    desk.come("c", step=1, digest="", incarnation=7, history=history)
    desk.wait(21.0)
    assert desk.step == 1
    desk.close("c")
    assert not desk.job.empty
    desk.come("d", step=0, digest="fresh")
    desk.wait(70.0)
    assert desk.job.quorum is None
    assert (desk.step, desk.job.history) == (1, history)


def test_after_a_restart_the_members_go_on_at_the_frontier_under_a_higher_id():
    log = logged("a", "b")
    desk = log.restart()
    assert desk.hello("a").only(Welcome)["a"] == Welcome(1667, 2, 1, frontier_held=False, term=5)  # pyright: ignore[reportArgumentType]
    desk.hello("b")
    desk.join("a", step=2, digest="")
    assert desk.job.quorum is None, "it waits for b, who has computed as well"
    desk.join("b", step=2, digest="")
    assert (members(desk), desk.step, desk.quorum.quorum_id) == (["a", "b"], 2, 2)


@pytest.mark.parametrize(
    "changed",
    [
        {"min_replicas": 2},
        {"min_replicas": 7},
        {"heartbeat_timeout_s": 60.0},
        {"heartbeat_timeout_s": 0.5},
        {"join_timeout_s": 1.0},
        {"founding_wait_s": 0.0},
        {"samples": True},
    ],
)
def test_after_a_restart_with_other_options_the_members_go_on(changed: dict[str, Any]):
    """An option of the coordinator is no setting of a group that names none."""
    desk = logged("a", "b").restart(**changed)
    for name in ("a", "b"):
        desk.hello(name)
    for name in ("a", "b"):
        assert not desk.join(name, step=2, digest="").only(Refused)
    assert (members(desk), desk.step) == (["a", "b"], 2)
    desk.commit()
    assert desk.job.min_replicas == 1


def test_after_a_restart_with_another_min_replicas_a_job_keeps_its_own():
    """Its groups hold the state, and would end for good if they were refused."""
    desk = logged("a", "b").restart(min_replicas=3)
    for name in ("a", "b", "c"):
        desk.hello(name)
    desk.join("a", step=2, digest="")
    (refused,) = desk.join("c", min_replicas=3).to("c")
    assert isinstance(refused, Refused)
    assert refused.differences == (Difference("min_replicas", "1", "3"),)
    desk.join("b", step=2, digest="")
    assert (members(desk), desk.job.min_replicas) == (["a", "b"], 1)


def test_after_a_restart_those_who_do_not_come_back_are_not_waited_for_long():
    desk = logged("a", "b").restart()
    desk.come("a", step=2, digest="")
    desk.wait(4.8)
    assert desk.job.quorum is None
    assert "waits a moment for earlier members" in desk.job.waiting
    desk.wait(0.4)
    assert members(desk) == ["a"]


def test_after_a_restart_one_that_is_present_but_busy_is_waited_for_longer():
    desk = logged("a", "b").restart()
    desk.come("a", step=2, digest="")
    desk.hello("b")
    desk.wait(59.0)
    assert desk.job.quorum is None
    desk.wait(1.5)
    assert members(desk) == ["a"]


def test_after_a_restart_another_life_of_a_member_is_not_taken_for_it():
    desk = logged("a", "b").restart()
    desk.come("b", step=2, digest="", incarnation=2)
    desk.wait(30.0)
    assert desk.job.quorum is None
    assert desk.group("b").phase is j.GroupPhase.STALE


def test_after_a_restart_a_checkpoint_waits_longer_for_those_who_hold_the_frontier():
    log = logged("a", "b")
    desk = log.restart()
    history = log.desk.job.history
    desk.come("c", step=1, digest="", incarnation=7, history=history)
    desk.wait(19.0)
    assert desk.job.quorum is None
    desk.come("a", step=2, digest="")
    assert (members(desk), desk.step) == (["a"], 2)


def test_heal_ids_of_one_life_are_never_those_of_another():
    log = logged("a", "b")
    first = healing(log.desk, "c")
    desk = log.restart(term=1)
    desk.come("a", step=2, digest="")
    desk.wait(6.0)
    assert healing(desk, "c", incarnation=2) > first == HealId(1)


def test_an_untouched_job_is_not_written_down():
    assert durable.record_of(j.Job("job", j.Options()), j.Job("job", j.Options())) is None


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(j.Saved) if field.name != "job"])
def test_no_durable_part_is_taken_for_untouched(name: str):
    """The fast path of `record_of` lists them once more."""
    job = running("group-0", "group-1").job
    part = {"members": "quorum"}.get(name, name)
    assert durable._is_untouched(job, changed(job, waiting="something that is not durable"))
    assert not durable._is_untouched(job, changed(job, **{part: object()}))
