"""The rule for comparing digests."""

import pytest
from jaxft_protocol.coordinator.digests import listed, odd_ones
from jaxft_protocol.messages import GroupName


def given(**digests: int) -> dict[GroupName, int]:
    return {GroupName(name): digest for name, digest in digests.items()}


@pytest.mark.parametrize(
    ("digests", "odd"),
    [
        ({}, ()),
        (given(a=1), ()),
        (given(a=1, b=1), ()),
        (given(a=1, b=2), None),
        (given(a=1, b=2, c=1), ("b",)),
        (given(a=1, b=2, c=2), ("a",)),
        (given(a=1, b=2, c=3), None),
        (given(a=1, b=1, c=2, d=2), None),
        (given(a=1, b=1, c=2, d=3), None),  # the most, but no majority
        (given(a=1, b=1, c=2, d=1), ("c",)),
        (given(a=1, b=1, c=1, d=2, e=3), ("d", "e")),
        (given(a=0, b=0, c=1), ("c",)),  # 0 is a digest like any other
    ],
)
def test_odd_is_who_differs_from_more_than_half(digests: dict[GroupName, int], odd: tuple[str, ...] | None):
    assert odd_ones(digests) == odd


def test_the_odd_ones_are_named_in_the_order_in_which_people_count():
    digests = {GroupName(f"group-{i}"): int(i in (2, 10)) for i in (10, 5, 3, 2, 4)}
    assert odd_ones(digests) == ("group-2", "group-10")


def test_a_list_names_the_commonest_digest_first():
    text = listed(given(a=255, c=0x9E30145E19D32AC3, b=0x9E30145E19D32AC3))
    assert text == "b, c: 9e30145e19d32ac3; a: 00000000000000ff"


def test_a_list_of_many_is_cut():
    many = {GroupName(f"group-{i}"): 0 for i in range(1000)}
    assert listed(many) == f"{', '.join(f'group-{i}' for i in range(8))}, ...: {0:016x}"
    assert listed({GroupName(f"g{i}"): i for i in range(1000)}).count(";") == 3
