"""A quorum on the wire: complete, or as the changes since the last one on the same stream.

A quorum of a thousand members is 60 KB. If a member dies, sending a thousand messages of that size to remove one
name is wasteful. A stream is ordered, so both ends know its last quorum, and the next one is sent as the difference:
who is gone, who is new, and which rule assigns the shards. Both ends assign them with the same pure functions.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from jaxft_protocol import messages as m
from jaxft_protocol.coordinator import assign
from jaxft_protocol.coordinator.sessions import MAX_SHARDS
from jaxft_protocol.names import natural_key
from jaxft_protocol.proto import coordinator_pb2 as pb

Shards = Mapping[str, tuple[int, ...]]
Weights = Mapping[str, int]
Deal = Callable[[int, Weights, Shards], Shards]


class UnknownBase(ValueError):
    """A quorum was sent as the difference to a base that is not the last quorum on this stream."""


def to_proto(quorum: m.NewQuorum, base: m.NewQuorum | None) -> pb.NewQuorum:
    """Return `quorum` as the difference to `base`, the last quorum on the stream; complete if `base` is None."""
    message = pb.NewQuorum(
        quorum_id=quorum.quorum_id,
        step=quorum.step,
        total_shards=quorum.total_shards,
        joined=[pb.Change(group=change.group, reason=change.reason) for change in quorum.joined],
        left=[pb.Change(group=change.group, reason=change.reason) for change in quorum.left],
        history=quorum.history,
    )
    rule = None if base is None else _rule_of(quorum, base)
    if base is None or rule is None:
        message.members.extend(member_to_proto(member) for member in quorum.members)
        return message
    before = {member.group: member for member in base.members}
    names = {member.group for member in quorum.members}
    message.base_quorum_id = base.quorum_id
    message.dealt = rule
    message.gone.extend(name for name in before if name not in names)
    message.members.extend(
        member_to_proto(replace(member, shards=()))
        for member in quorum.members
        if not _is_same(before.get(member.group), member)
    )
    return message


def from_proto(message: pb.NewQuorum, base: m.NewQuorum | None) -> m.NewQuorum:
    """Return the quorum that a message describes, on a stream whose last quorum is `base`.

    Raises:
        UnknownBase: the message is the difference to another quorum.
    """
    members = tuple(member_from_proto(member) for member in message.members)
    if message.base_quorum_id:
        members = _merged(message, members, base)
    return m.NewQuorum(
        m.QuorumId(message.quorum_id),
        m.Step(message.step),
        message.total_shards,
        members,
        tuple(m.Change(m.GroupName(change.group), change.reason) for change in message.joined),
        tuple(m.Change(m.GroupName(change.group), change.reason) for change in message.left),
        m.HistoryId(message.history),
    )


def member_to_proto(member: m.Member) -> pb.Member:
    return pb.Member(
        group=member.group,
        incarnation=member.incarnation,
        address=member.address,
        shards=member.shards,
        weight=member.weight,
    )


def member_from_proto(member: pb.Member) -> m.Member:
    return m.Member(
        m.GroupName(member.group),
        m.Incarnation(member.incarnation),
        member.address,
        tuple(member.shards),
        member.weight or 1,
    )


def _at_boundary(total_shards: int, weights: Weights, _held: Shards) -> Shards:
    return assign.at_boundary(total_shards, weights)


def _one_each(_total_shards: int, weights: Weights, _held: Shards) -> Shards:
    return {name: (position,) for position, name in enumerate(weights)}


_RULES: dict[pb.NewQuorum.Dealt, Deal] = {
    pb.NewQuorum.AT_BOUNDARY: _at_boundary,
    pb.NewQuorum.AFTER_LOSS: assign.after_loss,
    pb.NewQuorum.ONE_EACH: _one_each,
}


def _rule_of(quorum: m.NewQuorum, base: m.NewQuorum) -> pb.NewQuorum.Dealt | None:
    """Return the rule that assigns the shards; None if no rule gives this assignment."""
    names: list[str] = [member.group for member in quorum.members]
    if names != sorted(names, key=natural_key):
        return None
    dealt = _held(quorum)
    weights: Weights = {str(member.group): member.weight for member in quorum.members}
    for rule, deal in _RULES.items():
        if deal(quorum.total_shards, weights, _held(base)) == dealt:
            return rule
    return None


def _merged(
    message: pb.NewQuorum, changed: tuple[m.Member, ...], base: m.NewQuorum | None
) -> tuple[m.Member, ...]:
    if base is None or base.quorum_id != message.base_quorum_id:
        carried = "none" if base is None else f"quorum {base.quorum_id}"
        raise UnknownBase(
            f"quorum {message.quorum_id} was sent as the difference to quorum {message.base_quorum_id}, but the last "
            f"quorum on this stream was {carried}"
        )
    gone = set(message.gone)
    found = {member.group: member for member in base.members if member.group not in gone}
    found |= {member.group: member for member in changed}
    names = sorted(found, key=natural_key)
    deal = _RULES.get(message.dealt)
    if deal is None or not names or message.total_shards > MAX_SHARDS:
        raise UnknownBase(
            f"quorum {message.quorum_id} assigns {message.total_shards} shards to {len(names)} members by rule "
            f"{message.dealt}: this version of jaxft does not support that"
        )
    weights = {str(name): found[name].weight for name in names}
    dealt = deal(message.total_shards, weights, _held(base))
    return tuple(replace(found[name], shards=dealt[name]) for name in names)


def _held(quorum: m.NewQuorum) -> Shards:
    return {member.group: member.shards for member in quorum.members}


def _is_same(before: m.Member | None, member: m.Member) -> bool:
    """Compare everything except the shards."""
    if before is None:
        return False
    return (before.incarnation, before.address, before.weight) == (
        member.incarnation,
        member.address,
        member.weight,
    )
