"""The arithmetic of means and sums, which numpy defines.

One rule. Contributions are added in the order of the tree (`_tree.py`) in the accumulation dtype: float32
for bfloat16 and float16, a leaf's own dtype otherwise. For a mean, the root is divided by the number of shards,
a true division in the accumulation dtype. The result is rounded once to the leaf's dtype. Every sum, of one group or
of many, by chunk or as a whole, at once or by rows first, ends in `combine_into`, so the bits cannot differ. The
compiled lane (`_compiled.py`) does the same faster; this is its definition.

Three things could break that. The processor has a mode for each thread: a library that was built with -Ofast has
denormals set to zero in the thread that loads it, and in the threads that this one starts. So `usual_floats` sets
the mode around whatever sums, in both lanes. XLA may flush denormals where numpy does not, so it adds only on
devices that have been seen to add as numpy does (`_device_sums.py`), and never on CPU. And which of two NaNs survives
an addition depends on where the element is in numpy's loop (the vectorised body and the tail disagree), and so on how
the work was divided: every NaN of a result is replaced by the one quiet NaN. Integers have none of these problems;
they are exact and wrap around.

A region of the operation "max" has the larger of two values in place of their sum.
"""

import contextlib
import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxft._arrays._layout import Operation, Region
from jaxft._errors import ConfigurationError
from jaxft._exchange import _compiled
from jaxft._exchange._tree import Node, root

# Work in blocks that fit into the cache, so that the division and the check for NaN read the sum from there. 64 MB of
# float32 take 38 ms in blocks of 128 K elements, 47 ms in 32 K, 88 ms in 8 K (overhead of calls); a bare add 23 ms.
BLOCK_ELEMENTS = 1 << 17

# Of libm. PyDLL: these calls take less time than giving up the interpreter's lock.
_LIBM = ctypes.PyDLL("libm.so.6")
_LIBM.fesetenv.argtypes = _LIBM.fegetenv.argtypes = [ctypes.c_void_p]
# FE_DFL_ENV of fenv.h, on x86 and Arm: rounds to nearest, traps nothing, keeps denormals.
_USUAL = ctypes.c_void_p(-1)
# An fenv_t has 32 bytes on x86, and 8 on Arm.
_FENV_BYTES = 64


@contextlib.contextmanager
def usual_floats() -> Iterator[None]:
    """Within the context, this thread's floating-point arithmetic is IEEE 754's, denormals included."""
    before = ctypes.create_string_buffer(_FENV_BYTES)
    _LIBM.fegetenv(before)
    _LIBM.fesetenv(_USUAL)
    try:
        yield
    finally:
        _LIBM.fesetenv(before)


def check_floats() -> None:
    """Raise ConfigurationError if arithmetic in this thread sets denormals to zero."""
    least = np.array([2.0**-149], np.float32)
    if (least + least).view(np.int32)[0] == 2:  # a comparison of denormals would take them as zeros, too
        return
    raise ConfigurationError(
        "NumPy sets denormal numbers to zero in this thread, so this group would not compute the same bits as "
        "others. A library that was built with -Ofast or -ffast-math has set this mode when it was loaded. Build it "
        "without these, or import it in another thread first."
    )


def add_into(
    out: np.ndarray,
    offsets: Sequence[int],
    lefts: Sequence[np.ndarray],
    rights: Sequence[np.ndarray],
    operation: Operation = "sum",
) -> None:
    """Add two contributions or partial sums, pair by pair of their flat leaves, in the dtype of `out`."""
    add = _adder(operation)
    with np.errstate(all="ignore"):  # infinities are the caller's data, not an error here
        for offset, left, right in zip(offsets, lefts, rights, strict=True):
            add(left, right, out=out[offset : offset + left.size], dtype=out.dtype)


def combine_into(out: np.ndarray, sources: Mapping[Node, np.ndarray], shards: int, region: Region) -> None:
    """Write the mean or the sum over all shards to `out`.

    Args:
        out: the destination, in the dtype of results. No source may overlap it, except that the first or the
            second node in order may *be* it (received in place, which saves the cache a third array): both
            are consumed before `out` is written, since the first is the left end of the tree and the second
            the left end of its sibling.
        sources: the values of the nodes that members hold: together the leaves of a tree whose root is all shards.
            Each is in the dtype of `out` (a single contribution) or in the accumulation dtype (a partial sum).
        shards: the number of all shards.
        region: the region that `out` belongs to, which has the operation and the accumulation dtype.
    """
    add = _adder(region.operation)
    in_place = out.dtype == np.dtype(region.sum_dtype)
    divisor = shards if region.operation == "mean" else None
    slots = [np.empty(0 if in_place else min(BLOCK_ELEMENTS, out.size), region.sum_dtype)]
    with np.errstate(all="ignore"):
        for start in range(0, out.size, BLOCK_ELEMENTS):
            block = out[start : start + BLOCK_ELEMENTS]
            parts = {node: source[start : start + BLOCK_ELEMENTS] for node, source in sources.items()}
            slots[0] = block if in_place else slots[0][: block.size]
            total = _sum(root(shards), parts, slots, 0, add)
            _finish(block, total, divisor, slots[0])


def sum_into(
    out: np.ndarray, sources: Mapping[Node, np.ndarray], top: Node, operation: Operation = "sum"
) -> None:
    """Write the sum of a node to `out`, as a partial sum for another exchange.

    Args:
        out: the destination, in the accumulation dtype, or in the leaves' own if `top` is one shard. No source may
            overlap it.
        sources: the values of the nodes that members hold: together the leaves of a tree whose root is `top`; as in
            `combine_into`.
        top: the node.
        operation: of the region.
    """
    if top in sources:
        np.copyto(out, sources[top])
        return
    with np.errstate(all="ignore"):
        for start in range(0, out.size, BLOCK_ELEMENTS):
            parts = {node: source[start : start + BLOCK_ELEMENTS] for node, source in sources.items()}
            _sum(top, parts, [out[start : start + BLOCK_ELEMENTS]], 0, _adder(operation))


def _finish(out: np.ndarray, total: np.ndarray, divisor: int | None, scratch: np.ndarray) -> None:
    if divisor is not None:
        _divide(total, divisor, scratch)
    elif not np.may_share_memory(total, scratch):  # a single source was the whole sum
        np.copyto(scratch, total)
    if scratch.dtype.kind == "f" and math.isnan(np.maximum.reduce(scratch)):
        scratch[np.isnan(scratch)] = np.nan
    if scratch is not out:
        np.copyto(out, scratch, casting="same_kind")


def _divide(total: np.ndarray, divisor: int, out: np.ndarray) -> None:
    """Divide. For a power of two, multiply by the reciprocal: the same bits in half the time.

    The reciprocal of a power of two is exact, so quotient and product round the same real number, denormals included.
    """
    if divisor.bit_count() == 1:
        np.multiply(total, out.dtype.type(1 / divisor), out=out, dtype=out.dtype)
    else:
        np.divide(total, out.dtype.type(divisor), out=out, dtype=out.dtype)


def _adder(operation: Operation) -> np.ufunc:
    return np.maximum if operation == "max" else np.add


def _sum(
    node: Node, parts: Mapping[Node, np.ndarray], slots: list[np.ndarray], depth: int, add: np.ufunc
) -> np.ndarray:
    """The sum of a node: the part itself, or computed into slot `depth`, using deeper slots as scratch."""
    part = parts.get(node)
    if part is not None:
        return part
    first, second = node.children
    left = _sum(first, parts, slots, depth, add)
    right = _sum(second, parts, slots, depth + 1, add)
    while depth >= len(slots):
        slots.append(np.empty_like(slots[0], shape=(slots[0].size,)))
    out = slots[depth][: left.size]
    return add(left, right, out=out, dtype=out.dtype)


def combine_by_lane(out: np.ndarray, sources: Mapping[Node, np.ndarray], shards: int, region: Region) -> None:
    """As `combine_into`, by the compiled lane where there is one."""
    library = _compiled.library()
    if library is None:
        combine_into(out, sources, shards, region)
    else:
        library.combine_into(out, sources, shards, region)


def add_by_lane(
    out: np.ndarray,
    offsets: Sequence[int],
    lefts: Sequence[np.ndarray],
    rights: Sequence[np.ndarray],
    region: Region,
) -> None:
    """As `add_into`, for a region, by the compiled lane where there is one."""
    library = _compiled.library()
    if library is None:
        add_into(out, offsets, lefts, rights, region.operation)
    else:
        library.add_into(out, offsets, lefts, rights, region)
