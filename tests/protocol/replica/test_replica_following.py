"""Which coordinator a group follows, among several and over their lives; and when it joins."""

from dataclasses import replace

import pytest
from jaxft_protocol import messages as m
from jaxft_protocol.replica import machine
from jaxft_protocol.replica import state as r

from tests.protocol.replica.test_replica import REFUSES, Group, connected, voted, welcome, working

THREE = r.Identity("job", m.GroupName("a"), m.Incarnation(7), "a:1", "one:1, two:2,three:3")


def dialled(group: Group) -> r.Dial:
    (dial,) = (effect for effect in group.effects if isinstance(effect, r.Dial))
    return dial


def of_three() -> Group:
    group = Group()
    group.replica = replace(group.replica, identity=THREE)
    return group.on(r.Connected())


def test_of_several_coordinators_each_is_dialled_in_turn():
    group = of_three()
    dials: list[r.Dial] = []
    for _ in range(7):
        dials.append(dialled(group.on(r.Disconnected("stands by"))))
        group.on(r.Connected())
    assert [dial.address for dial in dials] == [
        "two:2", "three:3", "one:1", "two:2", "three:3", "one:1", "two:2"
    ]  # fmt: skip
    longest_s = [0.05, 0.05, 0.05, 0.1, 0.1, 0.1, 0.2]
    assert all(most / 2 < dial.delay_s <= most for dial, most in zip(dials, longest_s, strict=True))


def timed_out(*ends: str) -> tuple[r.FailureKind, str]:
    """How a group ends that was in its job, and whose dials to the three coordinators, in turn, end like this."""
    group = of_three().hear(welcome(term=3)).on(r.Disconnected("reset"))
    for end in ends:
        group.on(r.Connected())
        if end == REFUSES:
            group.hear(m.Refused("it does not know the token"))
        group.on(r.Disconnected(end))
    group.now_s = 60.1
    group.on(r.Tick())
    assert isinstance(group.directive, r.Fail)
    return group.directive.failure.kind, group.directive.failure.text


@pytest.mark.parametrize("others", [(), ("stands by",), ("stands by", "connection refused")])
def test_a_coordinator_that_refuses_the_group_is_not_gone_because_another_is(others: tuple[str, ...]):
    """Whichever of them is dialled last."""
    kind, text = timed_out("stands by", REFUSES, *others)
    assert kind is r.FailureKind.JOIN_REFUSED
    assert "it does not know the token" in text


def test_of_several_coordinators_the_one_that_has_refused_may_be_gone_since():
    kind, text = timed_out(REFUSES, "stands by", "stands by", "connection refused", "stands by")
    assert kind is r.FailureKind.COORDINATOR_UNREACHABLE
    assert "last: stands by" in text


def test_the_one_that_welcomed_is_dialled_first():
    group = of_three().on(r.Disconnected("stands by")).on(r.Connected()).hear(welcome(0))
    again = dialled(group.on(r.Disconnected("reset")))
    assert again.address == "two:2"
    assert again.delay_s <= 0.05
    assert dialled(group.on(r.Connected()).on(r.Disconnected("refused"))).address == "three:3"


def test_a_coordinator_of_a_lower_term_is_not_followed():
    group = of_three().hear(m.Welcome(1000, term=8)).on(r.Disconnected("reset")).on(r.Connected())
    group.hear(m.Welcome(1000, term=7))
    assert group.phase is r.Phase.GREETING
    (hang_up,) = (effect for effect in group.effects if isinstance(effect, r.Close))
    assert "term 7" in hang_up.reason
    assert "term 8" in hang_up.reason
    assert dialled(group.on(r.Disconnected(hang_up.reason))).address == "two:2"


def test_the_same_term_or_a_higher_one_is_followed():
    group = of_three()
    for term in (3, 3, 4):
        group.hear(m.Welcome(1000, term=term))
        assert group.phase is r.Phase.PRESENT
        assert group.replica.term == term
        group.on(r.Disconnected("reset")).on(r.Connected())


def test_a_greeting_without_an_answer_is_given_up():
    group = of_three()
    group.now_s = 4.9
    assert group.on(r.Tick()).effects == ()
    group.now_s = 5.1
    (hang_up,) = group.on(r.Tick()).effects
    assert hang_up == r.Close("no reply to our Hello for 5.1 s")
    group.now_s = 5.2
    assert group.on(r.Tick()).effects == ()  # once only; the stream ends next


def test_a_heartbeat_says_what_was_computed():
    group = working()
    group.now_s = 2.0
    assert group.on(r.Tick((m.QuorumId(1), m.Step(0)))).sent == [m.Heartbeat(m.QuorumId(1), m.Step(0))]


@pytest.mark.parametrize("group", [working(), voted()], ids=["working", "voted"])
def test_one_whose_training_thread_is_at_work_joins_when_that_waits(group: Group):
    group.on(r.Disconnected("reset", busy=True)).on(r.Connected()).hear(welcome(0))
    assert group.phase is r.Phase.PRESENT
    assert group.sent == []
    group.on(r.Idle())
    assert group.phase is r.Phase.JOINING
    assert [type(message) for message in group.sent] == [m.Join]


def test_one_whose_training_thread_compiles_joins_when_it_is_prepared_and_waits():
    group = (
        connected().hear(welcome()).on(r.Disconnected("reset", busy=True)).on(r.Connected()).hear(welcome())
    )
    group.on(r.Prepared(m.Step(0), 0xD1, total_shards=4))
    assert group.sent == []
    assert [type(message) for message in group.on(r.Idle()).sent] == [m.Join]


def test_a_commit_that_it_learns_of_by_the_welcome_is_applied_before_it_waits():
    group = voted().on(r.Disconnected("reset", busy=True)).on(r.Connected()).hear(welcome(1, quorum_id=1))
    assert group.directive == r.Apply(m.QuorumId(1), m.Step(0))
    group.on(r.Applied(m.Step(1)))
    assert (group.phase, group.sent) == (r.Phase.PRESENT, [])
    (join,) = group.on(r.Idle()).sent
    assert isinstance(join, m.Join)
    assert join.step == 1


def ticked(group: Group, until_s: float, every_s: float = 0.5) -> list[r.Close]:
    """Let time pass; return when the group closed its stream."""
    found: list[r.Close] = []
    while group.now_s < until_s:
        group.now_s += every_s
        found += [effect for effect in group.on(r.Tick()).effects if isinstance(effect, r.Close)]
    return found


def test_a_coordinator_that_says_nothing_more_is_given_up():
    group = working()
    assert ticked(group, 3.0) == []
    assert ticked(group, 4.0) == [r.Close("no message from the coordinator for 3.5 s")]
    assert ticked(group, 6.0) == []  # once only: the stream ends next


def test_one_that_leaves_does_not_come_back_because_the_coordinator_says_nothing_more():
    group = working().on(r.LeaveNow(finished=True))
    assert ticked(group, 4.0) == [r.Close("no message from the coordinator for 3.5 s")]
    assert group.phase is r.Phase.LEAVING
    group.on(r.Disconnected("no message from the coordinator for 3.5 s"))
    assert (group.phase, group.effects) == (r.Phase.LEFT, ())


def test_of_several_coordinators_one_that_says_nothing_more_is_not_dialled_again_first():
    group = of_three().hear(welcome(0))
    (_,) = ticked(group, 4.0)
    assert dialled(group.on(r.Disconnected("no message from the coordinator for 3.5 s"))).address == "two:2"


def test_one_that_stood_still_itself_reads_first_what_was_said_meanwhile():
    group = working()
    assert ticked(group, 1.0) == []
    assert ticked(group, 61.0, every_s=60.0) == []
    group.hear(m.Alive())
    assert ticked(group, 64.0) == []


def test_a_group_says_which_term_is_the_highest_that_it_has_met():
    replica = r.Replica(THREE, 10.0)
    heard: list[int] = []
    for event in (
        r.Connected(),
        r.Received(m.Welcome(1000, term=9)),
        r.Disconnected("gone"),
        r.Connected(),
        r.Received(m.Welcome(1000, term=4)),
        r.Disconnected("of a lower term"),
        r.Connected(),
    ):
        replica, effects = machine.step(replica, event, 1.0)
        heard += [e.message.term for e in effects if isinstance(e, r.Send) and isinstance(e.message, m.Hello)]
    assert heard == [0, 9, 9]
