"""Who sums what in a large quorum: an exchange in rows and columns.

Where everyone is connected to everyone, connections, frames and system calls of a member grow with the number of
members. From 48 members on, they stand in a grid of about as many rows as columns, in the order of the
quorum, and each is connected to its row and its column alone: to 62 of 1,000. An exchange takes three rounds:

1. Within a row, each member reduces one slice: it sums the row's contributions to it, up to the nodes of the tree
   that the row holds together.
2. A column has the members with the same slice, one of each row. They exchange these nodes, as a small quorum
   exchanges contributions, and have the results of the slice.
3. Within a row, each member sends the results of its slice to the others.

The bits are the same as in an exchange at once: a row sums along the same tree, and stops at its nodes. The bytes are
nearly the same too: (r - 1) / r of a contribution in each direction within a row of r members, twice, and its r-th
part within the column.
Neighbours in the quorum have neighbouring shards, so a row holds few nodes; after a loss, they may be more.

A member in a later round may wait for a peer that is in an earlier one, whose bytes it does not see. So while bytes
of a round move, members say so to those who may wait for them (`_grid_links.py`), and these are patient.

Rows differ in length by one at most. There are as many columns as the shortest row is long, so the last member of a
longer row has no slice: it only contributes and receives.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxft._arrays._layout import Layout
from jaxft._exchange import _plan
from jaxft._exchange._plan import CHUNK_BYTES, Chunk, Plan, check_dealt, chunk_limit_bytes, cut, part_of
from jaxft._exchange._tree import Node, cover


@dataclass(frozen=True, slots=True)
class Grid:
    """The members of a quorum, by their numbers, in rows.

    Attributes:
        rows: the members of each row.
        columns: how many columns there are; the members of longer rows beyond them have none.
    """

    rows: tuple[tuple[int, ...], ...]
    columns: int

    @staticmethod
    def of(members: int) -> "Grid":
        count = math.isqrt(members)
        ends = [members * row // count for row in range(count + 1)]
        rows = tuple(tuple(range(start, stop)) for start, stop in pairwise(ends))
        return Grid(rows, min(map(len, rows)))

    def row_of(self, member: int) -> tuple[int, ...]:
        return next(row for row in self.rows if member in row)

    def column_of(self, member: int) -> tuple[int, ...]:
        """The members of a member's column; none if it has no column."""
        position = self.row_of(member).index(member)
        return tuple(row[position] for row in self.rows) if position < self.columns else ()


@dataclass(frozen=True, slots=True)
class Rounds:
    """The three rounds of one member, or of one strand of its exchange.

    Attributes:
        sums: within its row.
        means: within its column; None without one.
        results: within its row.
        slices: for each region, where the slice that it reduces begins and ends.
    """

    sums: Plan
    means: Plan | None
    results: Plan
    slices: tuple[tuple[int, int], ...]

    @staticmethod
    def of(  # noqa: PLR0913 (the arguments of `Plan.of`, and where a member stands)
        grid: Grid,
        me: int,
        layout: Layout,
        shards: Sequence[Sequence[int]],
        total: int,
        strand: int = 0,
        strands: int = 1,
    ) -> "Rounds":
        """Divide an exchange. The arguments: as for `Plan.of`, and the number of this member."""
        check_dealt(shards, total)
        row, parts = grid.row_of(me), grid.columns * strands
        nodes = tuple(cover(shards[member], total) for member in row)
        held = _nodes_of(row, shards, total)
        slices = [position * strands + strand for position in range(grid.columns)]
        nothing = ((),) * (len(row) - grid.columns)  # of those without a slice

        def chunks(limit_bytes: int) -> tuple[tuple[Chunk, ...], ...]:
            return (*(cut(layout, part, parts, limit_bytes) for part in slices), *nothing)

        position = row.index(me)
        own = [
            part_of(each, slices[position], parts) if position < grid.columns else (0, 0)
            for each in layout.regions
        ]
        sums = chunks(chunk_limit_bytes(nodes, 2 * strands)) if held else ((),) * len(row)
        return Rounds(
            sums=Plan(nodes, sums, one_trip=False, kept=held),
            means=_means(grid, slices[position], parts, layout, shards, total, strands)
            if position < grid.columns
            else None,
            results=Plan(((),) * len(row), chunks(CHUNK_BYTES), one_trip=False, kept=()),
            slices=tuple(own),
        )


def _means(  # noqa: PLR0913 (the arguments of `Plan.of`, and where a member stands)
    grid: Grid,
    part: int,
    parts: int,
    layout: Layout,
    shards: Sequence[Sequence[int]],
    total: int,
    strands: int,
) -> Plan:
    """The exchange of one slice within a column: each member contributes what its row has summed."""
    rows = len(grid.rows)
    nodes = tuple(_nodes_of(row, shards, total) for row in grid.rows)
    regions = [(each, part_of(each, part, parts)) for each in layout.regions]
    size_bytes = sum((stop - start) * region.item_bytes for region, (start, stop) in regions)
    if size_bytes * (rows - 1) <= _plan.ONE_TRIP_BYTES:
        everything = tuple(
            Chunk(number, start, stop - start)
            for number, (_, (start, stop)) in enumerate(regions)
            if stop > start
        )
        return Plan(nodes, (everything,) * rows, one_trip=True)
    limit_bytes = chunk_limit_bytes(nodes, 2 * strands)
    chunks = tuple(cut(layout, part * rows + row, parts * rows, limit_bytes) for row in range(rows))
    return Plan(nodes, chunks, one_trip=False)


def _nodes_of(row: Sequence[int], shards: Sequence[Sequence[int]], total: int) -> tuple[Node, ...]:
    """The nodes that the members of a row hold together."""
    return cover([shard for member in row for shard in shards[member]], total)
