"""Host memory for contributions and results: aligned, in huge pages, recycled.

Fresh memory costs as much as the transfer that fills it (page faults), so big blocks are reused at the next
step. A block is recycled when the *root array* over it dies. Every view of it, and every `jax.Array` that aliases
such a view without a copy, holds a reference to that root array, so a block can never be rewritten while it is still
read; there is no manual reference counting, and nothing has to be released explicitly.

A heal takes more blocks than a step: donors keep the results of several steps. Blocks that no step takes again are
unmapped after some minutes.
"""

import contextlib
import mmap
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxft._arrays._layout import Layout

# A numpy buffer at a multiple of this becomes a CPU `jax.Array` without a copy.
ALIGN_BYTES = 64

# Below this size the allocator is fast and its memory warm; above it page faults dominate.
_POOLED_BYTES = 1 << 20

_MOST_IDLE = 16

# A block that has waited this long, while this many others were taken, is not needed from step to step. Neither alone
# is proof: a step may take many blocks before it takes this block, and it may be long.
_STALE_S = 600.0
_STALE_TAKES = 4 * _MOST_IDLE


class _Idle(NamedTuple):
    block: mmap.mmap
    since_s: float  # when it was recycled
    takes: int  # how many had been taken before


# Blocks waiting for reuse; the oldest is unmapped first. A step uses only a few sizes (a contribution and a result
# for each dtype), and at most as many blocks wait here as were in use at the same time.
_idle: deque[_Idle] = deque(maxlen=_MOST_IDLE)
_takes = 0


def aligned_empty(size_bytes: int) -> np.ndarray:
    """Allocate uninitialised bytes, 64-byte aligned. Big blocks are recycled once no view of them is left."""
    if size_bytes < _POOLED_BYTES:
        raw = np.empty(size_bytes + ALIGN_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGN_BYTES
        return raw[start : start + size_bytes]
    block = _take_idle(size_bytes) or _map(size_bytes)
    array = np.frombuffer(block, np.uint8, count=size_bytes)
    recycle = weakref.finalize(array, _recycle, block)
    recycle.atexit = False
    return array


def not_idle(sizes_bytes: Iterable[int]) -> list[int]:
    """The sizes of which no block waits for reuse, so that its memory would be fresh."""
    pooled = [size for size in sizes_bytes if size >= _POOLED_BYTES]
    taken = [_take_idle(size) for size in pooled]
    for block in taken:
        if block is not None:
            _recycle(block)
    return [size for size, block in zip(pooled, taken, strict=True) if block is None]


def touch_ahead(sizes_bytes: Iterable[int]) -> None:
    """Have a new block of each size wait for reuse, with its pages in memory. For a background thread.

    Raises OSError or MemoryError if there is no memory.
    """
    for size in sizes_bytes:
        _recycle(_touched(_map(size)))


def result_regions(layout: Layout) -> tuple[np.ndarray, ...]:
    """One uninitialised array for each region of the layout, for means and sums."""
    sizes = result_bytes(layout)
    return tuple(
        aligned_empty(size).view(region.result_dtype)
        for size, region in zip(sizes, layout.regions, strict=True)
    )


def result_bytes(layout: Layout) -> list[int]:
    """The size of each of these arrays."""
    return [region.size * region.result_item_bytes for region in layout.regions]


def leaves_of(layout: Layout, regions: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """The leaves in these regions, as views with their own shapes, in the order of the layout."""
    return [
        regions[extent.region][extent.offset : extent.stop].reshape(spec.shape)
        for spec, extent in zip(layout.specs, layout.extents, strict=True)
    ]


def _recycle(block: mmap.mmap) -> None:
    _idle.append(_Idle(block, time.monotonic(), _takes))


def _take_idle(size_bytes: int) -> mmap.mmap | None:
    # Only popleft and append, which are atomic: another thread may recycle a block at any moment, and so may a
    # garbage collection during this very function. Either would break an iteration, and a lock would not prevent the
    # latter.
    global _takes
    _takes += 1  # two threads at once may count as one
    found: mmap.mmap | None = None
    for _ in range(len(_idle)):
        try:
            idle = _idle.popleft()
        except IndexError:  # another thread took it
            break
        if found is None and len(idle.block) == size_bytes:
            found = idle.block
        elif not _is_stale(idle):
            _idle.append(idle)
    return found


def _is_stale(idle: _Idle) -> bool:
    return _takes - idle.takes > _STALE_TAKES and time.monotonic() - idle.since_s > _STALE_S


def _map(size_bytes: int) -> mmap.mmap:
    # Private: shared anonymous memory would be tmpfs, which gets no huge pages here.
    block = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _touched(block: mmap.mmap) -> mmap.mmap:
    np.frombuffer(block, np.uint8)[:: mmap.PAGESIZE] = 0
    return block
