"""Assign shards to members: pure arithmetic, in a separate module so that it can be verified separately.

A member's *weight* is its speed in computing a shard, relative to the others: the number of its devices. There are
two rules. At a step boundary every member gets one contiguous range of shards, as long as its weight allows if all
are to end together; with equal weights, the lengths differ by at most one. Whole subtrees of the summation tree
then tend to be with one member, which sends fewer partial sums. When a step is retried, living members keep their
shards, because they have computed them, and only the missing shards are assigned: to each member a run of them. Dealt
one by one, hardly any two of them would have a common node below the root, and a member would keep and send one
gradient for each.

In both, a shard goes to the member that would have computed it first (list scheduling: R. L. Graham, "Bounds on
multiprocessing timing anomalies", 1969). Shards are equal, so no other assignment ends earlier.
"""

import heapq
from collections.abc import Mapping, Sequence

Shards = tuple[int, ...]
MAX_WEIGHT = 65536
# From this many members on, they exchange in rows and columns (`jaxft/_exchange/_grid.py`). Measured: below, the
# additional rounds cost more than the connections that they save (docs/performance.md). All members, and the
# coordinator, must have the same number.
LEAST_MEMBERS = 48


def at_boundary(total_shards: int, weights: Mapping[str, int]) -> dict[str, Shards]:
    """Assign `total_shards` to the members that `weights` names, in its order, as contiguous ranges."""
    assigned: dict[str, Shards] = {}
    start = 0
    for member, length in zip(weights, _lengths(total_shards, tuple(weights.values())), strict=True):
        assigned[member] = tuple(range(start, start + length))
        start += length
    return assigned


def after_loss(
    total_shards: int, weights: Mapping[str, int], held: Mapping[str, Shards]
) -> dict[str, Shards]:
    """Keep the shards that the members hold, and give the missing ones, in runs, to the members that compute them
    first.

    `held` may name members that are gone; their shards are missing. Ties go to the earlier member.
    """
    kept = {member: held.get(member, ()) for member in weights}
    taken = {shard for shards in kept.values() for shard in shards}
    missing = [shard for shard in range(total_shards) if shard not in taken]
    lengths = _longer([len(shards) for shards in kept.values()], tuple(weights.values()), len(missing))
    assigned: dict[str, Shards] = {}
    start = 0
    for (member, shards), length in zip(kept.items(), lengths, strict=True):
        stop = start + length - len(shards)
        assigned[member] = tuple(sorted((*shards, *missing[start:stop])))
        start = stop
    return assigned


def _lengths(total_shards: int, weights: Sequence[int]) -> list[int]:
    # The first ones are known: no member gets less than its share, rounded down.
    together = sum(weights)
    lengths = [total_shards * weight // together for weight in weights]
    return _longer(lengths, weights, total_shards - sum(lengths))


def _longer(before: Sequence[int], weights: Sequence[int], more: int) -> list[int]:
    """The lengths once each of `more` shards has gone to the member that computes it first."""
    lengths = list(before)
    ends = [
        (_ends(length, weight), place)
        for place, (length, weight) in enumerate(zip(lengths, weights, strict=True))
    ]
    heapq.heapify(ends)
    for _ in range(more):
        _, place = ends[0]
        lengths[place] += 1
        heapq.heapreplace(ends, (_ends(lengths[place], weights[place]), place))
    return lengths


def _ends(length: int, weight: int) -> float:
    """When a member with `length` shards has computed one more.

    Exact enough to compare: up to 65536 shards and weights, different quotients are different floats.
    """
    return (length + 1) / weight
