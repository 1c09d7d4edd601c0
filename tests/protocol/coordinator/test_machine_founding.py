"""How a job starts: presence, the first state, settings, min_replicas, the join timeout."""

import pytest
from jaxft_protocol import messages as m
from jaxft_protocol.coordinator.job import Close, GroupPhase, Options, Received, SessionClosed, SessionId
from jaxft_protocol.coordinator.machine import IllegalEvent

from .helpers import Desk, members, running, shards

HISTORY = m.HistoryId(77)

# ---- presence ----


def test_hello_is_answered_with_the_heartbeat_interval_a_third_of_the_timeout():
    assert Desk.open(heartbeat_timeout_s=3.0).hello("a").to("a") == [m.Welcome(1000)]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"protocol_version": 9},
            "protocol version 9 of group 'a' is not the coordinator's 2: install the same",
        ),
        ({"rank": 1, "ranks": 2}, "rank 1 of 2: groups of several processes are not supported yet"),
        ({"ranks": 2}, "rank 0 of 2"),
    ],
)
def test_a_hello_that_cannot_be_served_is_refused(fields: dict[str, int], text: str):
    done = Desk.open().hello("a", **fields)
    (refused,) = done.to("a")
    assert isinstance(refused, m.Refused)
    assert text in refused.reason
    assert done.closed == ["a"]


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_a_name_must_have_a_sensible_length(name: str):
    (refused,) = Desk.open().hello(name).to(name)
    assert isinstance(refused, m.Refused)
    assert f"a group needs a name of 1 to 200 characters, not {len(name)}" in refused.reason


def test_a_refused_hello_ends_its_session_and_leaves_no_trace():
    desk = Desk.open()
    done = desk.hello("")
    assert done.effects[-1] == Close(desk.sessions[""])
    assert desk.job.groups == {}
    assert desk.job.sessions == {}


def test_the_first_message_must_be_hello():
    desk = Desk.open()
    before = desk.job
    with pytest.raises(IllegalEvent, match="the first message of a session must be Hello"):
        desk.do(Received(SessionId(1), m.Heartbeat()))
    assert desk.job is before


def test_a_session_has_one_hello_and_one_join():
    desk = running("a")
    before = desk.job
    with pytest.raises(IllegalEvent, match="a session sends Hello only once"):
        desk.say("a", m.Hello("job", desk.group("a").name, desk.group("a").incarnation, "a:1"))
    with pytest.raises(IllegalEvent, match="group 'a' joined twice"):
        desk.join("a")
    assert desk.job is before


def test_the_end_of_an_unknown_session_means_nothing():
    desk = running("a")
    assert desk.do(SessionClosed(SessionId(99), "gone")).effects == ()


# ---- the first state ----


def test_the_highest_step_is_the_truth_and_the_others_heal_from_it():
    desk = _present("a", "b", "c")
    desk.join("a", step=0)
    desk.join("b", step=200, digest="x")
    done = desk.join("c", step=100)
    assert (desk.step, members(desk)) == (200, ["b"])
    assert {name: [d.group for d in heal.donors] for name, heal in done.only(m.Heal).items()} == {
        "a": ["b"],
        "c": ["b"],
    }


def test_of_fresh_states_the_commonest_is_the_truth():
    desk = _present("group-10", "group-2", "group-11")
    desk.join("group-10", digest="x")
    desk.join("group-2", digest="y")
    done = desk.join("group-11", digest="x")
    assert members(desk) == ["group-10", "group-11"]
    assert sorted(done.only(m.Heal)) == ["group-2"]


def test_of_fresh_states_that_are_equally_common_that_of_the_lowest_name():
    desk = _present("group-10", "group-2", "group-11")
    desk.join("group-10", digest="x")
    desk.join("group-2", digest="y")
    done = desk.join("group-11", digest="z")
    assert members(desk) == ["group-2"]
    assert sorted(done.only(m.Heal)) == ["group-10", "group-11"]


def test_a_state_without_a_digest_is_like_no_other():
    desk = _present("a", "b")
    desk.join("a", digest="")
    done = desk.join("b", digest="")
    assert members(desk) == ["a"]
    assert sorted(done.only(m.Heal)) == ["b"]


def test_min_replicas_counts_those_who_hold_the_state():
    desk = Desk.open(min_replicas=2)
    desk.come("a")
    desk.come("b", digest="other")
    assert desk.job.quorum is None
    assert (
        "step 0 needs 2 groups that hold it, and 1 do (a); b (healing)"
        in desk.tick().only(m.Waiting)["a"].reason
    )
    assert sorted(desk.ready("b").only(m.NewQuorum)) == ["a", "b"]


def test_the_pin_goes_out_before_the_quorum_that_would_overwrite_the_state():
    desk = _present("a", "b")
    desk.join("a")
    done = desk.join("b", digest="other")
    assert [type(message) for message in done.to("a")] == [m.Pin, m.NewQuorum]


def test_a_group_of_equal_digest_that_comes_during_the_first_step_waits_as_a_spare():
    desk = running("a", "b")
    desk.come("late")
    assert desk.group("late").phase is GroupPhase.READY
    assert members(desk) == ["a", "b"]
    desk.close("b")
    assert members(desk) == ["a", "late"]


def test_one_that_holds_the_frontier_follows_the_log_and_enters_at_the_boundary():
    # It came while a step was being tried. It needs no state, only the sum of that step.
    desk = running("a", "b")
    done = desk.come("late")
    heal = done.only(m.Heal)["late"]
    assert (heal.step, heal.log_only) == (0, True)
    assert done.only(m.Pin) == {
        "a": m.Pin(heal.heal_id, m.Step(0), log_only=True),
        "b": m.Pin(heal.heal_id, m.Step(0), log_only=True),
    }
    desk.commit()
    assert members(desk) == ["a", "b", "late"]


# ---- waiting for groups that may bring a newer state ----


def unsettled(**options: float) -> Desk:
    """A job that is new to its coordinator."""
    return Desk.open(**{"founding_wait_s": 5.0, **options})


def test_a_first_group_founds_once_others_have_had_the_time_to_come():
    desk = unsettled()
    desk.come("a")
    assert desk.job.quorum is None
    desk.wait(4.9)
    assert desk.job.quorum is None
    desk.wait(0.2)
    assert members(desk) == ["a"]


def test_the_time_in_which_it_compiles_counts():
    desk = unsettled()
    desk.hello("a")
    desk.wait(5.1)
    desk.join("a")
    assert members(desk) == ["a"]


def test_by_default_it_waits_for_a_heartbeat_timeout():
    assert Options(heartbeat_timeout_s=3.0).newer_may_come_s == 3.0


def test_a_laggard_that_comes_first_does_not_take_the_job_back():
    # The coordinator has lost its store. The slow group's last quorum had three members, like the others'.
    desk = unsettled()
    desk.come("laggard", step=40, digest="40", history=HISTORY, members=3)
    desk.come("b", step=5000, digest="5000", history=HISTORY, members=3)
    assert desk.job.quorum is None
    desk.come("c", step=5000, digest="5000", history=HISTORY, members=3)
    assert (desk.step, members(desk)) == (5000, ["b", "c"])
    assert desk.group("laggard").phase is GroupPhase.HEALING


def test_where_all_have_come_back_nobody_waits():
    desk = unsettled()
    desk.come("a", step=7, digest="x", history=HISTORY, members=2)
    desk.come("b", step=7, digest="x", history=HISTORY, members=2)
    assert (desk.step, members(desk)) == (7, ["a", "b"])


def test_one_that_has_healed_to_the_state_says_nothing_of_those_who_took_part():
    desk = unsettled()
    desk.come("laggard", step=40, digest="40", history=HISTORY, members=2)
    desk.come("healed", step=40, digest="40", history=HISTORY)
    assert desk.job.quorum is None
    desk.come("b", step=5000, digest="5000", history=HISTORY, members=2)
    assert (desk.step, members(desk)) == (5000, ["b"])


def test_members_of_a_first_quorum_wait_for_those_who_may_have_gone_on_without_them():
    # The coordinator has lost its store. Of a, b and c, which had started together, c has committed alone since.
    desk = unsettled()
    desk.come("a", members=3)
    desk.come("b", members=3)
    desk.come("new")
    assert desk.job.quorum is None
    desk.come("c", step=5, digest="x", history=HISTORY, members=1)
    desk.wait(5.2)
    assert (desk.step, members(desk)) == (5, ["c"])
    assert {desk.group(name).phase for name in ("a", "b", "new")} == {GroupPhase.HEALING}


def test_one_that_is_busy_and_holds_a_committed_state_is_waited_for():
    desk = unsettled(join_timeout_s=8.0)
    desk.hello("busy", step=5, history=HISTORY)
    desk.come("new")
    for _ in range(40):
        desk.wait(1.0)
    assert desk.job.quorum is None
    assert desk.job.waiting.endswith("; busy holds step 5 of a run that must not be lost")
    desk.join("busy", step=5, history=HISTORY)
    assert (desk.step, members(desk), desk.group("new").phase) == (5, ["busy"], GroupPhase.HEALING)


def test_one_that_was_seen_with_a_committed_state_is_given_time_to_dial_again():
    desk = unsettled()
    desk.come("new")
    desk.come("old", step=5, history=HISTORY)
    desk.wait(4.5)
    desk.close("old")
    desk.wait(4.5)
    assert desk.job.quorum is None
    desk.wait(1.0)
    assert members(desk) == ["new"]


def test_what_a_corrupt_group_holds_is_not_waited_for():
    desk = running("a", "b", "c")
    desk.votes(a=1, b=1, c=2)
    desk.hello("c", step=0, history=HISTORY)
    assert desk.group("c").history == 0


def test_each_newer_state_gives_its_peers_the_time_to_come():
    desk = unsettled()
    desk.come("a", step=6, digest="x", history=HISTORY, members=3)
    desk.wait(4.0)
    desk.come("b", step=7, digest="y", history=HISTORY, members=3)
    desk.wait(4.0)
    assert desk.job.quorum is None
    desk.wait(1.2)
    assert (desk.step, members(desk)) == (7, ["b"])


def test_one_of_another_history_is_refused_instead_of_overwritten():
    desk = unsettled()
    desk.come("other", step=50, digest="y", history=0xABC, members=1)
    desk.come("a", step=100, digest="x", history=HISTORY, members=1)
    desk.wait(5.2)
    assert members(desk) == ["a"]
    assert "other" not in desk.job.groups


@pytest.mark.parametrize("step", [0, 100])
def test_the_first_state_of_another_history_is_not_refused_at_the_founding(step: int):
    """Its founding was forgotten before any commit, as by a coordinator that has lost its memory: nothing is lost."""
    desk = unsettled()
    desk.come("old", step=0, digest="y", history=0xABC, members=2)
    for name in ("a", "b", "c"):
        desk.come(name, step=step, digest="x", history=HISTORY, members=3)
    if not members(desk):
        desk.wait(5.2)
    assert members(desk) == ["a", "b", "c"]
    assert desk.group("old").history == 0
    assert desk.group("old").phase is GroupPhase.HEALING


# ---- waiting for the others ----


def test_the_founding_waits_for_groups_that_are_present_but_still_compile():
    desk = Desk.open()
    desk.hello("slow")
    desk.come("a")
    assert desk.job.quorum is None
    desk.join("slow")
    assert members(desk) == ["a", "slow"]


def test_a_group_that_dies_while_it_compiles_is_waited_for_no_longer():
    desk = Desk.open()
    desk.hello("slow")
    desk.come("a")
    desk.close("slow")
    assert members(desk) == ["a"]


def test_the_join_timeout_ends_the_wait_for_those_who_compile():
    desk = Desk.open(join_timeout_s=2.0)
    desk.hello("slow")
    desk.wait(5.0)
    desk.come("a")
    desk.wait(1.9)
    assert desk.job.quorum is None
    desk.wait(0.2)
    assert members(desk) == ["a"]
    assert desk.group("slow").phase is GroupPhase.PRESENT


def test_the_join_timeout_never_overrides_min_replicas():
    desk = Desk.open(join_timeout_s=1.0, min_replicas=2)
    desk.come("a")
    desk.wait(5.0)
    assert desk.job.quorum is None


def test_an_unmet_min_replicas_is_told_and_goes_on_by_itself():
    desk = Desk.open(min_replicas=3)
    desk.hello("c")
    desk.come("a")
    desk.come("b")
    heard = desk.tick().only(m.Waiting)
    assert sorted(heard) == ["a", "b", "c"]
    text = "2 of at least 3 groups have joined (a, b); present but not ready yet: c"
    assert {waiting.reason for waiting in heard.values()} == {text}
    assert desk.tick().only(m.Waiting) == {}
    assert sorted(desk.join("c").only(m.NewQuorum)) == ["a", "b", "c"]


def test_arrivals_cost_messages_by_their_number_not_by_its_square():
    desk = Desk.open(min_replicas=300)
    effects = 0
    for i in range(299):
        effects += len(desk.hello(f"g{i}").effects) + len(desk.join(f"g{i}").effects)
    assert effects < 1500


def test_min_replicas_of_a_join_overrides_the_coordinators():
    desk = Desk.open(min_replicas=1)
    desk.come("a", min_replicas=2)
    assert desk.job.quorum is None
    desk.come("b", min_replicas=2)
    assert members(desk) == ["a", "b"]


# ---- settings ----


def test_different_settings_are_refused_with_what_differs():
    desk = Desk.open(min_replicas=2)
    desk.come("a", shards=6, settings={"program": "abc", "layout": "same"})
    desk.hello("b")
    done = desk.join(
        "b", shards=8, settings={"program": "xyz", "layout": "same", "extra": "1"}, min_replicas=5
    )
    (refused,) = done.to("b")
    assert isinstance(refused, m.Refused)
    assert refused.reason == "group 'b' differs from job 'job' in: extra, min_replicas, program, shards"
    assert refused.differences == (
        m.Difference("extra", "-", "1"),
        m.Difference("min_replicas", "2", "5"),
        m.Difference("program", "abc", "xyz"),
        m.Difference("shards", "6", "8"),
    )
    assert done.closed == ["b"]
    assert "b" not in desk.job.groups


def test_a_higher_step_than_the_jobs_looks_like_another_run():
    desk = running("a")
    (refused,) = desk.come("b", step=7).to("b")
    assert isinstance(refused, m.Refused)
    assert "group 'b' holds step 7, but job 'job' is only at step 0" in refused.reason
    assert "give it another job name" in refused.reason


@pytest.mark.parametrize("wrong", [0, 65537, 10**12, 2**64 - 1])
def test_a_wrong_number_of_shards_is_refused(wrong: int):
    desk = Desk.open()
    (refused,) = desk.come("a", shards=wrong).to("a")
    assert isinstance(refused, m.Refused)
    assert 'the setting shards must be "members" or a number from 1 to 65536, not ' in refused.reason
    assert refused.reason.endswith(f"not {wrong}")


@pytest.mark.parametrize("wrong", [0, 65537, 2**32 - 1])
def test_a_wrong_weight_is_refused(wrong: int):
    desk = Desk.open()
    (refused,) = desk.come("a", weight=wrong).to("a")
    assert isinstance(refused, m.Refused)
    assert (
        refused.reason == f"the weight of a group is the number of its devices, from 1 to 65536, not {wrong}"
    )


def test_shards_are_dealt_by_weight():
    desk = Desk.open()
    for name, weight in {"a": 4, "b": 2}.items():
        desk.come(name, shards=6, weight=weight, min_replicas=2)
    assert shards(desk.quorum) == {"a": (0, 1, 2, 3), "b": (4, 5)}
    assert [member.weight for member in desk.quorum.members] == [4, 2]


def test_a_group_that_comes_back_with_other_devices_is_dealt_by_these():
    desk = running("a", "b", "c")
    assert shards(desk.quorum) == {"a": (0, 1), "b": (2, 3), "c": (4, 5)}
    desk.commit()
    desk.close("b")
    desk.commit()
    desk.come("b", incarnation=2, weight=4)
    desk.ready("b")
    desk.commit()
    assert shards(desk.quorum) == {"a": (0,), "b": (1, 2, 3, 4), "c": (5,)}
    desk.close("c")
    # Members keep the shards that they have computed. The slower one would now end with two, the faster one with
    # five.
    assert shards(desk.quorum) == {"a": (0,), "b": (1, 2, 3, 4, 5)}


def test_by_members_each_brings_one_shard_of_its_own():
    desk = running("a", "b", "c", shards=None)
    assert desk.quorum.total_shards == 3
    assert shards(desk.quorum) == {"a": (0,), "b": (1,), "c": (2,)}
    desk.close("b")
    assert desk.quorum.total_shards == 2
    assert shards(desk.quorum) == {"a": (0,), "c": (1,)}


# ---- ids, and more than one job ----


def test_quorum_ids_grow_beyond_what_any_group_has_seen():
    desk = _present("a", "b")
    desk.join("a", last_quorum_id=17)
    desk.join("b", last_quorum_id=4)
    assert desk.quorum.quorum_id == 18
    desk.come("c", digest="x", last_quorum_id=40)
    desk.close("b")
    assert desk.quorum.quorum_id == 41


# ---- a founding that fails ----


def test_a_job_without_groups_and_without_a_commit_may_be_forgotten():
    desk = running("a")
    assert not desk.job.empty
    desk.close("a")
    assert desk.job.empty


def test_a_job_with_a_committed_step_is_never_forgotten():
    desk = running("a")
    desk.commit()
    desk.close("a")
    assert not desk.job.empty


def test_if_the_founders_die_before_the_first_commit_others_at_that_step_found_anew():
    desk = running("a")
    desk.hello("b")
    desk.close("a")
    assert desk.job.quorum is None
    done = desk.join("b", digest="of another seed")
    assert sorted(done.only(m.NewQuorum)) == ["b"]


def test_a_fresh_state_never_replaces_a_restored_one_whose_keeper_died():
    desk = Desk.open()
    desk.come("a", step=100)
    desk.hello("b")
    desk.close("a")
    desk.join("b", step=0)
    assert desk.job.quorum is None
    desk.come("a", step=100, incarnation=2)
    assert members(desk) == ["a"]
    assert desk.group("b").phase is GroupPhase.HEALING


def _present(*names: str) -> Desk:
    desk = Desk.open()
    for name in names:
        desk.hello(name)
    return desk
