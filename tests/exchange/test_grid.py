"""Exchanges of large quorums, in rows and columns: the bits of an exchange at once."""

import itertools
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._arrays._memory import leaves_of, result_regions
from jaxft._exchange import _compiled, _grid
from jaxft._exchange._grid import Grid, Rounds
from jaxft._exchange._grid_links import GridLinks, exchange_over
from jaxft._exchange._lane import Task
from jaxft._exchange._links import Links
from jaxft._exchange._patience import Patience
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import Abort
from tests import patience

from .members import BIG, MIXED, assert_same_bits, partials_of, peers_of, reference_means, together
from .single_thread import cut_into


@contextmanager
def grid_of(shards: Sequence[Sequence[int]]) -> Iterator[list[GridLinks]]:
    """The connections of every member of a grid, in memory."""
    grid, peers = Grid.of(len(shards)), peers_of(shards)
    ends: list[dict[int, Connection]] = [{} for _ in shards]

    def connect(one: int, other: int) -> None:
        if other not in ends[one]:
            ends[one][other], ends[other][one] = map(Connection.plain, socket.socketpair())

    def links(me: int, numbers: Sequence[int], abort: Abort) -> Links:
        mine = {place: ends[me][number] for place, number in enumerate(numbers) if number != me}
        return Links(
            job="job",
            quorum_id=4,
            me=numbers.index(me),
            members=[peers[number] for number in numbers],
            connections=mine,
            abort=abort,
        )

    for me in range(len(shards)):
        for other in {*grid.row_of(me), *grid.column_of(me)} - {me}:
            connect(me, other)
    made: list[GridLinks] = []
    for me in range(len(shards)):
        abort, column = Abort(), grid.column_of(me)
        row = links(me, grid.row_of(me), abort)
        held = tuple(tuple(each) for each in shards)
        made.append(GridLinks(grid, me, held, row, links(me, column, abort) if column else None))
    try:
        yield made
    finally:
        for one in made:
            one.close()


def exchanged(layout: Layout, shards: Sequence[Sequence[int]], links: Sequence[GridLinks]) -> list[object]:
    total = sum(map(len, shards))

    def run(one: GridLinks, mine: Sequence[int]) -> list[object]:
        task = Task(layout, 11, partials_of(layout, total, mine), result_regions(layout))
        exchange_over(one, task, total, lambda later_s: Patience(patience.FAR_S + later_s))
        return leaves_of(layout, task.result)

    return together([lambda one=one, mine=mine: run(one, mine) for one, mine in zip(links, shards, strict=True)])


def dealt(members: int, total: int) -> list[list[int]]:
    """Neighbouring shards, as at a step's boundary."""
    ends = [total * member // members for member in range(members + 1)]
    return [list(range(start, stop)) for start, stop in itertools.pairwise(ends)]


@pytest.mark.parametrize("by", ["python", "compiled"])
@pytest.mark.parametrize(("members", "total"), [(4, 4), (5, 5), (7, 11), (9, 4), (12, 12), (13, 16)])
def test_a_grid_gets_the_bits_of_one_process(
    members: int, total: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "python":
        monkeypatch.setattr(_compiled, "library", lambda: None)
    shards = dealt(members, total)
    with grid_of(shards) as links:
        for specs in (MIXED, BIG, MIXED):
            for means in exchanged(Layout.of(specs), shards, links):
                assert_same_bits(means, reference_means(specs, total))
