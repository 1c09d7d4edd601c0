"""Which frames go from one member to another, and in which order. Both ends write the same script."""

from dataclasses import dataclass

from jaxft._exchange._frames import PARTIAL, RESULT, Stamp
from jaxft._exchange._layout import Layout, Region
from jaxft._exchange._plan import Chunk, Plan
from jaxft._exchange._tree import Node


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
