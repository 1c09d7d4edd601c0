"""The arithmetic of means and sums: one rule, the same bits however the work is cut."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxft._arrays._layout import Operation, Region
from jaxft._exchange import _reduce
from jaxft._exchange._reduce import add_into, combine_into
from jaxft._exchange._tree import Node, cover

from .members import reference_sum

# Any bits at all: normal numbers, denormals, infinities, NaNs with any payload and sign.
ANY_BITS = st.integers(0, 2**32 - 1) | st.sampled_from(
    [
        0x7FC00001,
        0xFFC00002,
        0x7F800001,
        0x7F800000,
        0xFF800000,
        0x00000001,
        0x80000001,
        0x80000000,
        0x007FFFFF,
    ]
)


def any_floats(count: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.uint32, (count, 75), elements=ANY_BITS, fill=ANY_BITS).map(lambda a: a.view(np.float32))


def singles(values: np.ndarray) -> dict[Node, np.ndarray]:
    return {Node(k, k + 1): value for k, value in enumerate(values)}


def combine(
    out: np.ndarray, sources: dict[Node, np.ndarray], shards: int, operation: Operation = "mean"
) -> None:
    combine_into(out, sources, shards, Region(out.dtype.name, out.size, operation))


def result(values: np.ndarray, operation: Operation, dtype: str = "float32") -> np.ndarray:
    out = np.empty(values.shape[1:], dtype)
    combine(out, singles(values), len(values), operation)
    return out


def mean(values: np.ndarray, out_dtype: str = "float32") -> np.ndarray:
    return result(values, "mean", out_dtype)


@settings(deadline=None)
@given(st.integers(1, 9).flatmap(any_floats))
def test_bits_are_those_of_the_rule(values: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        wanted = reference_sum(list(values)) / np.float32(len(values))
    wanted[np.isnan(wanted)] = np.nan
    assert mean(values).tobytes() == wanted.tobytes()


@settings(deadline=None)
@given(st.integers(1, 5).flatmap(any_floats), st.integers(1, 74), st.sampled_from([1, 3, 16, 1 << 17]))
def test_bits_do_not_depend_on_how_the_work_is_cut(values: np.ndarray, cut: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_reduce, "BLOCK_ELEMENTS", block)
        pieces = [mean(values[:, :cut]), mean(values[:, cut:])]
    assert np.concatenate(pieces).tobytes() == mean(values).tobytes()


def test_two_nans_that_numpy_tells_apart_by_their_place() -> None:
    # Alone, numpy keeps the first NaN in the vectorised body of its loop and the second in the tail.
    one = np.full(1037, 0x7FC00001, np.uint32).view(np.float32)
    other = np.full(1037, 0xFFC00002, np.uint32).view(np.float32)
    result = mean(np.stack([one, other]))
    assert set(result.view(np.uint32).tolist()) == {0x7FC00000}
    assert set(mean(np.stack([one, other]), "bfloat16").view(np.uint16).tolist()) == {0x7FC0}


def test_denormals_and_infinities_are_numbers_like_others() -> None:
    tiny = np.float32(1e-45)
    values = np.array([[tiny, np.inf, -np.inf, -0.0, 3e38], [tiny, 1.0, -np.inf, -0.0, 3e38]], np.float32)
    result = mean(values)
    assert result.tolist()[:3] == [float(tiny), np.inf, -np.inf]
    assert np.signbit(result[3])
    assert result[4] == np.inf  # the sum is made before the division, by the rule


def test_opposite_infinities_warn_nobody() -> None:
    assert np.isnan(mean(np.array([[np.inf], [-np.inf]], np.float32))).all()  # warnings are errors here


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 17), st.data())
def test_partial_sums_stand_for_their_shards(total: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(total)
    values = (rng.standard_normal((total, 200)) * 10.0 ** rng.integers(-4, 5, (total, 200))).astype(
        np.float32
    )
    owners = data.draw(st.lists(st.integers(0, 2), min_size=total, max_size=total))
    sources = {
        node: reference_sum(list(values[node.start : node.stop]))
        for member in range(3)
        for node in cover([shard for shard in range(total) if owners[shard] == member], total)
    }
    out = np.empty(200, np.float32)
    combine(out, sources, total)
    assert out.tobytes() == mean(values).tobytes()


@pytest.mark.parametrize("leaf", ["bfloat16", "float16"])
def test_half_precisions_round_once(leaf: str) -> None:
    # Half a unit in the last place of 1 is lost if each sum is rounded, but two halves make a unit.
    half_unit = float(ml_dtypes.finfo(leaf).eps) / 2
    values = np.array([[1.0], [half_unit], [half_unit], [0.0]]).astype(leaf)
    exact = (1.0 + 2 * half_unit) / 4
    rounded_each_time = ((values[0] + values[1]) + (values[2] + values[3])) / np.array(4, leaf)
    assert float(rounded_each_time[0]) != exact
    assert float(mean(values, leaf)[0]) == exact


@pytest.mark.parametrize("leaf", ["bfloat16", "float16"])
def test_a_partial_sum_is_not_rounded(leaf: str) -> None:
    half_unit = float(ml_dtypes.finfo(leaf).eps) / 2
    values = np.array([[1.0], [half_unit], [half_unit]]).astype(leaf)
    partial = np.empty(1, np.float32)
    add_into(partial, [0], values[:1], values[1:2])
    assert partial[0] == 1.0 + half_unit
    out = np.empty(1, leaf)
    combine(out, {Node(0, 2): partial, Node(2, 3): values[2]}, 3)
    assert out.tobytes() == mean(values, leaf).tobytes()
    twice = ((partial.astype(leaf) + values[2]).astype(np.float32) / np.float32(3)).astype(leaf)
    assert out.tobytes() != twice.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 17), st.sampled_from(["float32", "bfloat16"]), st.integers(0, 1), st.data())
def test_one_of_the_first_two_sources_may_lie_in_the_result(
    total: int, leaf: str, place: int, data: st.DataObject
) -> None:
    values = np.random.default_rng(total).standard_normal((total, 300)).astype(leaf)
    owners = data.draw(st.lists(st.integers(0, 2), min_size=total, max_size=total))
    sources: dict[Node, np.ndarray] = {}
    for member in range(3):
        for node in cover([shard for shard in range(total) if owners[shard] == member], total):
            held = [value.astype(np.float32) for value in values[node.start : node.stop]]
            sources[node] = reference_sum(held).astype(leaf if node.size == 1 else np.float32)
    node = sorted(sources)[min(place, len(sources) - 1)]
    if sources[node].dtype != np.dtype(leaf):
        return
    out = sources[node] = sources[node].copy()
    combine(out, sources, total)
    assert out.tobytes() == mean(values, leaf).tobytes()


@pytest.mark.parametrize("operation", ["mean", "sum"])
@pytest.mark.parametrize("shards", [1, 3])
def test_sources_are_only_read(operation: Operation, shards: int) -> None:
    values = np.arange(4 * shards, dtype=np.float32).reshape(shards, 4)
    before = values.tobytes()
    values.flags.writeable = False
    result(values, operation)
    assert values.tobytes() == before


# Sums that are not divided


@settings(deadline=None)
@given(st.integers(1, 9).flatmap(any_floats), st.integers(1, 74), st.sampled_from([1, 3, 16, 1 << 17]))
def test_a_sum_is_the_mean_without_its_division(values: np.ndarray, cut: int, block: int) -> None:
    with np.errstate(all="ignore"):
        wanted = np.array(reference_sum(list(values)))
    wanted[np.isnan(wanted)] = np.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_reduce, "BLOCK_ELEMENTS", block)
        pieces = [result(values[:, :cut], "sum"), result(values[:, cut:], "sum")]
    assert np.concatenate(pieces).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("leaf", ["bfloat16", "float16"])
def test_a_sum_of_halves_rounds_once(leaf: str) -> None:
    half_unit = float(ml_dtypes.finfo(leaf).eps) / 2
    values = np.array([[1.0], [half_unit], [half_unit]]).astype(leaf)
    assert float(result(values, "sum", leaf)[0]) == 1.0 + 2 * half_unit
    assert (values[0] + values[1]) + values[2] == 1.0  # what rounding each sum would give


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32"])
def test_integers_are_exact_and_wrap_around(dtype: str) -> None:
    limits = np.iinfo(dtype)
    # float32 would lose the 1 of the first; the second goes over the top; no NaN is looked for in -1.
    values = np.array([[2**24, limits.max, -1 % 2**31], [1, 1, 1], [0, 0, 0]], dtype)
    assert result(values, "sum", dtype).tolist() == [
        2**24 + 1,
        limits.min,
        2**31 if dtype != "int32" else -(2**31),
    ]


@pytest.mark.parametrize("leaf", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_source_of_a_sum_may_lie_in_the_result(leaf: str, place: int) -> None:
    values = (np.random.default_rng(0).standard_normal((3, 300)) * 100).astype(leaf)
    sources = singles(values)
    out = sources[Node(place, place + 1)] = values[place].copy()
    combine(out, sources, 3, "sum")
    assert out.tobytes() == result(values, "sum", leaf).tobytes()


def test_one_source_that_is_the_whole_sum() -> None:
    total = np.array([3.0, np.nan, 1 + 2**-8], np.float32)
    for dtype in ("float32", "bfloat16"):
        out = np.empty(3, dtype)
        combine(out, {Node(0, 4): total}, 4, "sum")
        assert out.tobytes() == total.astype(dtype).tobytes()
