"""The order of all elements of a contribution, in which groups sum.

Theory of operation. The arguments of `pmean` and `psum` in a step are a list of leaves. For the exchange they are
packed into one flat buffer for each dtype and operation, a *region*: its leaves in the order of the list, each
at an offset that is a multiple of 64 elements, so that every leaf is 64-byte aligned whatever its item size (an
aligned numpy buffer becomes a CPU `jax.Array` without a copy; the copy of 218 MB costs 120 ms). One big
buffer also beats many small ones on the wire: a hundred leaves of 1 KB cost 4 ms one by one.

A layout depends only on *global* shapes, never on a group's mesh: two groups with different meshes agree on the
position of each element (leaf, index), and so can sum. Groups compare `digest` before they exchange.

The padding between leaves is sent with them. It is zero in every contribution, so it stays zero in every sum.

This module is pure: it knows dtypes by name and imports neither numpy nor jax.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxft._errors import ConfigurationError

# Every leaf starts at a multiple of this many elements: a multiple of 64 bytes for any item size.
ALIGN_ELEMENTS = 64

# The result for a leaf: the sum over all shards, or the sum divided by their number. Two more carry quantised means
# (`_programs/_quantise.py`): the largest value, and a sum of int8 in int16, which cannot overflow.
Operation = Literal["mean", "sum", "max", "widened"]
# The most shards whose int8 values, from -127 to 127, have a sum that int16 holds.
MOST_WIDENED_SHARDS = 32767 // 127

# dtype of a leaf -> (bytes per item, dtype in which it is summed). The half precisions are summed in
# float32 and rounded once at the end; the others are summed as they are, integers with wrap-around.
_FLOATS: dict[str, tuple[int, str]] = {
    "bfloat16": (2, "float32"),
    "float16": (2, "float32"),
    "float32": (4, "float32"),
    "float64": (8, "float64"),
}
_INTEGERS: dict[str, tuple[int, str]] = {
    "int32": (4, "int32"),
    "int64": (8, "int64"),
    "uint32": (4, "uint32"),
}
_NARROW: dict[str, tuple[int, str]] = {"int8": (1, "int8"), "int16": (2, "int16")}
_DTYPES = _FLOATS | _INTEGERS | _NARROW
# The dtypes that an operation accepts.
DTYPES: dict[Operation, tuple[str, ...]] = {
    "mean": tuple(_FLOATS),
    "sum": tuple(_FLOATS | _INTEGERS),
    "max": ("int8",),
    "widened": ("int8",),
}


def sum_dtype(dtype: str, operation: Operation = "sum") -> str:
    """The dtype in which leaves of such a dtype are summed."""
    return "int16" if operation == "widened" else _DTYPES[dtype][1]


def result_dtype(dtype: str, operation: Operation) -> str:
    """The dtype of the result for a leaf of such a dtype."""
    return "int16" if operation == "widened" else dtype


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One leaf: its path in the pytree (for messages), global shape, dtype name and operation."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    operation: Operation = "mean"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def result_dtype(self) -> str:
        return result_dtype(self.dtype, self.operation)


@dataclass(frozen=True, slots=True)
class Extent:
    """The position of a leaf: `size` elements of a region, starting at `offset`."""

    region: int
    offset: int
    size: int

    @property
    def stop(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class Region:
    """The leaves of one dtype and operation, packed: `size` elements, padding included."""

    dtype: str
    size: int
    operation: Operation = "mean"

    @property
    def item_bytes(self) -> int:
        return _DTYPES[self.dtype][0]

    @property
    def sum_dtype(self) -> str:
        """The dtype in which this region is summed, and in which a sum of several shards is stored and sent."""
        return sum_dtype(self.dtype, self.operation)

    @property
    def result_dtype(self) -> str:
        return result_dtype(self.dtype, self.operation)

    @property
    def result_item_bytes(self) -> int:
        return _DTYPES[self.result_dtype][0]

    @property
    def sum_item_bytes(self) -> int:
        return _DTYPES[self.sum_dtype][0]

    @property
    def size_bytes(self) -> int:
        return self.size * self.item_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat, canonical element order of one list of leaves. Build it with `Layout.of`."""

    specs: tuple[LeafSpec, ...]
    extents: tuple[Extent, ...]  # one per leaf, in the order of the leaves
    regions: tuple[Region, ...]
    digest: str  # equal digests mean equal layouts

    @staticmethod
    def of(specs: Sequence[LeafSpec]) -> "Layout":
        """Lay out leaves. Raises ConfigurationError for a dtype that the operation does not accept."""
        order: dict[tuple[str, Operation], int] = {}
        sizes: list[int] = []
        extents: list[Extent] = []
        for spec in specs:
            _check(spec)
            region = order.setdefault((spec.dtype, spec.operation), len(sizes))
            if region == len(sizes):
                sizes.append(0)
            extents.append(Extent(region=region, offset=sizes[region], size=spec.size))
            sizes[region] = _aligned(sizes[region] + spec.size)
        regions = tuple(
            Region(dtype, sizes[region], operation) for (dtype, operation), region in order.items()
        )
        return Layout(specs=tuple(specs), extents=tuple(extents), regions=regions, digest=_digest(specs))

    @property
    def size_bytes(self) -> int:
        """Bytes of one contribution."""
        return sum(region.size_bytes for region in self.regions)

    def check_shards(self, shards: int) -> None:
        """Raise ConfigurationError for more shards than a region's sums can hold."""
        if shards > MOST_WIDENED_SHARDS and any(region.operation == "widened" for region in self.regions):
            raise ConfigurationError(too_many_shards(shards))

    def gaps(self) -> Iterator[Extent]:
        """The padding after each leaf that has any."""
        for extent in self.extents:
            padding = _aligned(extent.stop) - extent.stop
            if padding > 0:
                yield Extent(region=extent.region, offset=extent.stop, size=padding)


def too_many_shards(shards: int) -> str:
    return (
        f'jaxft.pmean(quantize="int8") adds in 16 bits, which hold the sum of {MOST_WIDENED_SHARDS} shards, and this '
        f"step has {shards}. Give each shard more rows of the batch, or average without quantize."
    )


def _check(spec: LeafSpec) -> None:
    assert all(extent >= 0 for extent in spec.shape)
    known = DTYPES[spec.operation]
    if spec.dtype not in known:
        raise ConfigurationError(
            f"Leaf {spec.path!r} has dtype {spec.dtype!r}, but p{spec.operation} takes only {', '.join(known)}. "
            "Convert the leaf first."
        )


def _aligned(elements: int) -> int:
    return -(-elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


def _digest(specs: Sequence[LeafSpec]) -> str:
    digest = hashlib.sha256(f"jaxft layout 2, align {ALIGN_ELEMENTS}".encode())
    for spec in specs:
        digest.update(
            f"\n{spec.path!r} {spec.operation} {spec.dtype} {','.join(map(str, spec.shape))}".encode()
        )
    return digest.hexdigest()
