"""Which lanes the ranks of a group hold, and which of them travel together between groups.

A lane is what one device of a group holds of each leaf. Devices are counted rank by rank, so the lanes of a rank are
consecutive. All groups of a job have the same lanes, whatever their number of ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Consecutive lanes: `start` up to but not including `stop`."""

    start: int
    stop: int


def span_of(rank: int, ranks: int, lanes: int) -> Span:
    """The lanes of a rank, of several with equally many each."""
    return Span(rank * lanes // ranks, (rank + 1) * lanes // ranks)


def rank_of(lane: int, ranks: int, lanes: int) -> int:
    """The rank that holds a lane."""
    return lane * ranks // lanes


def spans(own: Span, sizes: Iterable[int], lanes: int) -> tuple[Span, ...]:
    """The lanes of one rank, cut where the lanes of any rank of groups of these sizes begin."""
    begins = {span_of(rank, size, lanes).start for size in set(sizes) for rank in range(size)}
    edges = sorted({own.start, own.stop, *(edge for edge in begins if own.start < edge < own.stop)})
    return tuple(map(Span, edges, edges[1:]))
