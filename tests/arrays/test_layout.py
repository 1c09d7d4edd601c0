"""Where elements lie."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft._arrays._layout import ALIGN_ELEMENTS, Layout, LeafSpec
from jaxft._errors import ConfigurationError
from tests.exchange.members import MIXED

DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "float64"])
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
OPERATIONS = st.sampled_from(["mean", "sum"])
SPECS = st.lists(st.builds(LeafSpec, st.text(max_size=4), SHAPES, DTYPES, OPERATIONS), max_size=12)


@settings(deadline=None)
@given(SPECS)
def test_every_element_has_one_place(specs: list[LeafSpec]) -> None:
    layout = Layout.of(specs)
    taken: list[set[int]] = [set() for _ in layout.regions]
    for spec, extent in zip(specs, layout.extents, strict=True):
        assert layout.regions[extent.region].dtype == spec.dtype
        assert layout.regions[extent.region].operation == spec.operation
        assert extent.offset % ALIGN_ELEMENTS == 0
        assert extent.size == spec.size
        assert taken[extent.region].isdisjoint(range(extent.offset, extent.stop))
        taken[extent.region].update(range(extent.offset, extent.stop))
    for gap in layout.gaps():
        assert taken[gap.region].isdisjoint(range(gap.offset, gap.stop))
        taken[gap.region].update(range(gap.offset, gap.stop))
    assert taken == [set(range(region.size)) for region in layout.regions]


def test_sizes() -> None:
    layout = Layout.of(MIXED)
    assert [(region.dtype, region.operation) for region in layout.regions] == [
        ("float32", "mean"),
        ("bfloat16", "mean"),
        ("float64", "mean"),
        ("float16", "mean"),
        ("int32", "sum"),
        ("float32", "sum"),
        ("bfloat16", "sum"),
        ("int8", "max"),
        ("int8", "widened"),
    ]
    accumulated = ["float32", "float32", "float64", "float32", "int32", "float32", "float32", "int8", "int16"]
    assert [region.sum_dtype for region in layout.regions] == accumulated
    assert [region.item_bytes for region in layout.regions] == [4, 2, 8, 2, 4, 4, 2, 1, 1]
    assert [region.sum_item_bytes for region in layout.regions] == [4, 4, 8, 4, 4, 4, 4, 1, 2]
    assert [region.result_item_bytes for region in layout.regions] == [4, 2, 8, 2, 4, 4, 2, 1, 2]
    assert all(region.size_bytes % 64 == 0 for region in layout.regions)
    assert layout.size_bytes == sum(region.size_bytes for region in layout.regions)
    assert Layout.of([]).size_bytes == 0


def test_equal_digests_mean_equal_layouts() -> None:
    specs = list(MIXED)
    digest = Layout.of(specs).digest
    assert Layout.of(list(specs)).digest == digest
    others = [
        specs[1:],
        [specs[1], specs[0], *specs[2:]],
        [LeafSpec("matrix", (70, 130), "float32"), *specs[1:]],
        [LeafSpec("matrix", (130, 70), "float16"), *specs[1:]],
        [LeafSpec("other", (130, 70), "float32"), *specs[1:]],
        [LeafSpec("matrix", (130, 70), "float32", "sum"), *specs[1:]],
    ]
    assert digest not in {Layout.of(other).digest for other in others}


def test_a_path_cannot_imitate_two_leaves() -> None:
    two = [LeafSpec("a", (1,), "float32"), LeafSpec("b", (1,), "float32")]
    one = [LeafSpec("a' float32 1\n'b", (1,), "float32")]
    assert Layout.of(two).digest != Layout.of(one).digest


def test_a_dtype_that_has_no_mean() -> None:
    with pytest.raises(
        ConfigurationError, match=r"Leaf 'step' has dtype 'int32', but pmean takes only .*Convert the leaf"
    ):
        Layout.of([LeafSpec("step", (), "int32")])
