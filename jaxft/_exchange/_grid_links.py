"""The connections of one member of a large quorum, to its row and its column, and its exchange over them."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxft_protocol.coordinator.assign import LEAST_MEMBERS

from jaxft._arrays._layout import Layout
from jaxft._arrays._memory import aligned_empty
from jaxft._exchange._exchange import exchange_into
from jaxft._exchange._grid import Grid, Rounds
from jaxft._exchange._links import Links, Peer, open_all
from jaxft._exchange._partials import Partials, Sliced
from jaxft._exchange._patience import LOOK_S, Patience
from jaxft._exchange._plan import Lane, Task, value_dtype
from jaxft._transport._listener import Connection, Listener
from jaxft._transport._sockets import Abort

_log = logging.getLogger("jaxft")

# In a later round a peer may be waiting for a member that this one is not connected to. The peers of that member
# notice first, and are to name it: each later round has this much more patience than the one before, as a part of
# the usual patience.
LATER_PATIENCE = 0.25

# Makes the limit on a time without progress, longer by a number of seconds.
MakePatience = Callable[[float], Patience]


def is_large(members: int) -> bool:
    """Whether a quorum of this size exchanges in rows and columns. All its members know the size."""
    return members >= LEAST_MEMBERS


def peers_of_each(members: int) -> int:
    """To how many others a member of a quorum is connected, at most."""
    if not is_large(members):
        return members - 1
    grid = Grid.of(members)
    return max(map(len, grid.rows)) + len(grid.rows) - 2


@dataclass
class GridLinks:
    """One member's connections for one strand, and the memory that its exchanges reuse.

    Attributes:
        grid: where all members stand.
        me: this member's number.
        shards: of all members.
        row: the connections to its row.
        column: those to its column; None without one.
    """

    grid: Grid
    me: int
    shards: tuple[tuple[int, ...], ...]
    row: Links
    column: Links | None = None
    _rounds: dict[tuple[str, int, int], tuple[Rounds, tuple[Sliced, ...]]] = field(
        default_factory=dict[tuple[str, int, int], tuple[Rounds, tuple[Sliced, ...]]], init=False
    )

    def rounds(self, layout: Layout, total_shards: int, strands: int) -> tuple[Rounds, tuple[Sliced, ...]]:
        """The rounds of this strand of an exchange, and memory for what its row sums; cached."""
        key = (layout.digest, total_shards, strands)
        if key not in self._rounds:
            rounds = Rounds.of(
                self.grid, self.me, layout, self.shards, total_shards, self.row.strand, strands
            )
            self._rounds[key] = rounds, _memory_for(rounds, layout)
        return self._rounds[key]

    @property
    def both(self) -> list[Links]:
        return [self.row] if self.column is None else [self.row, self.column]

    def all_connections(self) -> list[Connection]:
        return [connection for links in self.both for connection in links.all_connections()]

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for links in self.both:
            links.close()


AnyLinks = Links | GridLinks


def _memory_for(rounds: Rounds, layout: Layout) -> tuple[Sliced, ...]:
    firsts = tuple(start for start, _ in rounds.slices)
    kept: list[Sliced] = []
    for node in rounds.sums.kept or ():
        dtypes = [np.dtype(value_dtype(region, node)) for region in layout.regions]
        parts = [
            aligned_empty((stop - start) * dtype.itemsize).view(dtype)
            for (start, stop), dtype in zip(rounds.slices, dtypes, strict=True)
        ]
        kept.append(Sliced(firsts, tuple(parts)))
    return tuple(kept)


def open_links(  # noqa: PLR0913 (by name: those of `open_all`)
    listener: Listener,
    *,
    job: str,
    quorum_id: int,
    me: str,
    members: Sequence[Peer],
    abort: Abort,
    patience: Patience,
    lane: int = 0,
    strand: int = 0,
    before: AnyLinks | None = None,
) -> AnyLinks:
    """Connect to the other members of a quorum: to all, or in a large one to this member's row and column.

    The arguments and the errors: as of `open_all`.
    """
    number = [peer.group for peer in members].index(me)
    grid = Grid.of(len(members)) if is_large(len(members)) else None
    parts = [range(len(members))] if grid is None else [grid.row_of(number), grid.column_of(number)]
    older = [] if before is None else [before] if isinstance(before, Links) else before.both
    links = open_all(
        listener,
        [part for part in parts if part],
        job=job,
        quorum_id=quorum_id,
        me=me,
        members=members,
        abort=abort,
        patience=patience,
        lane=lane,
        strand=strand,
        before=older,
    )
    if grid is None:
        return links[0]
    made = GridLinks(grid, number, tuple(peer.shards for peer in members), *links)
    _log.debug(
        "quorum %d exchanges in %d rows: connected to %d of %d other groups",
        *(quorum_id, len(grid.rows), len(made.all_connections()), len(members) - 1),
    )
    return made


def exchange_over(links: AnyLinks, task: Task, total_shards: int, patience: MakePatience) -> None:
    """Carry out a task over either kind of connections. See `exchange_into`.

    In rows and columns, a peer may be in an earlier round, whose bytes this member does not see: so while bytes of a
    round move, members say so to those who may wait for them in a later one.
    """
    if isinstance(links, Links):
        exchange_into(links, task, total_shards, patience(0.0))
        return
    try:
        _Rounds(links, task, total_shards, patience).carry_out()
    except BaseException:
        links.close()
        raise


class _Rounds:
    """The three rounds of one exchange."""

    def __init__(self, links: GridLinks, task: Task, total_shards: int, patience: MakePatience) -> None:
        self._links = links
        self._task = task
        self._total_shards = total_shards
        self._patience = patience
        self._later_s = LATER_PATIENCE * patience(0.0).timeout_s
        self._told_s = time.monotonic()

    def carry_out(self) -> None:
        links, task = self._links, self._task
        rounds, kept = links.rounds(task.layout, self._total_shards, task.strands)
        sums = replace(task, plan=rounds.sums, kept=kept, heeds_progress=False)
        exchange_into(links.row, sums, self._total_shards, self._patience(0.0), self._tell_in_sums)
        if links.column is not None:
            values = dict(zip(rounds.sums.kept or (), kept, strict=True))
            summed = Partials.of_nodes(task.layout, self._total_shards, values)
            means = replace(task, plan=rounds.means, partials=summed, heeds_progress=True)
            patience = self._patience(self._later_s)
            exchange_into(links.column, means, self._total_shards, patience, self._tell_in_means)
        nothing = Partials(task.layout, self._total_shards)
        results = replace(task, plan=rounds.results, partials=nothing, heeds_progress=True)
        patience = self._patience(2 * self._later_s)
        exchange_into(links.row, results, self._total_shards, patience, self._tell_in_results)

    def _tell_in_sums(self, lane: Lane) -> None:
        """The column may be in the second round, and the row in the third."""
        if self._is_time():
            self._links.row.tell(lane.idle())
            if self._links.column is not None:
                self._links.column.tell(self._links.column.connections)

    def _tell_in_means(self, _: Lane) -> None:
        """The row may be in the third round."""
        if self._is_time():
            self._links.row.tell(self._links.row.connections)

    def _tell_in_results(self, _: Lane) -> None:
        """The column may be in the second round of the step's next exchange."""
        if self._links.column is not None and self._is_time():
            self._links.column.tell(self._links.column.connections)

    def _is_time(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._told_s < LOOK_S:
            return False
        self._told_s = now_s
        return True
