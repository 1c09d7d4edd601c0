"""Assign shards to members: pure arithmetic, in a separate module so that it can be verified separately.

There are two rules. At a step boundary every member gets one contiguous range of shards, and the lengths differ by at
most one. Whole subtrees of the summation tree then tend to be with one member, which sends fewer partial sums. When a
step is retried, living members keep their shards, because they have computed them, and only the missing shards are
assigned.
"""

from collections.abc import Mapping, Sequence

Shards = tuple[int, ...]


def at_boundary(total_shards: int, members: Sequence[str]) -> dict[str, Shards]:
    """Assign `total_shards` to `members`, in order, as contiguous ranges of nearly equal length."""
    base, extra = divmod(total_shards, len(members))
    assigned: dict[str, Shards] = {}
    start = 0
    for position, member in enumerate(members):
        stop = start + base + (1 if position < extra else 0)
        assigned[member] = tuple(range(start, stop))
        start = stop
    return assigned


def after_loss(total_shards: int, members: Sequence[str], held: Mapping[str, Shards]) -> dict[str, Shards]:
    """Keep the shards that `members` hold, and assign the missing ones to the members with the fewest.

    `held` may name members that are gone; their shards are missing. Ties go to the earlier member.
    """
    assigned = {member: held.get(member, ()) for member in members}
    taken = {shard for shards in assigned.values() for shard in shards}
    for shard in range(total_shards):
        if shard in taken:
            continue
        poorest = min(members, key=lambda member: len(assigned[member]))
        assigned[poorest] = (*assigned[poorest], shard)
    return {member: tuple(sorted(shards)) for member, shards in assigned.items()}
