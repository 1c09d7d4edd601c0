"""The layout of a list of leaves as one run of bytes, its division into chunks, and who keeps which of them.

Each leaf starts at a multiple of 64 bytes, so that a joiner can receive the run into one aligned arena and make
`jax.Array`s of it without a copy. Both ends derive the layout from shapes and dtypes, so it is never sent.

The leaves of a state, in their order, form `BANDS` bands of about the same size, of which each donor of a heal keeps
some: its stripe. A leaf lies in one band as a whole, because a donor captures whole leaves, and so does a chunk. Both
ends derive the bands from the leaves of the whole state, whatever part of each leaf a process holds. So they agree
without a message, for any number of donors and of processes.
"""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxft_protocol.messages import Stripe
from jaxft_protocol.ranks.lanes import Span

from jaxft._arrays._leaf_types import LeafType
from jaxft._arrays._pieces import Pieces

ALIGN_BYTES = 64
# Loopback and networks reach full speed from 1 MB on. A damaged chunk is fetched again as a whole.
CHUNK_BYTES = 1 << 20
# As many bands in each stripe of 1, 2, 3 or 4.
BANDS = 12
# A state of at most this size is not divided: the memory saved is not worth a heal that begins again.
UNDIVIDED_BYTES = 1 << 20
# The band of a leaf that each donor keeps.
EVERYWHERE = -1

_ZEROS = bytes(ALIGN_BYTES)


class Spoiled(LookupError):
    """Memory that was about to be sent was overwritten or freed."""


class NotKept(LookupError):
    """This donor does not keep the requested chunk; another one does."""


@dataclass(frozen=True, slots=True)
class BlobLayout:
    leaves: tuple[LeafType, ...]
    offsets: tuple[int, ...]
    ends: tuple[int, ...]  # without the padding
    total_bytes: int
    starts: tuple[int, ...]  # of the chunks
    bands: tuple[int, ...]  # of the chunks

    @staticmethod
    def of(leaves: Sequence[LeafType], bands: Sequence[int] | None = None) -> "BlobLayout":
        """Lay out `leaves`, each in its band of `bands`; None: each donor keeps all leaves."""
        offsets: list[int] = []
        ends: list[int] = []
        position = 0
        for leaf in leaves:
            offsets.append(position)
            ends.append(position + leaf.size_bytes)
            position = -(-ends[-1] // ALIGN_BYTES) * ALIGN_BYTES
        runs = _runs(offsets, ends, position, bands or [EVERYWHERE] * len(leaves))
        chunks = [(at, band) for start, stop, band in runs for at in range(start, stop, CHUNK_BYTES)]
        starts, bands_of_chunks = tuple(at for at, _ in chunks), tuple(band for _, band in chunks)
        return BlobLayout(tuple(leaves), tuple(offsets), tuple(ends), position, starts, bands_of_chunks)

    @property
    def chunks(self) -> int:
        return len(self.starts)

    def span_of(self, chunk: int) -> tuple[int, int]:
        """First byte and length of a chunk."""
        start, following = self.starts[chunk], chunk + 1
        stop = self.starts[following] if following < self.chunks else self.total_bytes
        return start, stop - start

    def leaves_in(self, chunk: int) -> range:
        """The leaves that have bytes in a chunk, and empty leaves between them."""
        start, length = self.span_of(chunk)
        return range(bisect.bisect_right(self.ends, start), bisect.bisect_left(self.offsets, start + length))

    def arrays(self, arena: np.ndarray) -> list[np.ndarray]:
        """The leaves, as views of an arena that holds the whole run."""
        return [
            arena[offset:end].view(np.dtype(leaf.dtype)).reshape(leaf.shape)
            for leaf, offset, end in zip(self.leaves, self.offsets, self.ends, strict=True)
        ]


def _runs(
    offsets: Sequence[int], ends: Sequence[int], total_bytes: int, bands: Sequence[int]
) -> list[tuple[int, int, int]]:
    """First byte, end and band of each run of leaves of one band. Leaves without bytes are in no run."""
    filled = [(at, band) for at, end, band in zip(offsets, ends, bands, strict=True) if end > at]
    firsts = [next(run) for _, run in itertools.groupby(filled, key=lambda leaf: leaf[1])]
    stops = [*(at for at, _ in firsts[1:]), total_bytes]
    return [
        (at, stop, band) for (at, band), stop in zip(firsts, stops, strict=False)
    ]  # without leaves: no run


class Source(Protocol):
    """A leaf that several threads at once serve to joiners."""

    def flat(self) -> memoryview:
        """Its bytes, in C order. Raises Spoiled or NotKept."""
        ...

    def intact(self) -> bool:
        """Whether the bytes from `flat` are still unchanged."""
        ...


class Blob:
    """Leaves served as one run of bytes; each is made contiguous only when a chunk needs it."""

    def __init__(self, layout: BlobLayout, sources: Sequence[Source]) -> None:
        self.layout = layout
        self.sources = tuple(sources)

    def check_intact(self, chunk: int) -> None:
        """Raise Spoiled if the bytes that `read` returned for a chunk may have been overwritten since."""
        if not all(self.sources[index].intact() for index in self.layout.leaves_in(chunk)):
            raise Spoiled(f"chunk {chunk} was overwritten while it was sent")

    def read(self, chunk: int) -> list[memoryview]:
        """The bytes of a chunk, as views of the leaves and of padding. Raises Spoiled or NotKept."""
        start, length = self.layout.span_of(chunk)
        position, stop = start, start + length
        found: list[memoryview] = []
        for index in self.layout.leaves_in(chunk):
            offset, end = self.layout.offsets[index], min(self.layout.ends[index], stop)
            if end <= max(offset, start):
                continue
            if offset > position:
                found.append(memoryview(_ZEROS)[: offset - position])
            found.append(self.sources[index].flat()[max(start - offset, 0) : end - offset])
            position = end
        if position < stop:
            found.append(memoryview(_ZEROS)[: stop - position])
        return found


class HostArray:
    """A source in host memory that is never written to again."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def flat(self) -> memoryview:
        return bytes_of(np.ascontiguousarray(self._array))

    def intact(self) -> bool:
        return True


def blob_of(arrays: Sequence[np.ndarray]) -> Blob:
    layout = BlobLayout.of([LeafType(tuple(array.shape), array.dtype.name) for array in arrays])
    return Blob(layout, [HostArray(array) for array in arrays])


def bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data  # bfloat16 has no buffer format


def bands_of(leaves: Sequence[LeafType]) -> list[int]:
    """The band of each leaf, in ascending order: the band with the middle of the leaf. `leaves`: the whole state."""
    total_bytes = sum(leaf.size_bytes for leaf in leaves)
    if total_bytes <= UNDIVIDED_BYTES:
        return [EVERYWHERE] * len(leaves)
    found: list[int] = []
    start = 0
    for leaf in leaves:
        middle_twice = 2 * start + leaf.size_bytes
        found.append(min(BANDS - 1, middle_twice * BANDS // (2 * total_bytes)))
        start += leaf.size_bytes
    return found


def bands_in(pieces: Pieces, span: Span | None = None) -> list[int]:
    """The band of each array that `pieces.types(span)` describes."""
    bands = bands_of(pieces.lanes.leaf_types)
    return [bands[number] for number in pieces.leaf_numbers(span)]


def keeps(stripe: Stripe, band: int) -> bool:
    """Whether a donor keeps this band; of all stripes of a heal exactly one does, unless it is EVERYWHERE."""
    return band == EVERYWHERE or band * stripe.count // BANDS == stripe.number
