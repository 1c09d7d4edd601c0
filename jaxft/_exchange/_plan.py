"""Who sums what: the division of an exchange among the members of a quorum.

Each region of the layout is cut into one slice for each member, its *owner*, and slices into chunks. Members
send an owner what they hold of its slice; the owner combines chunk after chunk and sends the results to all. Every
member owns a slice, those without a shard too: the work and the bytes are the same for all.

A contribution that is small enough is not cut at all: everybody sends everything to everybody and each combines
for itself. That takes one trip instead of two, and the bits are the same, because the order of the sum does not
depend on who makes it.

Both ends of a connection derive the same plan and the same frames from it, so each knows exactly what follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxft._arrays._layout import ALIGN_ELEMENTS, Layout, Region
from jaxft._exchange._frames import PARTIAL, RESULT, Stamp
from jaxft._exchange._tree import Node, cover

# The most a frame carries. The best of a sweep over 64 MB: 0.5 to 2 MB (128 KB costs a third more, 4 MB too).
CHUNK_BYTES = 1 << 20
# A slice is cut into at least so many chunks, so that sending, summing and sending back overlap ...
_CHUNKS_PER_SLICE = 4
# ... unless they would be smaller than this, where the cost of a frame itself begins to show.
_SMALL_CHUNK_BYTES = 128 << 10
# Up to this much sent by each member, contributions make one trip. Here that takes the same CPU time for two
# and three members and saves a trip; three members and 512 KB would take 1.2 times the CPU time.
ONE_TRIP_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Chunk:
    """`size` elements of a region, from `offset` on."""

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
    """

    nodes: tuple[tuple[Node, ...], ...]
    chunks: tuple[tuple[Chunk, ...], ...]
    one_trip: bool

    @staticmethod
    def of(layout: Layout, shards: Sequence[Sequence[int]], total: int) -> "Plan":
        """Divide an exchange. `shards` has the shards of each member; together they must be all, each once."""
        dealt = sorted(shard for held in shards for shard in held)
        if dealt != list(range(total)):
            raise ValueError(
                f"The members' shards {[list(held) for held in shards]} are not 0 to {total - 1}."
            )
        members = len(shards)
        nodes = tuple(cover(held, total) for held in shards)
        if layout.size_bytes * (members - 1) <= ONE_TRIP_BYTES:
            everything = tuple(
                Chunk(number, 0, region.size) for number, region in enumerate(layout.regions) if region.size
            )
            return Plan(nodes=nodes, chunks=(everything,) * members, one_trip=True)
        chunks = tuple(_cut(layout, member, members) for member in range(members))
        return Plan(nodes=nodes, chunks=chunks, one_trip=False)


def _cut(layout: Layout, member: int, members: int) -> tuple[Chunk, ...]:
    chunks: list[Chunk] = []
    for number, region in enumerate(layout.regions):
        units = region.size // ALIGN_ELEMENTS
        start = units * member // members * ALIGN_ELEMENTS
        stop = units * (member + 1) // members * ALIGN_ELEMENTS
        step = _chunk_size(region, stop - start)
        chunks += [Chunk(number, at, min(step, stop - at)) for at in range(start, stop, step)]
    return tuple(chunks)


def _chunk_size(region: Region, slice_size: int) -> int:
    share_bytes = slice_size * region.sum_item_bytes // _CHUNKS_PER_SLICE
    chunk_bytes = min(CHUNK_BYTES, max(_SMALL_CHUNK_BYTES, share_bytes))
    return chunk_bytes // region.sum_item_bytes // ALIGN_ELEMENTS * ALIGN_ELEMENTS


@dataclass(frozen=True, slots=True)
class Planned:
    """A frame that one member will send and another expects."""

    header: bytes
    chunk: Chunk
    number: int  # of the chunk, among those of its owner
    node: Node | None  # whose sum it carries; None: it carries results
    length_bytes: int


def value_dtype(region: Region, node: Node) -> str:
    """The dtype in which a node's values are kept and sent: a single contribution's is that of the leaves."""
    return region.dtype if node.size == 1 else region.sum_dtype


def partials_to(receiver: int, *, stamp: Stamp, plan: Plan, layout: Layout) -> list[Planned]:
    """What the member of this stamp holds of a receiver's slice, chunk by chunk."""
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
    """The results of the slice of the member of this stamp; the same to every other member."""
    if plan.one_trip:
        return []
    frames: list[Planned] = []
    for number, chunk in enumerate(plan.chunks[stamp.sender]):
        length_bytes = chunk.size * layout.regions[chunk.region].item_bytes
        header = stamp.header(
            RESULT, node=(0, 0), region=chunk.region, offset=chunk.offset, length_bytes=length_bytes
        )
        frames.append(Planned(header, chunk, number, None, length_bytes))
    return frames
