"""How a state is divided among its donors: alike at both ends, and each part kept by one donor."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxft_protocol.messages import WHOLE, Stripe

from jaxft._arrays._leaf_types import LeafType
from jaxft._heal import _blob
from jaxft._heal._blob import BANDS, EVERYWHERE, UNDIVIDED_BYTES, Blob, BlobLayout, HostArray, bands_of, keeps

from .donors import MB, content, values

SIZES = st.lists(st.integers(0, 40), max_size=30)
COUNTS = (1, 2, 3, 4, 7)


def of_sizes(*sizes: int) -> list[LeafType]:
    return [LeafType((size,), "uint8") for size in sizes]


@pytest.fixture(autouse=True)
def _small_states_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blob, "UNDIVIDED_BYTES", 0)


def kept_bytes(sizes: list[int], stripe: Stripe) -> int:
    bands = bands_of(of_sizes(*sizes))
    return sum(size for size, band in zip(sizes, bands, strict=True) if keeps(stripe, band))


@pytest.mark.parametrize("count", COUNTS)
@settings(max_examples=60, deadline=None)
@given(sizes=SIZES)
def test_each_leaf_is_kept_by_one_donor_and_none_keeps_much_more_than_its_share(
    count: int, sizes: list[int]
) -> None:
    bands = bands_of(of_sizes(*sizes))
    stripes = [Stripe(number, count) for number in range(count)]
    assert bands == sorted(bands)
    if any(sizes):
        assert all(sum(keeps(stripe, band) for stripe in stripes) == 1 for band in bands)
    kept = [kept_bytes(sizes, stripe) for stripe in stripes]
    share = sum(sizes) * -(-BANDS // count) / BANDS
    assert max(kept) <= share + max(sizes, default=0)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_equal_leaves_are_divided_evenly(count: int) -> None:
    assert {kept_bytes([5] * 24, Stripe(number, count)) for number in range(count)} == {120 // count}


@pytest.mark.parametrize("count", COUNTS)
def test_fewer_leaves_than_donors_leave_some_donors_nothing(count: int) -> None:
    kept = [kept_bytes([7], Stripe(number, count)) for number in range(count)]
    assert sorted(kept) == [0] * (count - 1) + [7]


def test_leaves_without_bytes_lie_anywhere() -> None:
    assert bands_of(of_sizes(0, 9, 0, 0, 9, 0)) == [0, 3, 6, 6, 9, 11]
    assert bands_of(of_sizes(0, 0)) == [EVERYWHERE] * 2
    assert bands_of([]) == []


def test_a_small_state_is_kept_by_each_donor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blob, "UNDIVIDED_BYTES", UNDIVIDED_BYTES)
    half = UNDIVIDED_BYTES // 2
    assert bands_of(of_sizes(half, half)) == [EVERYWHERE] * 2
    assert bands_of(of_sizes(half, half + 1)) == [2, 8]
    assert all(keeps(Stripe(number, 4), EVERYWHERE) for number in range(4))


def test_one_donor_keeps_all() -> None:
    assert all(keeps(WHOLE, band) for band in (EVERYWHERE, *range(BANDS)))


# ---- chunks ----


@pytest.mark.parametrize("chunk_bytes", [64, 128, 4096])
@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 700), max_size=20))
def test_a_chunk_lies_in_one_band_and_all_chunks_are_the_run(chunk_bytes: int, sizes: list[int]) -> None:
    arrays = [values((size,), "uint8", seed) for seed, size in enumerate(sizes)]
    types = of_sizes(*sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxft._heal._blob.CHUNK_BYTES", chunk_bytes)
        bands = bands_of(types)
        divided = BlobLayout.of(types, bands)
        whole = BlobLayout.of(types)
        sources = [HostArray(array) for array in arrays]
        assert content(Blob(divided, sources)) == content(Blob(whole, sources))
        assert whole.chunks <= divided.chunks <= whole.chunks + BANDS
        for chunk in range(divided.chunks):
            filled = [number for number in divided.leaves_in(chunk) if sizes[number]]
            assert {bands[number] for number in filled} == {divided.bands[chunk]}
            assert divided.span_of(chunk)[1] <= chunk_bytes


def test_a_chunk_ends_where_the_next_band_starts() -> None:
    layout = BlobLayout.of(of_sizes(MB + 1, MB), [0, 1])
    assert [layout.span_of(chunk) for chunk in range(layout.chunks)] == [(0, MB), (MB, 64), (MB + 64, MB)]
    assert layout.bands == (0, 0, 1)
