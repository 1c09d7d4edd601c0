"""Spares follow the job without a place in it, and take the place of a regular group that is missing."""

import pytest
from jaxft_protocol import messages as m
from jaxft_protocol.coordinator.job import GroupPhase

from .helpers import Desk, committed, healing, members, running, shards, tried_again


def together(*regular: str, spares: tuple[str, ...] = ("s",), **options: float) -> Desk:
    """A job of `regular` groups and spares, founded together at step 0."""
    desk = Desk.open("job", **options)
    for name in (*regular, *spares):
        desk.hello(name)
    for name in (*regular, *spares):
        desk.join(name, spare=name in spares)
    return desk


def commit(desk: Desk) -> None:
    """One step; spares that stand by catch up."""
    desk.commit()
    for group in desk.job.groups.values():
        if group.phase is GroupPhase.READY and group.heal_id is not None:
            desk.ready(group.name)


# ---- standing by ----


def test_spares_have_no_part_while_the_regular_groups_are_there():
    desk = together("a", "b")
    for _ in range(5):
        assert members(desk) == ["a", "b"]
        commit(desk)
    assert desk.group("s").phase is GroupPhase.READY


def test_a_spare_of_the_founding_state_follows_without_fetching_it():
    desk = Desk.open()
    for name in ("a", "b", "s"):
        desk.hello(name)
    desk.join("s", spare=True)
    desk.join("a")
    done = desk.join("b")
    heal = done.only(m.Heal)["s"]
    assert (heal.step, heal.log_only, [donor.group for donor in heal.donors]) == (0, True, ["a", "b"])
    pin = m.Pin(heal.heal_id, m.Step(0), log_only=True)
    assert done.only(m.Pin) == {"a": pin, "b": pin}
    assert heal.history == desk.job.history
    assert "[job] s stands by at step 0, follows a, b" in done.reports


def test_a_spare_that_comes_later_heals_and_then_stands_by():
    desk = running("a", "b")
    desk.commit()
    assert not desk.come("s", digest="fresh", spare=True).only(m.Heal)["s"].log_only
    desk.ready("s")
    desk.commit()
    assert members(desk) == ["a", "b"]
    assert desk.group("s").heal_id is not None  # its donors keep logging for it


def test_it_hears_of_each_step_and_keeps_its_donors():
    desk = together("a", "b")
    heal_id = desk.group("s").heal_id
    for step in range(3):
        done = desk.commit()
        assert [getattr(message, "step", None) for message in done.to("s")] == [step + 1]
        assert not done.only(m.Release)
        desk.ready("s")
    assert desk.group("s").heal_id == heal_id


# ---- taking a place ----


def test_a_spare_takes_a_dead_members_shards_in_the_very_same_step():
    desk = together("a", "b", "c")
    commit(desk)
    again = tried_again(desk.close("b"))
    assert again is not None
    assert (again.step, shards(again)) == (1, {"a": (0, 1), "c": (4, 5), "s": (2, 3)})


def test_also_when_it_still_lacks_the_last_sum():
    desk = together("a", "b")
    desk.commit()
    assert desk.group("s").step == 0
    again = tried_again(desk.close("a"))
    assert again is not None
    assert (again.step, members(desk)) == (1, ["b", "s"])
    desk.ready("s")
    assert committed(desk.commit()) == ["b", "s"]


def test_not_when_it_lacks_two():
    desk = together("a", "b")
    desk.commit()
    desk.commit()
    assert tried_again(desk.close("a")) is not None
    assert members(desk) == ["b"]
    desk.ready("s")
    desk.commit()
    assert members(desk) == ["b", "s"]  # at the boundary


def test_of_many_spares_as_many_are_called_as_places_are_missing():
    desk = together("a", "b", "c", spares=("s1", "s2", "s3"))
    desk.close("c")
    assert members(desk) == ["a", "b", "s1"]
    desk.close("a")
    assert members(desk) == ["b", "s1", "s2"]


def test_the_one_in_place_stays_when_another_comes():
    desk = together("a", "b", spares=("s2",))
    desk.close("a")
    desk.come("s1", spare=True)
    assert desk.group("s1").phase is GroupPhase.READY
    desk.fail("b")
    assert tried_again(desk.vote("s2")) is not None
    assert members(desk) == ["b", "s2"]
    commit(desk)
    assert members(desk) == ["b", "s2"]
    desk.close("s2")
    assert members(desk) == ["b", "s1"]


def test_spares_in_place_make_no_more_places():
    desk = together("a", "b", spares=("s1", "s2"))
    desk.close("a")
    commit(desk)
    healing(desk, "a", incarnation=2)
    desk.ready("a")
    commit(desk)
    assert members(desk) == ["a", "b"]


# ---- giving it back ----


def test_it_stands_by_again_when_a_regular_group_is_back():
    desk = together("a", "b")
    desk.close("a")
    assert members(desk) == ["b", "s"]
    healing(desk, "a", incarnation=2)
    desk.ready("a")
    done = desk.commit()
    assert members(desk) == ["a", "b"]
    to_spare = done.to("s")
    assert to_spare[0] == m.Commit(m.QuorumId(2), m.Step(0))  # it applies this step, as the others do
    (heal,) = to_spare[1:]
    assert isinstance(heal, m.Heal)
    assert (heal.step, heal.log_only, [donor.group for donor in heal.donors]) == (1, True, ["b"])
    assert done.only(m.Commit)["b"].next == desk.quorum
    # And it can be called again at once.
    commit(desk)
    desk.close("b")
    assert members(desk) == ["a", "s"]


def test_it_follows_those_too_that_came_later():
    # It follows b alone, for a holds the frontier for certain only when its first step is committed.
    desk = together("a", "b")
    desk.close("a")
    healing(desk, "a", incarnation=2)
    desk.ready("a")
    desk.commit()
    first = desk.group("s").heal_id
    assert first is not None
    desk.commit()
    assert desk.group("s").heal_id == first, "it has not reported this state yet"
    done = desk.ready("s")
    assert done.only(m.Release) == {"b": m.Release(first)}
    heal = done.only(m.Heal)["s"]
    assert (heal.step, heal.log_only, [donor.group for donor in heal.donors]) == (desk.step, True, ["a", "b"])
    assert done.only(m.Pin) == {name: m.Pin(heal.heal_id, desk.step, log_only=True) for name in ("a", "b")}
    # So it gets the last sum even if its first donor dies.
    desk.commit()
    desk.close("b")
    assert members(desk) == ["a", "s"]


def test_relieved_in_the_middle_of_a_step_it_follows_from_that_step():
    desk = together("a", "b")
    desk.close("a")
    healing(desk, "c")
    desk.ready("c")
    desk.fail("s")
    done = desk.vote("b")
    assert sorted(done.only(m.NewQuorum)) == ["b", "c"]
    (heal,) = done.to("s")
    assert isinstance(heal, m.Heal)
    assert (heal.step, heal.log_only) == (0, True)


def test_relieved_before_it_had_the_last_sum_it_fetches_the_state():
    # It never reported state 1. Its heal is over, so it could not get that sum any more.
    desk = together("a", "b")
    desk.commit()
    desk.close("a")
    assert members(desk) == ["b", "s"]
    healing(desk, "c")
    desk.ready("c")
    desk.fail("s")
    done = desk.vote("b")
    assert members(desk) == ["b", "c"]
    heal = done.only(m.Heal)["s"]
    assert (heal.step, heal.log_only) == (1, False)


# ---- few regular groups, or none ----


def test_a_spare_is_called_up_to_reach_min_replicas():
    desk = together("a", spares=("s1", "s2"), min_replicas=2)
    assert members(desk) == ["a", "s1"]
    commit(desk)
    healing(desk, "b")
    desk.ready("b")
    commit(desk)
    assert members(desk) == ["a", "b"]


def test_without_enough_spares_the_job_waits():
    desk = together("a", "b", spares=("s",), min_replicas=3)
    assert members(desk) == ["a", "b", "s"]
    desk.close("a")
    assert desk.job.quorum is None
    assert "needs 3 groups that hold it, and 2 do (b, s)" in desk.tick().only(m.Waiting)["s"].reason


def test_a_job_of_spares_only_runs():
    desk = together(spares=("s1", "s2"))
    assert members(desk) == ["s1"]
    commit(desk)
    desk.close("s1")
    assert members(desk) == ["s2"]
    assert committed(desk.commit()) == ["s2"]


# ---- leaving ----


def test_who_is_done_is_not_replaced():
    desk = together("a", "b")
    commit(desk)
    desk.leave("a", finished=True)
    desk.tick()
    assert members(desk) == ["b"]
    commit(desk)
    assert members(desk) == ["b"]


def test_who_leaves_before_the_end_is_replaced_in_the_same_step():
    desk = together("a", "b")
    commit(desk)
    assert tried_again(desk.leave("a", finished=False)) is not None
    assert (members(desk), desk.step) == (["b", "s"], 1)


def test_a_spare_that_is_done_takes_no_place_with_it():
    desk = together("a", "b", spares=("s1", "s2"))
    desk.close("a")
    assert members(desk) == ["b", "s1"]
    desk.leave("s1", finished=True)
    desk.tick()
    assert members(desk) == ["b", "s2"]


def test_the_last_regular_group_that_is_done_ends_the_job_for_the_spares():
    desk = together("a", "b")
    commit(desk)
    desk.leave("a", finished=True)
    desk.leave("b", finished=True)
    assert (desk.job.finished, desk.job.quorum) == (1, None)


def test_a_spare_that_may_not_go_on_alone_ends_with_the_regular_groups():
    desk = together("a", "b", spares=("s", "t"), min_replicas=3)
    assert members(desk) == ["a", "b", "s"]
    commit(desk)
    desk.leave("a", finished=True)
    desk.leave("b", finished=True)
    done = desk.tick()
    assert done.only(m.Finished) == {"s": m.Finished(m.Step(1)), "t": m.Finished(m.Step(1))}
    assert (desk.job.finished, desk.job.quorum) == (1, None)


def test_a_spare_waits_for_a_regular_group_that_has_died_though_another_has_ended():
    desk = together("a", "b", min_replicas=2)
    commit(desk)
    desk.leave("a", finished=True)  # it was stopped by its user, say
    desk.close("b")
    desk.tick()
    assert (desk.job.finished, desk.job.quorum) == (None, None)
    healing(desk, "b", incarnation=2)
    desk.ready("b")
    assert members(desk) == ["b", "s"]


@pytest.mark.parametrize("spares", [(), ("s",)])
def test_founders_that_leave_before_the_first_commit_do_not_end_the_job(spares: tuple[str, ...]):
    # Of the founders b has lost its connection, and is about to dial again.
    desk = together("a", "b", spares=spares, min_replicas=2 + len(spares))
    desk.close("b")
    desk.leave("a", finished=True)
    desk.tick()
    assert desk.job.finished is None
    for name in ("a", "b"):
        desk.come(name, incarnation=1 + (name == "a"))
    desk.commit()
    assert (members(desk), desk.step) == (["a", "b", *spares], 1)


@pytest.mark.parametrize("spares", [(), ("s",)])
def test_groups_that_resume_at_the_end_end_the_job(spares: tuple[str, ...]):
    desk = Desk.open("job", min_replicas=2 + len(spares))
    for name in ("a", "b", *spares):
        desk.come(name, step=9, history=7, spare=name in spares)
    for name in ("a", "b"):
        desk.leave(name, finished=True)
    desk.tick()
    assert desk.job.finished == 9


def test_one_that_was_called_up_and_lacks_the_last_sum_gets_that_first():
    desk = together("a", "b", min_replicas=2)
    commit(desk)
    desk.leave("b", finished=True)
    desk.vote("a")  # with this the step counts; the spare is called up, one sum behind
    assert (members(desk), desk.step) == (["a", "s"], 2)
    desk.leave("a", finished=True)
    assert desk.tick().only(m.Finished) == {}
    assert desk.job.groups["a"].phase is GroupPhase.LEAVING  # no other group can give that sum
    done = desk.ready("s")
    assert done.only(m.Finished) == {"s": m.Finished(m.Step(2))}
    assert "a" in done.only(m.Goodbye)


def test_a_spare_is_not_sent_home_while_a_regular_group_may_come_back():
    desk = together("a", "b", min_replicas=2)
    commit(desk)
    desk.close("b")
    commit(desk)
    desk.hello("b", incarnation=2)
    desk.leave("a", finished=True)
    desk.tick()
    assert desk.job.finished is None
    desk.join("b", digest="fresh")
    desk.ready("b")
    assert members(desk) == ["b", "s"]


def test_a_relieved_spare_that_holds_the_last_state_resumes_the_job_from_it():
    desk = Desk.open()
    desk.come("s", spare=True)
    healing(desk, "a")
    desk.ready("a")
    desk.commit()
    assert members(desk) == ["a"]
    desk.commit()
    desk.close("a")
    desk.heal_failed("s", step=1)  # it was to reach step 2, but no group can send that sum any more
    desk.wait(5.5)
    assert (members(desk), desk.step) == (["s"], 1)


def test_a_spare_that_stands_by_again_is_not_known_by_the_digest_of_its_first_state():
    """It founded the job. That digest with the newer step would halt the job when all others have died."""
    desk = Desk.open()
    desk.come("s", digest="fresh", spare=True)
    desk.tick()
    desk.commit()
    desk.come("a", digest="fresh")
    desk.ready("a")
    desk.commit()
    assert [member.group for member in desk.quorum.members] == ["a"]
    spare = desk.group("s")
    assert (spare.phase, spare.step, spare.digest) == (GroupPhase.READY, desk.step, None)
