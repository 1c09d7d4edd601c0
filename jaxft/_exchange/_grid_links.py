"""The connections of one member of a large quorum, to its row and its column, and its exchange over them."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from jaxft._arrays._layout import Layout
from jaxft._arrays._memory import aligned_empty
from jaxft._exchange._exchange import exchange_into
from jaxft._exchange._grid import Grid, Rounds, is_large
from jaxft._exchange._lane import Task
from jaxft._exchange._links import Links
from jaxft._exchange._mesh import Peer
from jaxft._exchange._node_values import Sliced
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import Patience
from jaxft._exchange._plan import value_dtype
from jaxft._transport._listener import Connection, Listener
from jaxft._transport._sockets import Abort

_log = logging.getLogger("jaxft")

# In a later round a peer may be waiting for one that this member is not connected to. That one's own peers notice
# first, and are the ones to name it: each later round has this much more patience than the one before, as a part of
# the usual patience, ...
LATER_PATIENCE = 0.25
# ... and this many times as long as the rounds before it took here: other rows may be slower.
ROUNDS_OF_PATIENCE = 8

# Makes the limit on a time without progress, with so many seconds more than usual.
MakePatience = Callable[[float], Patience]


@dataclass
class GridLinks:
    """One member's connections for one strand, and what is reused across its exchanges.

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
    column: Links | None
    _rounds: dict[tuple[str, int, int], tuple[Rounds, tuple[Sliced, ...]]] = field(
        default_factory=dict[tuple[str, int, int], tuple[Rounds, tuple[Sliced, ...]]]
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

    def all_connections(self) -> list[Connection]:
        found = [self.row] if self.column is None else [self.row, self.column]
        return [connection for links in found for connection in links.all_connections()]

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for links in (self.row, self.column):
            if links is not None:
                links.close()


AnyLinks = Links | GridLinks


def _memory_for(rounds: Rounds, layout: Layout) -> tuple[Sliced, ...]:
    firsts = tuple(start for start, _ in rounds.slices)
    kept: list[Sliced] = []
    for node in rounds.sums.kept or ():
        dtypes = [value_dtype(region, node) for region in layout.regions]
        items = [region.item_bytes if node.size == 1 else region.sum_item_bytes for region in layout.regions]
        parts = [
            aligned_empty((stop - start) * item_bytes).view(dtype)
            for (start, stop), item_bytes, dtype in zip(rounds.slices, items, dtypes, strict=True)
        ]
        kept.append(Sliced(firsts, tuple(parts)))
    return tuple(kept)


def open_links(
    listener: Listener,
    *,
    job: str,
    quorum_id: int,
    me: str,
    members: Sequence[Peer],
    abort: Abort,
    patience: MakePatience,
    lane: int = 0,
    strand: int = 0,
    before: AnyLinks | None = None,
) -> AnyLinks:
    """Connect to the other members of a quorum: to all, or in a large one to this member's row and column.

    The arguments, and what is raised, are those of `Links.open`.
    """

    def opened(numbers: Sequence[int], more_s: float, kept: Links | None) -> Links:
        return Links.open(
            listener,
            job=job,
            quorum_id=quorum_id,
            me=me,
            members=[members[number] for number in numbers],
            abort=abort,
            patience=patience(more_s),
            lane=lane,
            strand=strand,
            before=kept,
        )

    if not is_large(len(members)):
        if isinstance(before, GridLinks):
            before.close()
            before = None
        return opened(range(len(members)), 0.0, before)
    old_row, old_column = (before.row, before.column) if isinstance(before, GridLinks) else (None, None)
    if isinstance(before, Links):
        before.close()
    grid, number = Grid.of(len(members)), [peer.group for peer in members].index(me)
    try:
        row = opened(grid.row_of(number), 0.0, old_row)
    except BaseException:
        if old_column is not None:
            old_column.close()
        raise
    try:
        later_s = LATER_PATIENCE * patience(0.0).timeout_s
        column = opened(found, later_s, old_column) if (found := grid.column_of(number)) else None
    except BaseException:
        row.close()
        raise
    if column is None and old_column is not None:
        old_column.close()
    made = GridLinks(grid, number, tuple(peer.shards for peer in members), row, column)
    _log.debug(
        "quorum %d exchanges in %d rows: connected to %d of %d other groups",
        *(quorum_id, len(grid.rows), len(made.all_connections()), len(members) - 1),
    )
    return made


def exchange_over(links: AnyLinks, task: Task, total_shards: int, patience: MakePatience) -> None:
    """Carry out a task over either kind of connections. See `exchange_into`."""
    if isinstance(links, Links):
        exchange_into(links, task, total_shards, patience(0.0))
        return
    rounds, kept = links.rounds(task.layout, total_shards, task.strands)
    first = patience(0.0)

    def more_s(round_number: int) -> float:
        took_s = max(0.0, time.monotonic() - first.since_s)  # 0 while time does not count
        return round_number * LATER_PATIENCE * first.timeout_s + ROUNDS_OF_PATIENCE * took_s

    try:
        exchange_into(links.row, replace(task, plan=rounds.sums, kept=kept), total_shards, first)
        if links.column is not None:
            summed = Partials.of_nodes(
                task.layout, total_shards, dict(zip(rounds.sums.kept or (), kept, strict=True))
            )
            exchange_into(
                links.column,
                replace(task, partials=summed, plan=rounds.means),
                total_shards,
                patience(more_s(1)),
            )
        nothing = Partials(task.layout, total_shards)
        exchange_into(
            links.row, replace(task, partials=nothing, plan=rounds.results), total_shards, patience(more_s(2))
        )
    except BaseException:
        links.close()
        raise
