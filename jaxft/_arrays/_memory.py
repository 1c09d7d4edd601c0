"""Host memory for contributions and results: aligned, in huge pages, recycled.

Fresh memory costs as much as the transfer that fills it (page faults), so big blocks are reused at the next
step. A block is recycled when the *root array* over it dies. Every view of it, and every `jax.Array` that aliases
such a view without a copy, holds a reference to that root array, so a block can never be rewritten while it is still
read; there is no manual reference counting, and nothing has to be released explicitly.
"""

import contextlib
import mmap
import weakref
from collections import deque

import numpy as np

from jaxft._arrays._layout import Layout

# A numpy buffer at a multiple of this becomes a CPU `jax.Array` without a copy.
ALIGN_BYTES = 64

# Below this size the allocator is fast and its memory warm; above it page faults dominate.
_POOLED_BYTES = 1 << 20

# Blocks waiting for reuse; the oldest is unmapped first. A step uses only a few sizes (a contribution and a result
# for each dtype), and at most as many blocks wait here as were in use at the same time.
_idle: deque[mmap.mmap] = deque(maxlen=16)


def aligned_empty(size_bytes: int) -> np.ndarray:
    """Allocate uninitialised bytes, 64-byte aligned. Big blocks are recycled once no view of them is left."""
    if size_bytes < _POOLED_BYTES:
        raw = np.empty(size_bytes + ALIGN_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGN_BYTES
        return raw[start : start + size_bytes]
    block = _take_idle(size_bytes) or _map(size_bytes)
    array = np.frombuffer(block, np.uint8, count=size_bytes)
    recycle = weakref.finalize(array, _idle.append, block)
    recycle.atexit = False
    return array


def result_regions(layout: Layout) -> tuple[np.ndarray, ...]:
    """One uninitialised array for each region of the layout, for means and sums."""
    return tuple(
        aligned_empty(region.size * region.item_bytes).view(region.dtype) for region in layout.regions
    )


def leaves_of(layout: Layout, regions: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """The leaves in these regions, as views with their own shapes, in the order of the layout."""
    return [
        regions[extent.region][extent.offset : extent.stop].reshape(spec.shape)
        for spec, extent in zip(layout.specs, layout.extents, strict=True)
    ]


def _take_idle(size_bytes: int) -> mmap.mmap | None:
    # Only popleft and append, which are atomic: another thread may recycle a block at any moment, and so may a
    # garbage collection during this very function. Either would break an iteration, and a lock would not prevent the
    # latter.
    for _ in range(len(_idle)):
        try:
            block = _idle.popleft()
        except IndexError:  # another thread took it
            return None
        if len(block) == size_bytes:
            return block
        _idle.append(block)
    return None


def _map(size_bytes: int) -> mmap.mmap:
    # Private: shared anonymous memory would be tmpfs, which gets no huge pages here.
    block = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
