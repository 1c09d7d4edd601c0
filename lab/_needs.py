"""What a member of a large quorum needs, connected to all others or in rows and columns: from the plans alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._exchange._grid import Grid, Rounds
from jaxft._exchange._plan import CHUNK_BYTES, WINDOW, Plan, value_dtype


@dataclass(frozen=True)
class Needs:
    """What one member of a large quorum needs: the member that needs most.

    Attributes:
        connections: to other members.
        frames: that it sends in an exchange.
        scratch_mb: of memory for what others send it, and for sums of its row.
        senders: how many may send to it at the same time.
        waiting_mb: how much they may have on the way to it at the same time.
    """

    connections: int
    frames: int
    scratch_mb: float
    senders: int
    waiting_mb: float


def needs(groups: int, size_mb: int) -> dict[str, Needs]:
    """Of one of so many groups with one shard each, from the plans."""
    layout = Layout.of([LeafSpec("x", (size_mb * 500_000,), "bfloat16")])
    shards, grid = [(number,) for number in range(groups)], Grid.of(groups)
    whole = Plan.of(layout, shards, groups)
    found = {"all to all": _needs(layout, groups - 1, [(whole, 0)])}
    each: list[Needs] = []
    for me in (0, groups // 2, groups - 1):
        rounds, row = Rounds.of(grid, me, layout, shards, groups), grid.row_of(me)
        plans = [(rounds.sums, row.index(me)), (rounds.results, row.index(me))]
        if rounds.means is not None:
            plans.append((rounds.means, grid.rows.index(row)))
        each.append(_needs(layout, len({*row, *grid.column_of(me)}) - 1, plans))
    found["rows"] = max(each, key=lambda one: one.scratch_mb)
    return found


def _needs(layout: Layout, connections: int, plans: Sequence[tuple[Plan, int]]) -> Needs:
    """Over the rounds of one exchange; in each, this member has a number."""
    region = layout.regions[0]
    frames, scratch, senders, waiting = 0, 0.0, 0, 0.0
    for plan, me in plans:
        others = [number for number in range(len(plan.nodes)) if number != me]
        frames += sum(len(plan.chunks[other]) * len(plan.nodes[me]) for other in others)
        frames += len(plan.chunks[me]) * len(others) * plan.sends_results
        longest = max((chunk.size for chunk in plan.chunks[me]), default=0)
        nodes = [
            np.dtype(value_dtype(region, node)).itemsize for other in others for node in plan.nodes[other]
        ]
        scratch += min(WINDOW, len(plan.chunks[me])) * longest * sum(nodes)
        kept = [np.dtype(value_dtype(region, node)).itemsize for node in plan.kept or ()]
        scratch += sum(chunk.size for chunk in plan.chunks[me]) * sum(kept)
        senders = max(senders, len(others))
        to_me = sum(chunk.size for chunk in plan.chunks[me]) * region.sum_item_bytes
        waiting = max(waiting, len(others) * min(to_me, CHUNK_BYTES))
    return Needs(connections, frames, scratch / 1e6, senders, waiting / 1e6)
