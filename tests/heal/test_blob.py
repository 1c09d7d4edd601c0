"""The run of bytes: both ends lay it out alike, and its chunks are exactly it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft._arrays._leaf_types import LeafType
from jaxft._heal import _blob
from jaxft._heal._blob import ALIGN_BYTES, Blob, BlobLayout, HostArray, Spoiled, blob_of

from .donors import MB, content, leaf_types, read, values

DTYPES = ["float32", "bfloat16", "bool", "int4", "float8_e4m3fn", "float64", "complex64", "uint8"]
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
BIG = st.integers(0, 3 * MB).map(lambda size: (size,))
LEAVES = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12)


def padded_run(arrays: list[np.ndarray]) -> bytes:
    """The same, as plain as possible."""
    run = b""
    for array in arrays:
        data = np.ascontiguousarray(array).tobytes()
        run += data + bytes(-len(data) % ALIGN_BYTES)
    return run


@pytest.fixture(params=[128, 4096, MB])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(_blob, "CHUNK_BYTES", request.param)
    return request.param


@pytest.mark.parametrize("size", [64, 128, 4096])
@settings(max_examples=60, deadline=None)
@given(leaves=LEAVES)
def test_the_pieces_of_all_chunks_are_the_padded_run(size: int, leaves: list) -> None:
    arrays = [values(shape, dtype, seed) for seed, (shape, dtype) in enumerate(leaves)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_blob, "CHUNK_BYTES", size)
        blob = blob_of(arrays)
        assert blob.layout.total_bytes % ALIGN_BYTES == 0
        assert content(blob) == padded_run(arrays)
        for chunk in range(blob.layout.chunks):
            assert sum(piece.nbytes for piece in blob.read(chunk)) == blob.layout.span_of(chunk)[1]


@settings(max_examples=8, deadline=None)
@given(leaves=st.lists(st.tuples(BIG | SHAPES, st.just("uint8")), min_size=1, max_size=4))
def test_leaves_larger_than_a_chunk(leaves: list) -> None:
    arrays = [values(shape, dtype, seed) for seed, (shape, dtype) in enumerate(leaves)]
    assert content(blob_of(arrays)) == padded_run(arrays)


@settings(max_examples=60, deadline=None)
@given(leaves=LEAVES)
def test_a_run_becomes_the_same_leaves_again(leaves: list) -> None:
    arrays = [values(shape, dtype, seed) for seed, (shape, dtype) in enumerate(leaves)]
    layout = BlobLayout.of(leaf_types(*leaves))
    arena = np.frombuffer(padded_run(arrays), np.uint8)
    for view, array in zip(layout.arrays(arena), arrays, strict=True):
        assert view.shape == array.shape
        assert view.dtype == array.dtype
        assert view.tobytes() == array.tobytes()
        assert not view.size or np.shares_memory(view, arena)


@settings(max_examples=60, deadline=None)
@given(leaves=LEAVES)
def test_every_leaf_is_aligned_and_none_overlap(leaves: list) -> None:
    layout = BlobLayout.of(leaf_types(*leaves))
    position = 0
    for leaf, offset, end in zip(layout.leaves, layout.offsets, layout.ends, strict=True):
        assert offset % ALIGN_BYTES == 0
        assert position <= offset < position + ALIGN_BYTES
        assert end == offset + leaf.size_bytes
        position = end
    assert layout.total_bytes - position < ALIGN_BYTES


def test_no_leaves_are_no_chunks() -> None:
    assert BlobLayout.of([]).chunks == 0
    assert BlobLayout.of(leaf_types(((0, 5), "float32"), ((3, 0), "int8"))).chunks == 0
    assert BlobLayout.of([]).arrays(np.empty(0, np.uint8)) == []


def test_a_scalar_is_one_chunk_of_one_line() -> None:
    blob = blob_of([np.float32(1.5)])
    assert (blob.layout.chunks, blob.layout.total_bytes) == (1, 64)
    assert content(blob) == np.float32(1.5).tobytes() + bytes(60)


@pytest.mark.parametrize("size", [MB - 1, MB, MB + 1, 2 * MB])
def test_sizes_around_a_chunk(size: int) -> None:
    arrays = [values((size,), "uint8"), values((5,), "uint8", 1)]
    blob = blob_of(arrays)
    assert content(blob) == padded_run(arrays)
    assert blob.layout.chunks == -(-len(padded_run(arrays)) // MB)


def test_a_chunk_reads_only_the_leaves_that_lie_in_it(chunk_bytes: int) -> None:
    seen: list[int] = []

    class Noted(HostArray):
        def __init__(self, number: int, array: np.ndarray) -> None:
            super().__init__(array)
            self.number = number

        def flat(self) -> memoryview:
            seen.append(self.number)
            return super().flat()

    sizes = [0, 100, 0, chunk_bytes, 64, 0, 3 * chunk_bytes + 7, 0, 1, 0]
    layout = BlobLayout.of(leaf_types(*(((size,), "uint8") for size in sizes)))
    blob = Blob(layout, [Noted(n, np.zeros(size, np.uint8)) for n, size in enumerate(sizes)])
    for chunk in range(layout.chunks):
        seen.clear()
        read(blob, chunk)
        start, length = layout.span_of(chunk)
        lie_in_it = [
            number
            for number, (offset, end) in enumerate(zip(layout.offsets, layout.ends, strict=True))
            if max(offset, start) < min(end, start + length)
        ]
        assert seen == lie_in_it


def test_views_are_served_where_they_lie() -> None:
    array = values((1000,), "bfloat16")
    pieces = blob_of([array]).read(0)
    assert np.shares_memory(np.frombuffer(pieces[0], np.uint8), array)


@pytest.mark.parametrize(
    "array", [values((30, 40)).T, values((9, 8, 7)).transpose(1, 2, 0), values((64, 6))[::2, ::-1]]
)
def test_any_memory_order_is_served_in_c_order(array: np.ndarray) -> None:
    assert not array.flags.c_contiguous
    assert content(blob_of([array])) == padded_run([array])


def test_a_source_that_was_overwritten_spoils_its_chunks_only() -> None:
    class Overwritten(HostArray):
        def intact(self) -> bool:
            return False

    good, bad = np.zeros(MB, np.uint8), np.zeros(10, np.uint8)
    layout = BlobLayout.of(leaf_types(((MB,), "uint8"), ((10,), "uint8")))
    blob = Blob(layout, [HostArray(good), Overwritten(bad)])
    read(blob, 0)
    with pytest.raises(Spoiled, match="chunk 1 was overwritten"):
        read(blob, 1)


def test_the_layout_needs_nothing_but_types() -> None:
    """bfloat16 is known by its name, whatever was imported before."""
    assert LeafType((3, 2), "bfloat16").size_bytes == 12
    assert LeafType((), "float32").size_bytes == 4
    assert LeafType((5, 0), "int64").size_bytes == 0
