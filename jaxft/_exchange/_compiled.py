"""The compiled lane: `lane/*.c`, loaded with ctypes if it was built for this machine.

Everything it does, Python does too, with the same bits; Python is its definition in the tests. ctypes releases the
interpreter's lock during each call, so neither side delays the other.
"""

import ctypes
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxft._arrays._layout import Region
from jaxft._exchange import _lane_structs
from jaxft._exchange._frames import HEADER_BYTES
from jaxft._exchange._tree import Node, root
from jaxft._transport._seals import KEY_BYTES, Macs

_log = logging.getLogger("jaxft")

PATH = Path(__file__).with_name("liblane.so")

# The codes of lane.h. Unsigned integers are summed like signed ones: both wrap around.
_CODES = {"bfloat16": 0, "float16": 1, "float32": 2, "float64": 3, "int32": 4, "uint32": 4, "int64": 5}
_NARROW_CODES = {"widened": 6, "max": 7}


@dataclass(frozen=True)
class Library:
    """The loaded lane.

    Attributes:
        c: its functions.
        instructions: its instruction set: "baseline", "avx2" or "avx512".
        macs: its instruction for MACs: "pclmul", "vpclmul" or "pmull"; None: this machine has none of them.
    """

    c: ctypes.CDLL
    instructions: str
    macs: str | None

    @staticmethod
    def load(path: Path, instructions: str | None = None) -> "Library":
        """Load the lane, for the best instruction set of this machine or the named one.

        Raises:
            OSError: there is no library at `path`, or it was built for another machine or from other sources.
            ValueError: this machine does not have the instruction set.
        """
        c = ctypes.CDLL(str(path))
        _check(c, path)
        c.lane_use.restype = c.lane_macs_name.restype = ctypes.c_char_p
        used = c.lane_use(instructions.encode() if instructions else None)
        if used is None:
            raise ValueError(f"This machine does not have the instruction set {instructions!r}.")
        c.lane_open.restype = ctypes.c_void_p
        c.lane_open.argtypes = [ctypes.c_void_p]
        c.lane_close.argtypes = [ctypes.c_void_p]
        c.lane_turn.argtypes = [ctypes.c_void_p, ctypes.c_double]
        c.lane_looks.argtypes = c.lane_why.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        c.lane_live.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double]
        c.lane_live.restype = None
        c.lane_combine.argtypes = [
            *(ctypes.c_int, ctypes.c_double, ctypes.c_void_p, ctypes.c_size_t),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
        ]
        c.lane_sum.argtypes = [
            *(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
        ]
        c.lane_add_pairs.argtypes = [
            *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_size_t),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
        ]
        c.lane_mac.argtypes = [
            *(ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p),
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p),
        ]
        macs = c.lane_macs_name()
        return Library(c, used.decode(), macs and macs.decode())

    def live(self, fd: int, stop_fd: int, interval_s: float) -> None:
        """Write a byte to a socket at each interval, without Python's lock, until `stop_fd` is readable."""
        self.c.lane_live(fd, stop_fd, interval_s)

    def mac(self, key: bytes, count: int, header: bytes, payload: np.ndarray) -> bytes:
        """The twin of `Macs.tag`, for a frame of this sequence number."""
        assert self.macs is not None
        assert (len(key), len(header)) == (KEY_BYTES, HEADER_BYTES)
        assert payload.flags.c_contiguous
        tag = ctypes.create_string_buffer(Macs.size_bytes)
        failed = self.c.lane_mac(key, count, header, address(payload), payload.nbytes, tag)
        assert not failed
        return tag.raw

    def combine_into(
        self, out: np.ndarray, sources: Mapping[Node, np.ndarray], shards: int, region: Region
    ) -> None:
        """The twin of `_reduce.combine_into`."""
        assert out.dtype == region.result_dtype
        tree = self._tree(out, sources, root(shards), region)
        failed = self.c.lane_combine(code(region), divisor(region, shards), *tree)
        assert not failed, f"{sorted(sources)} of {shards} shards is not a tree of sums"

    def sum_into(
        self, out: np.ndarray, sources: Mapping[Node, np.ndarray], top: Node, region: Region
    ) -> None:
        """The twin of `_reduce.sum_into`."""
        assert out.dtype == (region.dtype if top.size == 1 else region.sum_dtype)
        failed = self.c.lane_sum(code(region), *self._tree(out, sources, top, region))
        assert not failed, f"{sorted(sources)} of {top} is not a tree of sums"

    def _tree(
        self, out: np.ndarray, sources: Mapping[Node, np.ndarray], top: Node, region: Region
    ) -> tuple[object, ...]:
        """What `lane_combine` and `lane_sum` take of sources and where their sum goes."""
        nodes = tuple(sorted(sources))
        arrays = [sources[node] for node in nodes]
        assert all(each.flags.c_contiguous and each.size == out.size for each in (out, *arrays))
        assert all(array.dtype in (region.dtype, region.sum_dtype) for array in arrays)
        summed = bytes(array.dtype == region.sum_dtype for array in arrays)
        pointers = (ctypes.c_void_p * len(arrays))(*map(address, arrays))
        program = tree_program(nodes, top)
        return address(program), program.size, pointers, summed, address(out), out.size

    def add_into(
        self,
        out: np.ndarray,
        offsets: Sequence[int],
        lefts: Sequence[np.ndarray],
        rights: Sequence[np.ndarray],
        region: Region,
    ) -> None:
        """The twin of `_reduce.add_into`; which of two NaNs survives may differ."""
        assert out.dtype == region.sum_dtype
        assert out.flags.c_contiguous
        if not lefts:
            return
        # All leaves of a node have one dtype. With thousands of leaves, each call for one would cost.
        left, right = lefts[0].dtype, rights[0].dtype
        assert {left, right} <= {np.dtype(region.dtype), np.dtype(region.sum_dtype)}
        starts, sizes = np.array(offsets, np.uint64), np.fromiter((each.size for each in lefts), np.uint64)
        assert all(
            one.dtype == left and other.dtype == right and one.size == other.size
            for one, other in zip(lefts, rights, strict=True)
        )
        assert all(each.flags.c_contiguous for arrays in (lefts, rights) for each in arrays)
        assert starts.size == sizes.size
        assert (starts + sizes).max() <= out.size
        pointers = [np.fromiter(map(address, arrays), np.uint64) for arrays in (lefts, rights)]
        failed = self.c.lane_add_pairs(
            code(region),
            left == region.sum_dtype,
            right == region.sum_dtype,
            sizes.size,
            *map(address, (*pointers, sizes, starts, out)),
        )
        assert not failed, f"a {left} on the left and a {right} on the right is not in the tree"


@functools.cache
def library() -> Library | None:
    """The compiled lane, or None where it was not built for this machine."""
    if not PATH.exists():
        return None
    try:
        return Library.load(PATH)
    except OSError as error:
        _log.warning("The exchange uses Python, since the compiled lane cannot be used: %s", error)
        return None


def describe() -> str:
    """Which lane is in use, for people."""
    found = library()
    if found is None:
        return "Python"
    return f"compiled ({found.instructions}; MACs: {found.macs or 'Python'})"


def _check(c: ctypes.CDLL, path: Path) -> None:
    codes = {*_CODES.values(), *_NARROW_CODES.values()}
    wanted = [*(ctypes.sizeof(each) for each in _lane_structs.ALL), len(codes)]
    sizes = (ctypes.c_uint32 * len(wanted))()
    if not hasattr(c, "lane_sizes"):
        raise OSError(f"{path} is not a compiled lane.")
    c.lane_sizes(sizes)
    if list(sizes) != wanted or not hasattr(c, "lane_live"):
        raise OSError(
            f"{path} was built from other sources than this Python: run `make setup`, or install again."
        )


def code(region: Region) -> int:
    """The code of lane.h for the arithmetic of a region."""
    return _NARROW_CODES.get(region.operation) or _CODES[region.dtype]


def divisor(region: Region, shards: int) -> float:
    """The divisor of a sum; 0: it is not divided."""
    return float(shards) if region.operation == "mean" else 0.0


def address(array: np.ndarray) -> int:
    """The address of an array's first element. The caller keeps the array."""
    return array.__array_interface__["data"][0]


@functools.lru_cache(maxsize=64)
def tree_program(nodes: tuple[Node, ...], top: Node) -> np.ndarray:
    """The tree below a node in postfix order: the number of a node, or -1 for the sum of the last two."""
    number = {node: at for at, node in enumerate(nodes)}

    def steps(node: Node) -> list[int]:
        if node in number:
            return [number[node]]
        left, right = node.children
        return [*steps(left), *steps(right), -1]

    return np.array(steps(top), np.int32)
