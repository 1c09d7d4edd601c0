"""Limits on a job's record: every record can be encoded, and none grows without a limit."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxft_coordinator.shell import limits
from jaxft_coordinator.stores import records
from jaxft_protocol import messages as m
from jaxft_protocol.coordinator import bounds, durable, machine
from jaxft_protocol.coordinator.job import Group, GroupPhase, Job, Options, SessionId
from jaxft_protocol.values import changed

from tests.protocol.coordinator.helpers import Desk, digest_of, members, running
from tests.stores import examples


def written(desk: Desk) -> int:
    """Return the size of the job's record, after checking that it decodes to the same job."""
    saved = durable.saved(desk.job)
    data = records.encode(saved)
    assert records.decode(data) == saved
    assert bounds.problem(saved) == ""
    return len(data)


# ---- places ----


def test_a_founder_that_leaves_before_any_quorum_gives_up_no_place():
    desk = Desk.open(min_replicas=2)
    for name in "ab":
        desk.hello(name)
    desk.join("a", digest="one")
    desk.join("b", digest="another")
    assert desk.group("a").phase is GroupPhase.MEMBER
    assert desk.job.quorum is None
    desk.leave("a", finished=True)
    assert desk.job.places == 0
    written(desk)


# ---- a record that cannot be encoded ----


def test_a_turn_that_cannot_be_written_down_does_not_happen():
    desk = running("a", "b")
    desk.job = changed(desk.job, places=0)  # as after a bug
    before = desk.job
    with pytest.raises(machine.Unwritable, match="places would be -1, not a whole number"):
        desk.leave("a", finished=True)
    assert desk.job is before


@given(examples.any_saved())
def test_what_the_core_lets_pass_can_be_written_and_read(record: Any):
    assert bounds.problem(record) == ""
    assert records.decode(records.encode(record)) == record
    saved = len(records.encode(record))
    assert bounds.saved_bytes(record) >= saved, "an estimate is no less than the written size"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"places": -1}, "places would be -1"),
        ({"places": True}, "places would be True"),
        ({"last_quorum_id": 1 << 64}, "last_quorum_id would be"),
        ({"history": 1.0}, "history would be 1.0"),
        ({"held": {"a": (0, -1)}}, "a would be -1"),
        ({"members": (("a", -2),)}, "a would be -2"),
        ({"settings": {"x": "\ud800"}}, "cannot be encoded as UTF-8"),
        ({"settings": {"x": "y" * bounds.MAX_RECORD_BYTES}}, "bytes, which exceeds the maximum of 1400000"),
        ({"job": "\udfff"}, "cannot be encoded as UTF-8"),
    ],
)
def test_the_core_refuses_what_could_not_be_read_again(changes: dict[str, Any], expected: str):
    job = changes.pop("job", "llama")
    record = examples.saved(job, **changes)
    assert expected in bounds.problem(record)


# ---- the length of a record ----


def test_a_group_with_too_much_to_remember_is_refused_with_what_to_do():
    desk = Desk.open()
    desk.hello("a")
    refused = desk.join("a", settings={"program": "x" * 70_000}).only(m.Refused)["a"]
    assert "the settings of group 'a' have 70013 bytes, which exceeds the maximum of 65536" in refused.reason
    assert desk.job.groups == {}
    assert desk.job.settings is None


LARGEST = m.Join(m.Step(0), None, total_shards=65536)


def test_the_largest_honest_job_fits():
    groups = limits.MAX_GROUPS_PER_JOB
    desk = Desk(crowd(groups, "replica-group-{:06}"))
    assert bounds.join_problem(desk.job, m.GroupName("replica-group-000000"), LARGEST) == ""
    assert written(desk) < bounds.MAX_RECORD_BYTES


def test_one_group_too_many_is_refused_while_the_others_go_on():
    crowded = crowd(700, "x" * 190 + "{:06}")
    desk = Desk(crowded, sessions={}, names={})
    name = "y" * 200
    desk.names.update({SessionId(number): "some" for number in range(1000)})
    desk.hello(name)
    refused = desk.join(name, step=1, shards=65536).only(m.Refused)[name]
    assert "would need" in refused.reason
    assert "use shorter group names, or fewer groups" in refused.reason
    assert len(desk.job.groups) == 700


def crowd(number: int, name: str) -> Job:
    """A job with every group in every list of its record."""
    job = Job("job", Options(), {}, 65536, 1)
    names = [m.GroupName(name.format(index)) for index in range(number)]
    groups = {
        each: Group(each, m.Incarnation((1 << 63) + at), SessionId(at), "h:1")
        for at, each in enumerate(names)
    }
    holders = frozenset(group.holder for group in groups.values())
    share = 65536 // number
    frontier = examples.saved(step=1).frontier
    assert frontier is not None
    return changed(
        job,
        groups=groups,
        sessions={group.session: each for each, group in groups.items()},
        proven=dict(holders),
        distrusted=holders,
        frontier=durable.replace(frontier, holders=holders),
        held={each: tuple(range(60_000, 60_000 + share)) for each in names},
        history=examples.HistoryId(11),
        last_quorum_id=m.QuorumId(1),
    )


# ---- groups that are gone ----


def test_what_is_remembered_of_groups_that_are_gone_has_a_bound(monkeypatch: pytest.MonkeyPatch):
    """One group after the other comes, shows that it holds the state, and leaves."""
    assert bounds.MAX_GONE_BYTES + 10_000 < bounds.MAX_RECORD_BYTES
    monkeypatch.setattr(bounds, "MAX_GONE_BYTES", 24 << 10)
    desk = Desk.open(min_replicas=2)
    desk.come("a", digest="d")
    desk.come("b", digest="other")
    longest = 0
    for number in range(300):
        name = f"{'g' * 150}-{number}"
        desk.come(name, digest="d", incarnation=number + 1)
        desk.close(name)
        desk.sessions.pop(name)
        if number % 100 == 99:
            longest = max(longest, written(desk))
    assert 300 * 150 > bounds.MAX_GONE_BYTES + 10_000 > longest
    assert desk.group("a").holder in desk.job.frontier.holders  # pyright: ignore[reportOptionalMemberAccess]
    assert len(desk.job.proven) > 50, "as many as fit are kept"


def test_those_who_are_here_and_those_who_take_part_are_never_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounds, "MAX_GONE_BYTES", 0)
    desk = running("a", "b")
    desk.commit()
    desk.close("b")
    desk.come("c", digest="fresh", incarnation=9)
    desk.ready("c")
    assert desk.job.proven == {"a": 1, "c": 9}
    desk.commit()
    assert members(desk) == ["a", "c"]


def test_a_group_that_was_forgotten_heals_and_its_history_still_counts():
    """Forgetting costs a heal. It never lets a fresh state replace a committed one."""
    desk = running("a", "b")
    desk.commit()
    desk.job = changed(desk.job, proven={"a": m.Incarnation(1)})  # as `forget` leaves it
    desk.close("b")
    desk.come("b", step=1, digest="", history=desk.job.history)
    assert desk.group("b").phase is GroupPhase.HEALING
    desk.close("b")
    desk.close("a")
    desk.job = changed(desk.job, proven={}, frontier=durable.replace(desk.job.frontier, holders=frozenset()))
    desk.come("b", step=1, digest="", history=desk.job.history)
    desk.wait(6.0)
    assert (members(desk), desk.step) == (["b"], 1)


def test_a_distrusted_one_is_forgotten_last_and_with_its_proof(monkeypatch: pytest.MonkeyPatch):
    old, new = ("old", m.Incarnation(1)), ("new", m.Incarnation(2))
    job = changed(
        running("a").job,
        proven={
            "a": m.Incarnation(1),
            "old": m.Incarnation(5),
            "new": m.Incarnation(2),
            "gone": m.Incarnation(3),
        },
        distrusted=frozenset({old, new}),
    )
    entry = bounds.entry_bytes(m.GroupName("old"))
    for room, proven, distrusted in (
        (10 * entry, {"a", "old", "new", "gone"}, {old, new}),
        (4 * entry, {"a", "gone"}, {old, new}),
        (entry, {"a", "old"}, {new}),  # another process has come in place of `old`
        (0, {"a"}, set[object]()),
    ):
        monkeypatch.setattr(bounds, "MAX_GONE_BYTES", room)
        kept = bounds.forget(job)
        assert set(kept.distrusted) == distrusted
        assert set(kept.proven) <= proven
        assert "a" in kept.proven


# ---- any sequence ----


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(["come", "leave", "close", "commit", "tick", "spare"])
        ),
        max_size=30,
    ),
    st.integers(1, 3),
)
def test_any_course_of_a_job_can_be_written_down(course: list[tuple[str, str]], least: int):
    """Groups that follow the protocol never cause a record that cannot be encoded."""
    desk = Desk.open(min_replicas=least)
    incarnation = 0
    for name, what in course:
        here = name in desk.job.groups
        if what in ("come", "spare") and not here:
            incarnation += 1
            step = m.Step(0) if desk.job.frontier is None else desk.job.frontier.step
            desk.hello(name, incarnation)
            desk.say(
                name,
                m.Join(
                    step, digest_of(name), history=desk.job.history, spare=what == "spare", total_shards=6
                ),
            )
        elif what == "leave" and here and desk.group(name).phase is not GroupPhase.LEAVING:
            desk.say(name, m.Leave(finished=True))
        elif what == "close" and here:
            desk.close(name)
        elif what == "commit" and desk.job.quorum is not None:
            for member in desk.quorum.members:
                if member.group in desk.job.groups and desk.job.quorum is not None:
                    desk.vote(member.group)
        elif what == "tick":
            halted = desk.tick(2.0).only(m.Halted).values()
            # Their states differ, so the job may halt for that once its holders are gone.
            assert all(each.kind is m.HaltKind.DIVERGED for each in halted)
        assert desk.job.places >= 0
        written(desk)
