"""The compiled sums against numpy's: every bit, for every dtype, tree and instruction set."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft._arrays._layout import DTYPES, Region
from jaxft._exchange import _compiled, _reduce
from jaxft._exchange._tree import Node, cover

from .lanes import INSTRUCTIONS, any_bits, built, loaded

# Around the edges of vectors and of blocks.
SIZES = st.sampled_from([0, 1, 7, 15, 16, 17, 511, 512, 513, 1023, 1024, 1025, 2048, 3001])
KINDS = [(operation, dtype) for operation, dtypes in DTYPES.items() for dtype in dtypes]


def nodes_of(owners: Sequence[int]) -> list[Node]:
    """What members with these shards hold, together."""
    total = len(owners)
    held = [[shard for shard in range(total) if owners[shard] == member] for member in range(4)]
    return sorted(node for shards in held for node in cover(shards, total))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(KINDS),
    SIZES,
    st.lists(st.integers(0, 3), min_size=1, max_size=17),
    st.integers(0, 2**32),
    st.data(),
)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_every_bit_is_numpys(
    instructions: str, kind: tuple, size: int, owners: list[int], seed: int, data: st.DataObject
) -> None:
    library = loaded(instructions)
    (operation, dtype), rng = kind, np.random.default_rng(seed)
    region = Region(dtype, size, operation)
    nodes = nodes_of(owners)
    sources = {node: any_bits(rng, dtype if node.size == 1 else region.sum_dtype, size) for node in nodes}
    wanted, got = np.empty(size, region.result_dtype), np.empty(size, region.result_dtype)
    _reduce.combine_into(wanted, sources, len(owners), region)
    in_place = data.draw(st.sampled_from([None, *nodes[:2]]))
    if in_place is not None and sources[in_place].dtype == got.dtype:
        got = sources[in_place] = sources[in_place].copy()
    library.combine_into(got, sources, len(owners), region)
    assert got.tobytes() == wanted.tobytes()


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    leaves=st.lists(st.tuples(SIZES, st.integers(0, 3)), min_size=1, max_size=5),
    shards=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    in_place=st.booleans(),
    seed=st.integers(0, 2**32),
)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_partial_sums_have_numpys_bits_but_for_nans(
    instructions: str,
    kind: tuple,
    leaves: list[tuple[int, int]],
    shards: tuple[int, int],
    *,
    in_place: bool,
    seed: int,
) -> None:
    """Leaf by leaf; what lies between them is not written to."""
    library = loaded(instructions)
    (operation, dtype), rng = kind, np.random.default_rng(seed)
    size = sum(map(sum, leaves))
    region = Region(dtype, size, operation)
    left, right = (any_bits(rng, dtype if held == 1 else region.sum_dtype, size) for held in shards)
    stops = [sum(map(sum, leaves[:count])) for count in range(1, len(leaves) + 1)]
    extents = [
        (stop - padding - length, length) for (length, padding), stop in zip(leaves, stops, strict=True)
    ]
    offsets = [offset for offset, _ in extents]
    wanted, got = (np.full(size, 7, region.sum_dtype) for _ in range(2))
    if in_place and left.dtype == got.dtype:
        got = left
        wanted = left.copy()
    lefts, rights = ([held[at : at + length] for at, length in extents] for held in (left, right))
    _reduce.add_into(wanted, offsets, [each.copy() for each in lefts], rights, region.operation)
    library.add_into(got, offsets, lefts, rights, region)
    if wanted.dtype.kind == "f":
        assert np.array_equal(np.isnan(got), np.isnan(wanted))
        got[np.isnan(got)] = wanted[np.isnan(wanted)] = 0
    assert got.tobytes() == wanted.tobytes()


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(KINDS),
    SIZES,
    st.lists(st.integers(0, 3), min_size=1, max_size=17),
    st.integers(0, 2**32),
)
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_sums_that_are_kept_have_numpys_bits_but_for_nans(
    instructions: str, kind: tuple, size: int, owners: list[int], seed: int
) -> None:
    """Up to any node that two of four members hold together, as in a row."""
    library = loaded(instructions)
    (operation, dtype), rng = kind, np.random.default_rng(seed)
    region, total = Region(dtype, size, operation), len(owners)
    row = [[shard for shard in range(total) if owners[shard] == member] for member in (0, 1)]
    held = [node for shards in row for node in cover(shards, total)]
    for top in cover([shard for shards in row for shard in shards], total):
        sources = {
            node: any_bits(rng, dtype if node.size == 1 else region.sum_dtype, size)
            for node in held
            if node.is_within(top)
        }
        wanted, got = (np.empty(size, dtype if top.size == 1 else region.sum_dtype) for _ in range(2))
        _reduce.sum_into(wanted, sources, top, region.operation)
        library.sum_into(got, sources, top, region)
        if top in sources:
            assert got.tobytes() == wanted.tobytes() == sources[top].tobytes()
        elif wanted.dtype.kind == "f":
            assert np.array_equal(np.isnan(got), np.isnan(wanted))
            got[np.isnan(got)] = wanted[np.isnan(wanted)] = 0
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_every_half_there_is(instructions: str, dtype: str) -> None:
    library = loaded(instructions)
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for shards, divided in ((1, 1), (3, 3)):
        sources = {Node(shard, shard + 1): np.roll(every, 777 * shard) for shard in range(shards)}
        region = Region(dtype, every.size)
        wanted, got = np.empty_like(every), np.empty_like(every)
        _reduce.combine_into(wanted, sources, divided, region)
        library.combine_into(got, sources, divided, region)
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_rounding_at_and_around_every_tie(instructions: str, dtype: str) -> None:
    library = loaded(instructions)
    halves = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        ties = ((halves.astype(np.float64) + np.roll(halves, -1)) / 2).astype(np.float32)
    sums = np.concatenate(
        [(ties.view(np.uint32) + np.uint32(by % 2**32)).view(np.float32) for by in (-1, 0, 1)]
    )
    wanted, got = np.empty(sums.size, dtype), np.empty(sums.size, dtype)
    for out, combine in ((wanted, _reduce.combine_into), (got, library.combine_into)):
        combine(out, {Node(0, 2): sums}, 2, Region(dtype, sums.size, "sum"))
    assert got.tobytes() == wanted.tobytes()


def test_what_is_not_a_tree_is_refused_and_changes_nothing() -> None:
    c = loaded("baseline").c
    out = np.full(4, 7.0, np.float32)
    leaves = np.zeros((2, 4), np.float32)
    pointers = np.array([row.ctypes.data for row in leaves], np.uint64)
    for code, program, summed in (
        (0, [-1], [0, 0]),
        (0, [0, 1], [0, 0]),
        (0, [], [0, 0]),
        (0, [0] * 30 + [-1] * 29, [0, 0]),
        (0, [0, 1, -1], [0, 1]),
        (9, [0, 1, -1], [0, 0]),
        (-1, [0], [0, 0]),
    ):
        steps = np.array(program, np.int32)
        tree = (steps.ctypes.data, steps.size, pointers.ctypes.data, bytes(summed), out.ctypes.data, out.size)
        assert c.lane_combine(code, 1.0, *tree) == -1
        assert c.lane_sum(code, *tree) == -1
    sizes, offsets = np.array([4], np.uint64), np.array([0], np.uint64)
    pairs = (pointers[:1], pointers[1:], sizes, offsets, out)
    for code, left_summed, right_summed in ((0, 0, 1), (9, 0, 0), (-1, 1, 1)):
        assert (
            c.lane_add_pairs(code, left_summed, right_summed, 1, *(each.ctypes.data for each in pairs)) == -1
        )
    assert out.tolist() == [7.0] * 4


def test_a_library_that_is_not_there_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiled, "PATH", built().with_name("_nothing.so"))
    assert _compiled.library.__wrapped__() is None
    with pytest.raises(ValueError, match="does not have the instruction set 'neon9'"):
        _compiled.Library.load(built(), "neon9")
