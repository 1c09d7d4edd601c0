"""Who sums what: the division of an exchange among the members of a quorum.

Each region of the layout is cut into one slice per member, its *reducer*, and slices into chunks. Members send a
reducer their partial sums of its slice (reduce-scatter); it combines chunk after chunk and sends the results to all
(all-gather). Members without a shard also reduce a slice: the work and the bytes are the same for all.

A small contribution is not cut: each member sends everything to all others and combines everything itself. That takes
one round instead of two, and gives the same bits, because the order of the sum does not depend on who computes it.

A large contribution may be divided into *strands*, each with its own plan: every strand has a part of every
slice. Strands travel at the same time, by separate connections and threads.

Both ends of a connection derive the same plan, and the same frames from it, so each knows exactly what comes next.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxft._arrays._layout import ALIGN_ELEMENTS, Layout, Region
from jaxft._exchange._frames import PARTIAL, RESULT, Stamp
from jaxft._exchange._partials import Partials, Sliced
from jaxft._exchange._tree import Node, cover

# Largest payload of a frame. Best in a sweep over 64 MB: 0.5 to 2 MB (128 KB and 4 MB take a third longer).
CHUNK_BYTES = 1 << 20
# A slice is cut into at least this many chunks, so that sending, summing and sending back overlap ...
_CHUNKS_PER_SLICE = 4
# ... unless they would be smaller than this, where the cost per frame becomes visible.
_SMALL_CHUNK_BYTES = 128 << 10
# A reducer keeps up to this many chunks of each node of the other members in scratch memory. One is summed, one is
# received, and two absorb differences in speed between members.
WINDOW = 4
# In a large job chunks are smaller than that, so that all scratch memory of a process takes no more than this ...
_SCRATCH_BYTES = 256 << 20
# ... but not smaller than this, so that headers and tags, of some 80 bytes a frame, stay a small part.
_LEAST_CHUNK_BYTES = 16 << 10
# If each member sends at most this much, contributions take one round. Measured at this size: the same CPU time for
# two and three members, and one round less; three members with 512 KB would take 1.2 times the CPU time.
ONE_TRIP_BYTES = 256 << 10
# A strand has at least this many bytes of the contribution: its thread takes 70 µs to start and to end.
STRAND_BYTES = 4 << 20


def strands_of(layout: Layout, most: int) -> int:
    """Into how many strands an exchange is divided. All members agree on `most`."""
    return max(1, min(most, layout.size_bytes // STRAND_BYTES))


@dataclass(frozen=True, slots=True)
class Chunk:
    """`size` elements of a region, starting at `offset`."""

    region: int
    offset: int
    size: int

    @property
    def stop(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class Plan:
    """One exchange. Members are numbered in the order of the quorum.

    Attributes:
        nodes: for each member, the nodes of the tree that it holds.
        chunks: for each member, the chunks that it combines, in order.
        one_trip: each member combines everything for itself, and no results are sent.
        kept: for one round of an exchange in rows and columns (`_grid.py`): the nodes that a reducer sums up to, and
            keeps, so that no results are sent. Empty: the results of the chunks are there already, and only sent.
            None: reducers sum everything.
    """

    nodes: tuple[tuple[Node, ...], ...]
    chunks: tuple[tuple[Chunk, ...], ...]
    one_trip: bool
    kept: tuple[Node, ...] | None = None

    @property
    def sends_results(self) -> bool:
        return not self.one_trip and not self.kept

    @staticmethod
    def of(
        layout: Layout, shards: Sequence[Sequence[int]], total: int, strand: int = 0, strands: int = 1
    ) -> "Plan":
        """Divide an exchange."""
        check_dealt(shards, total)
        members = len(shards)
        nodes = tuple(cover(held, total) for held in shards)
        if strands == 1 and layout.size_bytes * (members - 1) <= ONE_TRIP_BYTES:
            everything = tuple(
                Chunk(number, 0, region.size) for number, region in enumerate(layout.regions) if region.size
            )
            return Plan(nodes=nodes, chunks=(everything,) * members, one_trip=True)
        parts = members * strands
        most_bytes = chunk_limit_bytes(nodes, strands)
        chunks = tuple(cut(layout, member * strands + strand, parts, most_bytes) for member in range(members))
        return Plan(nodes=nodes, chunks=chunks, one_trip=False)


def check_dealt(shards: Sequence[Sequence[int]], total: int) -> None:
    """Raise ValueError unless each shard is at one member."""
    if sorted(shard for held in shards for shard in held) != list(range(total)):
        raise ValueError(
            f"The members' shards {[list(held) for held in shards]} are not each of 0 to {total - 1} once."
        )


def chunk_limit_bytes(nodes: Sequence[Sequence[Node]], strands: int) -> int:
    """The longest chunk with which the scratch memory for these members' nodes stays within its limit."""
    return _SCRATCH_BYTES // (WINDOW * sum(map(len, nodes)) * strands)


def cut(layout: Layout, part: int, parts: int, most_bytes: int) -> tuple[Chunk, ...]:
    """A part of each region, of several equal parts, in chunks of about so many bytes at most."""
    chunks: list[Chunk] = []
    for number, region in enumerate(layout.regions):
        start, stop = part_of(region, part, parts)
        step = _chunk_size(region, stop - start, most_bytes)
        chunks += [Chunk(number, at, min(step, stop - at)) for at in range(start, stop, step)]
    return tuple(chunks)


def part_of(region: Region, part: int, parts: int) -> tuple[int, int]:
    """Where a part of a region, of several equal parts, begins and ends. Parts of a part are parts of the region."""
    units = region.size // ALIGN_ELEMENTS
    return units * part // parts * ALIGN_ELEMENTS, units * (part + 1) // parts * ALIGN_ELEMENTS


def _chunk_size(region: Region, slice_size: int, most_bytes: int) -> int:
    share_bytes = slice_size * region.sum_item_bytes // _CHUNKS_PER_SLICE
    chunk_bytes = min(CHUNK_BYTES, max(_SMALL_CHUNK_BYTES, share_bytes), max(_LEAST_CHUNK_BYTES, most_bytes))
    return chunk_bytes // region.sum_item_bytes // ALIGN_ELEMENTS * ALIGN_ELEMENTS


@dataclass(frozen=True, slots=True)
class Planned:
    """A frame that one member will send and another expects."""

    header: bytes
    chunk: Chunk
    number: int  # of the chunk, among the chunks of its reducer
    node: Node | None  # the node of a partial sum; None for results
    length_bytes: int


def value_dtype(region: Region, node: Node) -> str:
    """The dtype in which a node's values are kept and sent: the leaves' own for a single contribution."""
    return region.dtype if node.size == 1 else region.sum_dtype


def partials_to(receiver: int, *, stamp: Stamp, plan: Plan, layout: Layout) -> list[Planned]:
    """The frames with the stamp's member's partial sums of a receiver's slice, chunk by chunk."""
    frames: list[Planned] = []
    for number, chunk in enumerate(plan.chunks[receiver]):
        region = layout.regions[chunk.region]
        for node in plan.nodes[stamp.sender]:
            single = value_dtype(region, node) == region.dtype
            length_bytes = chunk.size * (region.item_bytes if single else region.sum_item_bytes)
            header = stamp.header(
                PARTIAL,
                node=(node.start, node.stop),
                region=chunk.region,
                offset=chunk.offset,
                length_bytes=length_bytes,
            )
            frames.append(Planned(header, chunk, number, node, length_bytes))
    return frames


def results_from(*, stamp: Stamp, plan: Plan, layout: Layout) -> list[Planned]:
    """The frames with the results that the stamp's member reduced; the same for every other member."""
    if not plan.sends_results:
        return []
    frames: list[Planned] = []
    for number, chunk in enumerate(plan.chunks[stamp.sender]):
        length_bytes = chunk.size * layout.regions[chunk.region].result_item_bytes
        header = stamp.header(
            RESULT, node=(0, 0), region=chunk.region, offset=chunk.offset, length_bytes=length_bytes
        )
        frames.append(Planned(header, chunk, number, None, length_bytes))
    return frames


class Turn(enum.IntEnum):
    """The end of a turn. The values are the same in lane.h."""

    STILL = 0
    MOVED = 1  # bytes have moved
    DONE = 2


class PeerLost(Exception):
    """The connection to a member failed, or it sent a wrong frame."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(number, why)
        self.number = number
        self.why = why


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a lane: an exchange, or one strand of it.

    Attributes:
        layout: the layout of the leaves, the same at every member.
        step: the step that the contributions are for.
        partials: the contributions of this member: exactly its shards of the quorum. Only read.
        result: where the means and sums are written, region by region. All strands write into the same arrays.
        strands: into how many strands the exchange is divided; the links know which of them they carry.
        plan: who sums what; None: everyone a part (`Links.plan`).
        kept: where the nodes go that the plan keeps, in its order.
        heeds_progress: whether frames by which members say that they make progress in an earlier round count as moved
            bytes; None: there are no such frames.
    """

    layout: Layout
    step: int
    partials: Partials
    result: tuple[np.ndarray, ...]
    strands: int = 1
    plan: Plan | None = None
    kept: tuple[Sliced, ...] = ()
    heeds_progress: bool | None = None


class Lane(Protocol):
    """A task, in progress. Members are named by their number in the quorum."""

    task: Task

    def turn(self, seconds: float) -> Turn:
        """Send, receive and sum, for about `seconds`. Returns early if all is done or the abort flag is set.

        Raises:
            PeerLost: a connection failed.
        """
        ...

    def owing(self) -> list[int]:
        """The members that owe partial sums, which they can send without waiting for any other member."""
        ...

    def unfinished(self) -> list[int]:
        """The members to whom there is something to send, or from whom to receive."""
        ...

    def idle(self) -> list[int]:
        """The members for whom nothing is queued, so that another frame may be sent to them between two turns."""
        ...

    def moved_s(self, number: int) -> float:
        """When bytes last moved to or from a member, on the clock of `time.monotonic()`."""
        ...

    def close(self) -> None:
        """Free the lane's memory."""
        ...
