"""Messages survive the wire, and long texts are cut."""

import pytest
from jaxft_protocol import wire
from jaxft_protocol.messages import (
    AllComputed,
    Commit,
    CoordinatorMessage,
    Drain,
    Drained,
    Evicted,
    Goodbye,
    GroupMessage,
    GroupName,
    Halted,
    HaltKind,
    Heal,
    HealFailed,
    HealId,
    Heartbeat,
    Hello,
    HistoryId,
    Incarnation,
    Join,
    Leave,
    Member,
    NewQuorum,
    Paused,
    Pin,
    QuorumId,
    Step,
    Stripe,
    Vote,
    Waiting,
    Welcome,
)
from jaxft_protocol.proto import coordinator_pb2 as pb


@pytest.mark.parametrize(
    "message",
    [
        Hello("job", GroupName("g"), Incarnation(2**63 - 1), "h:1", 0, 1),
        Hello("job", GroupName("g"), Incarnation(7), "h:1", term=1_790_000_000),
        Join(Step(3), 0, {"program": "x"}, QuorumId(9), 2, total_shards=4, weight=8),
        Vote(QuorumId(3), Step(2**40), ok=False, accused=(GroupName("x"), GroupName("y")), reason="why"),
        Vote(QuorumId(3), Step(2), ok=True),
        Vote(QuorumId(3), Step(2), ok=True, digest=0),  # a digest like any other, not none
        Vote(QuorumId(3), Step(2), ok=True, digest=2**64 - 1, nonfinite="w is nan"),
        Vote(QuorumId(3), Step(2), ok=False, reason="OSError: 17", raised=True, shard=0),
        Vote(QuorumId(3), Step(2), ok=False, reason="KeyboardInterrupt", raised=True),
        Join(Step(3), None, {}, history=HistoryId(2**63 - 1), spare=True),
        HealFailed(HealId(4), "no donor answers", Step(6), HistoryId(2**63 - 1)),
        Heartbeat(),
        Heartbeat(QuorumId(3), Step(2), away=True),
        Heartbeat(QuorumId(3), Step(2), moves=True),
        Leave(finished=True),
        Drain(),
    ],
)
def test_what_a_group_says_survives_the_wire(message: GroupMessage):
    data = wire.group_to_proto(message).SerializeToString()
    assert wire.group_from_proto(pb.GroupMessage.FromString(data)) == message


@pytest.mark.parametrize(
    "message",
    [
        Welcome(1000),
        Welcome(1000, Step(0), QuorumId(0)),
        Welcome(1000, Step(3), QuorumId(2), frontier_held=True),
        Commit(
            QuorumId(1),
            Step(0),
            NewQuorum(QuorumId(2), Step(1), 4, (Member(GroupName("a"), Incarnation(5), "a:1", (0, 3)),)),
        ),
        NewQuorum(QuorumId(2), Step(1), 4, (), history=HistoryId(2**63 - 1)),
        Pin(HealId(4), Step(1), log_only=True),
        Pin(HealId(4), Step(1), stripe=Stripe(0, 2)),
        Pin(HealId(4), Step(1), stripe=Stripe(3, 4)),
        Heal(
            HealId(4),
            Step(1),
            (Member(GroupName("a"), Incarnation(5), "a:1"),),
            log_only=True,
            history=HistoryId(7),
        ),
        Waiting("why"),
        Waiting("why", held=True, fresh=True),
        NewQuorum(QuorumId(2), Step(1), 1, (Member(GroupName("a"), Incarnation(5), "a:1", (0,), weight=8),)),
        Evicted("why", may_return=True),
        Evicted("away", may_return=True, aside=True),
        AllComputed(QuorumId(2**62), Step(7)),
        Goodbye(),
        Drained(),
        Paused(),
        Halted("why"),
        Halted("why", HaltKind.NONFINITE),
    ],
)
def test_what_the_coordinator_says_survives_the_wire(message: CoordinatorMessage):
    data = wire.coordinator_to_proto(message).SerializeToString()
    assert wire.coordinator_from_proto(pb.CoordinatorMessage.FromString(data)) == message


@pytest.mark.parametrize(("stripe", "stripes"), [(1, 0), (2, 2), (5, 2)])
def test_a_pin_of_a_stripe_that_is_none_is_refused(stripe: int, stripes: int):
    output = pb.CoordinatorMessage(pin=pb.Pin(heal_id=4, step=1, stripe=stripe, stripes=stripes))
    with pytest.raises(wire.WireError, match=f"a pin of stripe {stripe} of {stripes} keeps nothing"):
        wire.coordinator_from_proto(output)


@pytest.mark.parametrize(
    "message",
    [
        Vote(QuorumId(1), Step(0), ok=False, accused=(GroupName("b"),), reason="lost b; " * 2000),
        Vote(QuorumId(1), Step(0), ok=True, nonfinite="leaf" * 3000),
        HealFailed(HealId(4), "a: no answer; " * 1000, Step(6), HistoryId(1)),
    ],
)
def test_a_reason_of_any_length_reaches_the_coordinator(message: Vote | HealFailed):
    received = wire.group_from_proto(wire.group_to_proto(message))
    assert isinstance(received, Vote | HealFailed)
    whole = getattr(message, "nonfinite", "") or message.reason
    got = getattr(received, "nonfinite", "") or received.reason
    assert len(got) == wire.MAX_TEXT_LENGTH
    assert got == whole[: wire.MAX_TEXT_LENGTH - 3] + "..."


def test_a_pin_of_a_coordinator_that_knows_no_stripes_is_of_the_whole_state():
    output = pb.CoordinatorMessage(pin=pb.Pin(heal_id=4, step=1))
    assert wire.coordinator_from_proto(output) == Pin(HealId(4), Step(1), stripe=Stripe(0, 1))
