"""Who computes which shard: pure arithmetic, on its own so that it can be proved on its own.

Two rules. At a step boundary every member gets one contiguous run of shards, runs differing by at most one in
length: whole subtrees of the summation tree then tend to lie with one member, which sends fewer partial sums.
When a step is tried again, whoever lives keeps what it has (it has computed it already) and only the missing
shards are dealt out.
"""

from collections.abc import Mapping, Sequence

Shards = tuple[int, ...]


def at_boundary(total_shards: int, members: Sequence[str]) -> dict[str, Shards]:
    """Deal `total_shards` to `members`, in order, as contiguous runs of nearly equal length."""
    base, extra = divmod(total_shards, len(members))
    assigned: dict[str, Shards] = {}
    start = 0
    for position, member in enumerate(members):
        stop = start + base + (1 if position < extra else 0)
        assigned[member] = tuple(range(start, stop))
        start = stop
    return assigned


def after_loss(total_shards: int, members: Sequence[str], held: Mapping[str, Shards]) -> dict[str, Shards]:
    """Keep what `members` hold of a step and deal the missing shards to those with the fewest.

    `held` may name members that are gone; their shards are among the missing. Ties go to the earlier member.
    """
    assigned = {member: held.get(member, ()) for member in members}
    taken = {shard for shards in assigned.values() for shard in shards}
    for shard in range(total_shards):
        if shard in taken:
            continue
        poorest = min(members, key=lambda member: len(assigned[member]))
        assigned[poorest] = (*assigned[poorest], shard)
    return {member: tuple(sorted(shards)) for member, shards in assigned.items()}
