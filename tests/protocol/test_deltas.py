"""A quorum sent as the difference to the one before decodes to the same quorum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxft_protocol import deltas, wire
from jaxft_protocol import messages as m
from jaxft_protocol.coordinator import assign
from jaxft_protocol.names import natural_key
from jaxft_protocol.proto import coordinator_pb2 as pb

Shards = dict[str, tuple[int, ...]]

names = st.sets(st.sampled_from([f"group-{i}" for i in range(14)]), min_size=1)
incarnations = st.dictionaries(st.sampled_from([f"group-{i}" for i in range(14)]), st.integers(1, 3))


weights = st.dictionaries(st.sampled_from([f"group-{i}" for i in range(14)]), st.sampled_from((2, 8, 65536)))


def quorum(
    quorum_id: int,
    shards: Shards,
    total: int,
    lives: dict[str, int] | None = None,
    weights: dict[str, int] | None = None,
) -> m.NewQuorum:
    members = [
        m.Member(
            m.GroupName(name),
            m.Incarnation((lives or {}).get(name, 1)),
            f"{name}.example:{29600}",
            shards[name],
            (weights or {}).get(name, 1),
        )
        for name in sorted(shards, key=natural_key)
    ]
    left = (m.Change(m.GroupName("gone"), "its connection closed"),)
    return m.NewQuorum(
        m.QuorumId(quorum_id), m.Step(7), total, tuple(members), members and (), left, m.HistoryId(2**63)
    )


def heard(new: m.NewQuorum, base: m.NewQuorum | None) -> tuple[m.NewQuorum, int]:
    """What arrives, and in how many bytes."""
    data = deltas.to_proto(new, base).SerializeToString()
    return deltas.from_proto(pb.NewQuorum.FromString(data), base), len(data)


def weighed(names: set[str] | list[str], weights: dict[str, int] | None = None) -> dict[str, int]:
    return {name: (weights or {}).get(name, 1) for name in sorted(names, key=natural_key)}


@given(
    names,
    names,
    incarnations,
    weights,
    weights,
    st.integers(1, 40),
    st.sampled_from(["boundary", "loss", "members", "odd"]),
)
def test_what_arrives_is_what_was_told(  # noqa: PLR0913 (drawn)
    before: set[str],
    after: set[str],
    lives: dict[str, int],
    weights_before: dict[str, int],
    weights: dict[str, int],
    total: int,
    dealt: str,
):
    shards = assign.at_boundary(total, weighed(before, weights_before))
    old = quorum(3, shards, total, weights=weights_before)
    in_order = weighed(after, weights)
    held = {member.group: member.shards for member in old.members}
    match dealt:
        case "boundary":
            shards = assign.at_boundary(total, in_order)
        case "loss":
            shards = assign.after_loss(total, in_order, held)
        case "members":
            shards, total = {name: (position,) for position, name in enumerate(in_order)}, len(in_order)
        case _:
            shards = {
                name: (0,) if position else tuple(range(1, total)) for position, name in enumerate(in_order)
            }
    new = quorum(4, shards, total, lives, weights)
    assert heard(new, old)[0] == new
    assert heard(new, None)[0] == new
    assert heard(old, None)[0] == old


def test_one_loss_among_a_thousand_is_told_in_a_few_hundred_bytes():
    names = [f"group-{i}" for i in range(1000)]
    base = quorum(3, assign.at_boundary(1000, weighed(names)), 1000)
    others = weighed([name for name in names if name != "group-500"])
    for shards in (
        assign.at_boundary(1000, others),
        assign.after_loss(1000, others, {member.group: member.shards for member in base.members}),
    ):
        new = quorum(4, shards, 1000)
        arrived, size_bytes = heard(new, base)
        assert arrived == new
        assert size_bytes < 200
        assert heard(new, None)[1] > 30_000


def test_members_that_are_not_in_order_are_all_listed():
    base = quorum(3, {"a": (0,), "b": (1,)}, 2)
    members = tuple(reversed(base.members))
    new = m.NewQuorum(m.QuorumId(4), m.Step(7), 2, members)
    assert heard(new, base)[0] == new


def test_the_difference_to_another_quorum_is_refused():
    base, other = quorum(3, {"a": (0,), "b": (1,)}, 2), quorum(2, {"a": (0,), "b": (1,)}, 2)
    message = pb.CoordinatorMessage(new_quorum=deltas.to_proto(quorum(4, {"a": (0, 1)}, 2), base))
    with pytest.raises(wire.WireError, match="to quorum 3, but the last quorum on this stream was quorum 2"):
        wire.coordinator_from_proto(message, other)
    with pytest.raises(wire.WireError, match="the last quorum on this stream was none"):
        wire.coordinator_from_proto(message)


@pytest.mark.parametrize(("total", "rule"), [(2**32 - 1, 1), (70_000, 2), (2, 9)])
def test_what_would_take_memory_or_is_unknown_is_refused(total: int, rule: int):
    base = quorum(3, {"a": (0,), "b": (1,)}, 2)
    message = pb.NewQuorum(quorum_id=4, step=7, total_shards=total, base_quorum_id=3)
    message.dealt = rule  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(deltas.UnknownBase, match="this version of jaxft does not support that"):
        deltas.from_proto(message, base)


def test_a_quorum_without_members_is_refused():
    base = quorum(3, {"a": (0,)}, 1)
    message = pb.NewQuorum(quorum_id=4, total_shards=1, base_quorum_id=3, gone=["a"], dealt="AT_BOUNDARY")
    with pytest.raises(deltas.UnknownBase):
        deltas.from_proto(message, base)


def test_a_commit_carries_the_next_quorum_as_a_difference():
    base, following = quorum(3, {"a": (0,), "b": (1,)}, 2), quorum(4, {"a": (0, 1)}, 2)
    commit = m.Commit(m.QuorumId(3), m.Step(6), following)
    message = wire.coordinator_to_proto(commit, base)
    assert message.commit.next.base_quorum_id == 3
    assert wire.coordinator_from_proto(message, base) == commit
    assert wire.quorum_of(commit) is following
