"""The tags of frames: each sees every bit and the order of frames; with a key, only its holders can make one."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxft._transport._seals import Checksums, Macs, Tags, is_tag

KEY = bytes(range(32))
some = settings(max_examples=60, deadline=None)


@some
@given(header=st.binary(max_size=80), payload=st.binary(max_size=300), cut=st.integers(0, 300))
def test_a_tag_sees_no_seams_in_a_payload(header: bytes, payload: bytes, cut: int) -> None:
    pieces = [memoryview(payload)[:cut], memoryview(b""), memoryview(payload)[cut:]]
    for make in (Checksums, lambda: Macs(KEY)):
        assert make().tag(header, *pieces) == make().tag(header, payload)
        assert make().tag(bytearray(header), bytearray(payload)) == make().tag(header, payload)


@some
@given(data=st.binary(min_size=2, max_size=300), at=st.integers(0, 2399), cut=st.integers(0, 300))
def test_a_tag_sees_each_bit(data: bytes, at: int, cut: int) -> None:
    flipped = bytearray(data)
    flipped[at // 8 % len(data)] ^= 1 << at % 8
    for make in (Checksums, lambda: Macs(KEY)):
        assert make().tag(data[:cut], data[cut:]) != make().tag(flipped[:cut], flipped[cut:])


@pytest.mark.parametrize("size", [0, 1, 64, 1 << 20])
def test_a_mac_tells_where_the_header_ends(size: int) -> None:
    data = os.urandom(size + 1)
    assert Macs(KEY).tag(data[:1], data[1:]) != Macs(KEY).tag(b"", data)
    assert Macs(KEY).tag(data, b"") != Macs(KEY).tag(b"", data)


def test_macs_differ_by_key_and_by_number() -> None:
    one, other, late = Macs(KEY), Macs(bytes(32)), Macs(KEY)
    late.tag(b"what came before")
    tags = [one.tag(b"h", b"p"), other.tag(b"h", b"p"), late.tag(b"h", b"p"), one.tag(b"x", b"p")]
    assert len(set(tags)) == len(tags)
    assert one.tag(b"h", b"p") == macs_after(2).tag(b"h", b"p")
    assert all(len(tag) == Macs.size_bytes for tag in tags)


def macs_after(frames: int) -> Macs:
    made = Macs(KEY)
    for _ in range(frames):
        made.tag(b"")
    return made


@pytest.mark.parametrize("tags", [Checksums(), Macs(KEY)])
def test_a_frame_that_is_not_sent_after_all_has_no_number(tags: Tags) -> None:
    def spoiled() -> None:
        raise LookupError("overwritten")

    with pytest.raises(LookupError):
        tags.tag(b"h", b"spoiled", verify=spoiled)
    fresh = type(tags)() if isinstance(tags, Checksums) else Macs(KEY)
    assert is_tag(tags.tag(b"h", b"in its place"), fresh.tag(b"h", b"in its place"))


def test_tags_of_another_length_are_none() -> None:
    assert not is_tag(b"", Macs(KEY).tag(b""))
    assert not is_tag(Checksums().tag(b""), Macs(KEY).tag(b""))
