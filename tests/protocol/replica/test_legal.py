"""The table of legal events: it lists every event and message, and an event that is neither legal nor late raises."""

from typing import get_args

import pytest
from jaxft_protocol import messages as m
from jaxft_protocol.replica import legal
from jaxft_protocol.replica import state as r
from jaxft_protocol.replica.legal import RULES, IllegalEvent

from .test_replica import (
    Group,
    applying,
    commit,
    connected,
    failed,
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

LEAVING = working().on(r.LeaveNow(finished=False))
OUTCOME = r.Exchanged(m.QuorumId(1), m.Step(0))


def test_each_event_and_message_has_a_rule():
    assert set(RULES) == {*get_args(r.Event), *get_args(m.CoordinatorMessage)} - {r.Received}


@pytest.mark.parametrize("kind", RULES)
def test_what_is_late_is_not_legal_and_has_a_reason(kind: type):
    rule = RULES[kind]
    assert rule.legal
    assert not rule.legal & rule.late.keys()
    assert all(rule.late.values())


@pytest.mark.parametrize("phase", r.Phase)
def test_each_phase_can_be_left_for_good(phase: r.Phase):
    """When the stream ends, by timeout, and when the user leaves."""
    for kind in (r.Disconnected, r.LeaveNow):
        assert phase in RULES[kind].legal or phase is r.Phase.LEAVING


def test_without_a_stream_nothing_is_heard():
    heard = [RULES[kind] for kind in get_args(m.CoordinatorMessage)]
    assert not any(r.Phase.OFFLINE in rule.legal | rule.late.keys() for rule in heard)


def test_after_the_end_all_messages_are_late_but_those_that_free_something():
    for kind in get_args(m.CoordinatorMessage):
        rule = RULES[kind]
        for phase in (r.Phase.LEFT, r.Phase.FAILED):
            assert phase in rule.late or kind.__name__ in ("Alive", "Release")


ILLEGAL: dict[str, tuple[Group, r.Event, str]] = {
    "a commit without a vote": (
        working(),
        r.Received(commit(1, 0)),
        "Commit is illegal while the group is working",
    ),
    "a commit after a commit": (
        applying(),
        r.Received(commit(1, 0)),
        "Commit is illegal while the group is applying",
    ),
    "a commit of the vote that a new quorum took back": (
        voted().hear(quorum(2, 0, "a")),
        r.Received(commit(1, 0)),
        "Commit is illegal while the group is working",
    ),
    "a commit of another step": (
        voted(),
        r.Received(commit(1, 1)),
        "commit of step 1 in quorum 1 is illegal, because",
    ),
    "a commit of another quorum": (
        voted(),
        r.Received(commit(2, 0)),
        "commit of step 0 in quorum 2 is illegal",
    ),
    "a commit of a failed vote": (
        working().on(r.ExchangeBroke(m.QuorumId(1), m.Step(0), (), "b is gone")),
        r.Received(commit(1, 0)),
        "because this group has not voted ok",
    ),
    "a commit with an old quorum": (
        voted(),
        r.Received(commit(1, 0, quorum(1, 1))),
        "quorum 1 comes after quorum 1",
    ),
    "an old quorum": (working(2), r.Received(quorum(1, 0)), "quorum 1 comes after quorum 2"),
    "the same quorum again": (working(), r.Received(quorum(1, 0)), "quorum 1 comes after quorum 1"),
    "a quorum before the join": (
        connected().hear(welcome()),
        r.Received(quorum(1, 0)),
        "NewQuorum is illegal while the group is present",
    ),
    "a quorum during a heal": (healing(), r.Received(quorum(1, 3)), "NewQuorum is illegal while"),
    "a second welcome": (working(), r.Received(welcome()), "Welcome is illegal while the group is working"),
    "a state for a group that applies": (
        applying(),
        r.Received(heal(5, 3)),
        "Heal is illegal while the group is applying",
    ),
    "a frontier for a member": (
        working(),
        r.Received(m.FrontierMoved(m.Step(4))),
        "FrontierMoved is illegal while",
    ),
    "a pin for a group that holds nothing": (
        connected().hear(welcome()),
        r.Received(m.Pin(m.HealId(1), m.Step(0))),
        "Pin is illegal while the group is present",
    ),
    "a goodbye to a group that stays": (
        working(),
        r.Received(m.Goodbye()),
        "Goodbye is illegal while the group is working",
    ),
    "a message without a stream": (
        Group(),
        r.Received(welcome()),
        "Welcome is illegal while the group is offline",
    ),
    "a second stream": (working(), r.Connected(), "Connected is illegal while the group is working"),
    "a second vote": (
        voted(),
        OUTCOME,
        "outcome of step 0 in quorum 1 is illegal while the group is voted at step 0",
    ),
    "a vote on a quorum that it does not know": (
        working(),
        r.Exchanged(m.QuorumId(2), m.Step(0)),
        "outcome of step 0 in quorum 2 is illegal while the group is working at step 0 in quorum 1",
    ),
    "a vote on another step": (
        working(),
        r.Exchanged(m.QuorumId(1), m.Step(1)),
        "outcome of step 1 in quorum 1",
    ),
    "an uncommitted step is applied": (
        voted(),
        r.Applied(m.Step(1)),
        "Applied is illegal while the group is voted",
    ),
    "a state that comes from nowhere": (
        working(),
        r.Healed(m.HealId(5), m.Step(3)),
        "Healed is illegal while",
    ),
    "a sum that comes from nowhere": (
        voted(),
        r.Replayed(m.HealId(5), m.Step(3)),
        "Replayed is illegal while",
    ),
    "a heal that was not under way": (voted(), r.HealBroke(m.HealId(5), ""), "HealBroke is illegal while"),
    "another state in a step": (working(), r.Prepared(m.Step(9), 0xD1), "Prepared is illegal while"),
    "to leave twice": (LEAVING, r.LeaveNow(finished=False), "LeaveNow is illegal while the group is leaving"),
    "no event": (working(), "nonsense", "str is not an event"),  # pyright: ignore[reportAssignmentType]
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_cannot_happen_raises_and_leaves_the_group_as_it_was(name: str):
    group, event, text = ILLEGAL[name]
    before = group.replica
    with pytest.raises(IllegalEvent, match=text):
        group.on(event)
    assert group.replica is before


LATE: dict[str, tuple[Group, r.Event, str]] = {
    "an attempt whose stream was lost": (working().on(r.Disconnected("")), OUTCOME, "ended with its stream"),
    "an attempt from which it was relieved": (
        working().hear(heal(5, 3)),
        OUTCOME,
        "other groups replaced this group",
    ),
    "an attempt of an older quorum": (working(2), OUTCOME, "quorum 1 has been replaced by quorum 2"),
    "an attempt of a job that is over": (finished(), OUTCOME, "the job is over"),
    "a heal whose stream was lost": (
        healing().on(r.Disconnected("")),
        r.HealBroke(m.HealId(5), ""),
        "ended with its stream",
    ),
    "a heal that was abandoned": (healing(), r.HealBroke(m.HealId(4), ""), "heal 4 was abandoned"),
    "a commit that crosses Leave": (
        LEAVING,
        r.Received(m.Commit(m.QuorumId(1), m.Step(0))),
        "knew that this group leaves",
    ),
    "a heal after the end": (failed(), r.Received(heal(6, 3)), "stream has not ended yet"),
    "a heal after Goodbye": (
        finished().hear(m.Goodbye()),
        r.Received(heal(6, 3)),
        "stream has not ended yet",
    ),
    "a stream for a group that has left": (
        Group().on(r.LeaveNow(finished=False)),
        r.Connected(),
        "left while the stream",
    ),
    "a welcome to a group that has left": (
        connected().on(r.LeaveNow(finished=False)),
        r.Received(m.Welcome(1000)),
        "stream has not ended yet",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_was_overtaken_is_dropped_for_a_reason(name: str):
    group, event, text = LATE[name]
    assert text in legal.late(group.replica, event)
    before = group.phase
    assert group.on(event).sent == []
    assert group.phase is before


def test_a_message_that_is_dropped_is_still_a_sign_of_life():
    group = working().on(r.LeaveNow(finished=False))
    group.now_s = 3.0
    assert group.hear(quorum(2, 0)).replica.heard_s == 3.0


def test_a_heal_that_is_dropped_still_says_that_the_training_thread_waits():
    group = healing().on(r.Disconnected("", busy=True)).on(r.HealBroke(m.HealId(5), "overtaken"))
    assert not group.replica.busy


def test_founders_and_followers_are_called_up():
    assert joining().hear(quorum(1, 0)).phase is r.Phase.WORKING
    assert following().hear(quorum(1, 3)).phase is r.Phase.WORKING
