"""How a list of leaves lies in one run of bytes, and how that is cut into chunks.

Each leaf starts at a multiple of 64 bytes, so that a joiner that receives the run into one aligned arena can make
`jax.Array`s of it without a copy. Both ends derive the layout from shapes and dtypes; nothing of it travels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

ALIGN_BYTES = 64
# Loopback and networks are at their best from 1 MB on; a chunk that is damaged is fetched anew as a whole.
CHUNK_BYTES = 1 << 20

_ZEROS = bytes(ALIGN_BYTES)


@dataclass(frozen=True, slots=True)
class LeafType:
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class BlobLayout:
    leaves: tuple[LeafType, ...]
    offsets: tuple[int, ...]
    total_bytes: int

    @staticmethod
    def of(leaves: Sequence[LeafType]) -> "BlobLayout":
        offsets: list[int] = []
        position = 0
        for leaf in leaves:
            offsets.append(position)
            position += -(-leaf.size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return BlobLayout(tuple(leaves), tuple(offsets), position)

    @property
    def chunks(self) -> int:
        return -(-self.total_bytes // CHUNK_BYTES)

    def span_of(self, chunk: int) -> tuple[int, int]:
        """First byte and length of a chunk."""
        start = chunk * CHUNK_BYTES
        return start, min(CHUNK_BYTES, self.total_bytes - start)

    def arrays(self, arena: np.ndarray) -> list[np.ndarray]:
        """The leaves, as views of an arena that holds the whole run."""
        return [
            arena[offset : offset + leaf.size_bytes].view(np.dtype(leaf.dtype)).reshape(leaf.shape)
            for leaf, offset in zip(self.leaves, self.offsets, strict=True)
        ]


class Blob:
    """Leaves that are served as one run of bytes; each is made contiguous only when a chunk needs it."""

    def __init__(self, layout: BlobLayout, leaves: Sequence[Any]) -> None:
        """Take leaves that have `host()`, which gives a C-contiguous array of the leaf's type."""
        self.layout = layout
        self._leaves = list(leaves)

    def pieces(self, chunk: int) -> list[memoryview]:
        """The bytes of a chunk, as views of the leaves and of padding."""
        start, length = self.layout.span_of(chunk)
        stop = start + length
        found: list[memoryview] = []
        for index in range(self._leaf_at(start), len(self._leaves)):
            offset = self.layout.offsets[index]
            if offset >= stop:
                break
            end = offset + self.layout.leaves[index].size_bytes
            if end > start:
                flat = self._leaves[index].host().reshape(-1).view(np.uint8).data
                found.append(flat[max(start - offset, 0) : min(end, stop) - offset])
            next_offset = (
                self.layout.offsets[index + 1] if index + 1 < len(self._leaves) else self.layout.total_bytes
            )
            padding = min(next_offset, stop) - max(end, start)
            if padding > 0:
                found.append(memoryview(_ZEROS)[:padding])
        return found

    def _leaf_at(self, position: int) -> int:
        """The last leaf that starts at or before `position`."""
        return max(0, int(np.searchsorted(self.layout.offsets, position, side="right")) - 1)


def checksum(pieces: Sequence[memoryview]) -> int:
    """xxh3 of a chunk: finds what a link or a bad memory did to it. It is no protection against an attacker."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()
