"""The plan of an exchange as the compiled lane reads it: made once for a quorum and a layout, used at every step.

Of the headers only the step changes. Results, and this member's contributions, lie elsewhere at each step.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxft._arrays._layout import Layout
from jaxft._arrays._memory import aligned_empty
from jaxft._exchange import _lane_structs as c
from jaxft._exchange._compiled import address, code, divisor, tree_program
from jaxft._exchange._frames import HEADER_BYTES, Stamp
from jaxft._exchange._partials import Partials, Sliced
from jaxft._exchange._plan import CHUNK_BYTES, Chunk, Plan, Planned, partials_to, results_from
from jaxft._exchange._reducer import Scratch, in_place_node, room, window_of
from jaxft._exchange._tree import Node, root

_STEP_WORD = 3  # of a header, in words of 8 bytes


class Sheet:
    """One quorum's plan in the structures of lane.h, and the memory that they point to."""

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        stamps: Sequence[Stamp],
        *,
        me: int,
        shards: int,
        scratch: Scratch,
    ) -> None:
        """Everything but the connections, and what `begin` fills in."""
        self._of = plan
        self._layout = layout
        self._own = plan.nodes[me]
        nodes = sorted(node for held in plan.nodes for node in held)
        number = {node: at for at, node in enumerate(nodes)}
        self._headers = _Headers(plan, layout, stamps, me)
        self._progress = [np.frombuffer(each.progress_header(), np.uint8).copy() for each in stamps]
        self._regions = _array(
            c.Region, [(divisor(region, shards), None, 0, code(region)) for region in layout.regions]
        )
        empty = np.empty(0, np.int32)
        self._program = tree_program(tuple(nodes), root(shards)) if plan.kept is None else empty
        self._kept_programs = [_program_of(nodes, top) for top in plan.kept or ()]
        self.members = _array(
            c.Member,
            [
                (
                    -1,
                    len(plan.chunks[member]),
                    len(plan.nodes[member]),
                    _array(c.Chunk, [(each.offset, each.size, each.region) for each in plan.chunks[member]]),
                    _array(ctypes.c_uint32, [number[node] for node in plan.nodes[member]]),
                    self._headers.address("partials in", member),
                    self._headers.address("results in", member),
                    self._headers.address("partials out", member),
                    None,
                )
                for member in range(len(stamps))
            ],
        )
        rows = {node: at * (len(layout.regions) + 1) for at, node in enumerate(self._own)}
        owner = {node: member for member, held in enumerate(plan.nodes) for node in held}
        received = in_place_node(plan, me)
        self._scratch = self._received(plan, me, nodes, scratch)  # kept: the plan has its addresses
        self.plan = c.Plan(
            me=me,
            members_size=len(stamps),
            nodes_size=len(nodes),
            kept_size=len(self._kept_programs),
            steps=self._program.size,
            window=window_of(plan, me),
            in_place=c.NONE if received is None else number[received],
            pending_bytes=CHUNK_BYTES,
            chunk_bytes=max(map(self._sum_bytes, (each for mine in plan.chunks for each in mine)), default=1),
            members=self.members,
            regions=self._regions,
            nodes=_array(c.Node, [(owner[node], node.size == 1, rows.get(node, 0)) for node in nodes]),
            program=address(self._program),
            scratch=_array(ctypes.c_void_p, [address(each) for each in self._scratch]),
            results_out=self._headers.address("results out", me),
        )

    def begin(
        self, step: int, partials: Partials, result: Sequence[np.ndarray], kept: Sequence[Sliced] = ()
    ) -> None:
        """Set the step, and where this member's contributions and sums lie. The caller keeps these."""
        self._headers.set_step(step)
        self._set_kept(kept)
        for region, array in zip(self._regions, result, strict=True):
            region.result = address(array)
        first: list[int] = []
        pieces: list[tuple[int, int, int]] = []
        for node in self._own:
            for region in range(len(self._layout.regions)):
                first.append(len(pieces))
                pieces += [
                    (offset, array.size, address(array)) for offset, array in partials.pieces(node, region)
                ]
            first.append(len(pieces))
        self.plan.first_piece = _array(ctypes.c_uint32, first)
        self.plan.pieces = _array(c.Piece, pieces)

    def heed(self, *, progress: bool | None) -> None:
        """Whether frames that say that bytes move count as such; None: there are none."""
        self.plan.heeds_progress = bool(progress)
        for member, header in zip(self.members, self._progress, strict=True):
            member.progress_in = None if progress is None else address(header)

    def _set_kept(self, kept: Sequence[Sliced]) -> None:
        for region, first in zip(self._regions, kept[0].firsts if kept else (), strict=False):
            region.first = first
        tops = self._of.kept or ()
        self.plan.kept = _array(
            c.Kept,
            [
                (
                    address(program),
                    program.size,
                    top.size == 1,
                    _array(ctypes.c_void_p, list(map(address, each.parts))),
                )
                for top, program, each in zip(tops, self._kept_programs, kept, strict=True)
            ],
        )

    def expected(self, member: int, *, results: int, partials: int) -> list[bytes]:
        """The headers that can come next from a member after some results and partial sums."""
        both = [
            self._headers.get("results in", member, results),
            self._headers.get("partials in", member, partials),
        ]
        return [header for header in both if header is not None]

    def _received(self, plan: Plan, me: int, nodes: Sequence[Node], scratch: Scratch) -> list[np.ndarray]:
        """For each slot of the window and each node, where it is received; nothing for this member's own."""
        slots = window_of(plan, me)
        longest = [
            max(map(self._sum_bytes, plan.chunks[me][slot::slots]), default=0) for slot in range(slots)
        ]
        return [
            aligned_empty(0) if node in self._own else room(scratch, (slot, node), longest[slot])
            for slot in range(slots)
            for node in nodes
        ]

    def _sum_bytes(self, chunk: Chunk) -> int:
        return chunk.size * self._layout.regions[chunk.region].sum_item_bytes


class _Headers:
    """The headers of all frames that this member sends and receives, one after another."""

    def __init__(self, plan: Plan, layout: Layout, stamps: Sequence[Stamp], me: int) -> None:
        self._first: dict[tuple[str, int], tuple[int, int]] = {}  # by kind and member: from, up to
        joined: list[bytes] = []

        def add(kind: str, member: int, frames: Sequence[Planned]) -> None:
            self._first[kind, member] = len(joined), len(joined) + len(frames)
            joined.extend(frame.header for frame in frames)

        add("results out", me, results_from(stamp=stamps[me], plan=plan, layout=layout))
        for peer, stamp in enumerate(stamps):
            if peer != me:
                add("partials in", peer, partials_to(me, stamp=stamp, plan=plan, layout=layout))
                add("results in", peer, results_from(stamp=stamp, plan=plan, layout=layout))
                add("partials out", peer, partials_to(peer, stamp=stamps[me], plan=plan, layout=layout))
        # In a round there may be none, and NumPy refuses an empty buffer.
        words = np.frombuffer(b"".join(joined) or bytes(HEADER_BYTES), np.uint64)
        self._words = words.reshape(-1, HEADER_BYTES // 8).copy()

    def set_step(self, step: int) -> None:
        self._words[:, _STEP_WORD] = step

    def address(self, kind: str, member: int) -> int | None:
        """Where the headers of one kind begin; None if there are none."""
        start, stop = self._first.get((kind, member), (0, 0))
        return address(self._words) + start * HEADER_BYTES if start < stop else None

    def get(self, kind: str, member: int, number: int) -> bytes | None:
        """One header; None: there are fewer."""
        start, stop = self._first[kind, member]
        return self._words[start + number].tobytes() if start + number < stop else None


def _program_of(nodes: Sequence[Node], top: Node) -> np.ndarray:
    """The tree below a node, by the numbers of all nodes."""
    below = [number for number, node in enumerate(nodes) if node.is_within(top)]
    program = tree_program(tuple(nodes[number] for number in below), top)
    return np.array([below[step] if step >= 0 else step for step in program.tolist()], np.int32)


def _array(kind: Any, rows: Sequence[Any]) -> Any:
    """A C array. Each row is a value, or the fields of a structure."""
    return (kind * len(rows))(*rows)
