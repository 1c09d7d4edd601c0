"""The layout of a list of leaves as one run of bytes, and its division into chunks.

Each leaf starts at a multiple of 64 bytes, so that a joiner can receive the run into one aligned arena and make
`jax.Array`s of it without a copy. A chunk lies in one band (`_bands.py`): it ends where a leaf of another one starts.
Both ends derive the layout from shapes and dtypes, so it is never sent.
"""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxft._arrays._leaf_types import LeafType
from jaxft._heal._bands import EVERYWHERE

ALIGN_BYTES = 64
# Loopback and networks reach full speed from 1 MB on. A damaged chunk is fetched again as a whole.
CHUNK_BYTES = 1 << 20

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
        """Lay out `leaves`, of which each lies in one of `bands`; None: each donor keeps all of them."""
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
