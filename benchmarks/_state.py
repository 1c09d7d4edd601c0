"""A state to heal: leaves of mixed sizes, their random values, and their checksums.

Workers of both sides use this, so it imports nothing but numpy, and both move the same bytes in the same leaves.
"""

import ctypes
import mmap
from collections.abc import Iterable, Iterator

import numpy as np

COPIES = 3  # the parameters, and an optimizer's two moments
# The biggest leaf of each copy (an embedding, say); the others share the rest.
_BIGGEST = 0.2
# How the rest is divided, over and over: a norm, a bias, matrices of a few shapes.
_WEIGHTS = (0.001, 0.01, 1.0, 1.0, 3.0, 8.0)
# A multiple of this many float32 makes views of whole uint64, which add up fast.
_ROUND = 16


def sizes(megabytes: float, leaves: int) -> list[int]:
    """How many float32 each leaf has: about `megabytes` in about `leaves` leaves."""
    rest = max(1, leaves // COPIES - 1)
    weights = [_WEIGHTS[number % len(_WEIGHTS)] for number in range(rest)]
    whole = megabytes * 1e6 / 4 / COPIES
    shares = [_BIGGEST, *((1 - _BIGGEST) * weight / sum(weights) for weight in weights)]
    return [max(1, round(whole * share / _ROUND)) * _ROUND for share in shares] * COPIES


def values(sizes_: Iterable[int], seed: int) -> Iterator[np.ndarray]:
    """Random leaves, the same for the same seed."""
    random = np.random.default_rng(seed)
    for size in sizes_:
        yield random.random(size, np.float32)


def sums(leaves: Iterable[np.ndarray]) -> list[int]:
    """For each leaf, the sum of its bytes as uint64: a flipped bit, or a leaf in another's place, changes them."""
    return [int(np.add.reduce(leaf.reshape(-1).view(np.uint64), dtype=np.uint64)) for leaf in leaves]


def make_memory_fresh(size_bytes: int) -> None:
    """Return freed memory to the system, and make sure that the machine has enough free memory ready.

    A real joiner has just started, so it receives into fresh pages: none may be left over from the last round. And a
    virtual machine returns unused memory to its host, and gets it back at many times the cost of a transfer. So the
    memory is touched and freed here, before the round begins.
    """
    ctypes.CDLL(None).malloc_trim(0)
    size_bytes += size_bytes // 2
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.madvise(mmap.MADV_HUGEPAGE)
        for position in range(0, size_bytes, mmap.PAGESIZE):
            block[position] = 1
