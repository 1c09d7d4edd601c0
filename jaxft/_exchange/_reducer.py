"""A member's part of the reduce-scatter: it reduces one slice, combining what all members hold of it."""

from collections.abc import Sequence

import numpy as np

from jaxft._arrays._layout import Layout
from jaxft._arrays._memory import aligned_empty
from jaxft._exchange._partials import Partials, Sliced
from jaxft._exchange._plan import WINDOW, Chunk, Plan, Planned, value_dtype
from jaxft._exchange._reduce import combine_into, sum_into
from jaxft._exchange._tree import Node

Scratch = dict[tuple[int, Node], np.ndarray]  # by slot of the window, and node


def room(scratch: Scratch, key: tuple[int, Node], size_bytes: int) -> np.ndarray:
    """Scratch memory of at least this size. All exchanges of a quorum share it, since they are never at once."""
    slot = scratch.get(key)
    if slot is None or slot.nbytes < size_bytes:
        slot = scratch[key] = aligned_empty(size_bytes)
    return slot


class Reducer:
    """Receives the other members' values of this member's slice, and combines them chunk by chunk, in order."""

    def __init__(  # noqa: PLR0913 (by name: what a member holds)
        self,
        plan: Plan,
        *,
        me: int,
        layout: Layout,
        partials: Partials,
        scratch: Scratch,
        result: Sequence[np.ndarray],
        kept: Sequence[Sliced] = (),
    ) -> None:
        """Start with nothing received. The caller keeps `scratch` from one exchange to the next."""
        self.result = result
        self._kept = kept
        self._plan = plan
        self._me = me
        self._layout = layout
        self._partials = partials
        self._scratch = scratch
        self._chunks = plan.chunks[me]
        self._window = window_of(plan, me)
        self._next = 0
        others = sum(len(nodes) for number, nodes in enumerate(plan.nodes) if number != me)
        self._missing = [others] * len(self._chunks)
        self._in_place = in_place_node(plan, me)

    @property
    def done(self) -> bool:
        return self._next == len(self._chunks)

    @property
    def can_combine(self) -> bool:
        return not self.done and self._missing[self._next] == 0

    def buffer_for(self, frame: Planned) -> memoryview | None:
        """The buffer for a payload, in the result or in scratch memory; None if the window is full."""
        if frame.node is None:
            return self.result_bytes(frame.chunk)
        if frame.number >= self._next + self._window:
            return None
        return _bytes(self._received(frame.number, frame.node))

    def arrived(self, frame: Planned) -> None:
        if frame.node is not None:
            self._missing[frame.number] -= 1

    def combine(self) -> int:
        """Combine the next chunk, all of whose parts have arrived, into the result. Returns its number."""
        assert self.can_combine
        number = self._next
        chunk = self._chunks[number]
        region = self._layout.regions[chunk.region]
        sources = {
            node: self._own(chunk, node) if member == self._me else self._received(number, node)
            for member, nodes in enumerate(self._plan.nodes)
            for node in nodes
        }
        if self._plan.kept is None:
            out = self.result[chunk.region][chunk.offset : chunk.stop]
            combine_into(out, sources, self._partials.shards, region)
        for top, kept in zip(self._plan.kept or (), self._kept, strict=True):
            below = {node: part for node, part in sources.items() if node.is_within(top)}
            sum_into(kept.part(chunk.region, chunk.offset, chunk.stop), below, top, region.operation)
        self._next += 1
        return number

    def result_bytes(self, chunk: Chunk) -> memoryview:
        """The memory of a chunk of the result."""
        return _bytes(self.result[chunk.region][chunk.offset : chunk.stop])

    def partial_bytes(self, chunk: Chunk, node: Node) -> memoryview:
        """The memory of a chunk of a node that this member holds."""
        return _bytes(self._own(chunk, node))

    def _own(self, chunk: Chunk, node: Node) -> np.ndarray:
        return self._partials.part(node, chunk.region, chunk.offset, chunk.stop)

    def _received(self, number: int, node: Node) -> np.ndarray:
        """The buffer for another member's node, for a chunk of the window."""
        chunk = self._chunks[number]
        region = self._layout.regions[chunk.region]
        dtype = np.dtype(value_dtype(region, node))
        if node == self._in_place and dtype == np.dtype(region.result_dtype):
            return self.result[chunk.region][chunk.offset : chunk.stop]
        size_bytes = chunk.size * dtype.itemsize
        return room(self._scratch, (number % self._window, node), size_bytes)[:size_bytes].view(dtype)


def window_of(plan: Plan, me: int) -> int:
    """How many chunks may be in progress at a reducer."""
    # In one-trip mode a peer may be gone once it has sent everything, so it is never paused.
    return len(plan.chunks[me]) if plan.one_trip else WINDOW


def in_place_node(plan: Plan, me: int) -> Node | None:
    """The node, if any, that is received directly into the result; see `combine_into`."""
    if plan.kept is not None:
        return None
    first_two = sorted(node for nodes in plan.nodes for node in nodes)[:2]
    return next((node for node in first_two if node not in plan.nodes[me]), None)


def _bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data  # bfloat16 has no buffer format
