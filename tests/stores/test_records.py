"""A written record comes back as it was, and foreign bytes are no record."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jaxft_coordinator.stores.records import Led, RecordError, decode, encode
from jaxft_protocol.coordinator.job import Record, Saved

from tests.stores import examples

LED = st.builds(Led, examples.numbers, examples.texts)


@settings(max_examples=50)
@given(examples.any_record() | LED)
def test_a_record_comes_back_as_it_was(record: Record | Led):
    assert decode(encode(record)) == record


@settings(max_examples=50)
@given(examples.any_record())
def test_equal_records_have_equal_bytes(record: Record):
    assert encode(decode(encode(record))) == encode(record)  # pyright: ignore[reportArgumentType]


def test_the_record_of_a_step_is_small():
    widest = examples.moved(examples.WIDEST, job="", quorum_id=examples.WIDEST)
    assert len(encode(widest)) < 100


# ---- foreign bytes ----


def field_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inside for found in field_paths(item, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    if not path:
        return to
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], to)
    return copy


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"v":5,"kind":"moved","job":"j","quorum_id":NaN,"step":1}', "NaN is not valid in JSON"),
        (b'{"v":5,"kind":"moved","job":"j","quorum_id":1' + b"0" * 5000 + b',"step":1}', "not JSON"),
        (b"[]", r"a record is \[\], not an object"),
        (b"{}", "format None"),
        (
            b'{"v":6,"kind":"moved"}',
            "format 6, but this coordinator reads format 5. Run the jaxft-coordinator that wrote it",
        ),
        (b'{"v":true,"kind":"moved"}', "format True"),
        (b'{"v":5,"kind":"frontier"}', "kind is 'frontier'"),
        (b'{"v":5,"kind":["moved"]}', r"kind is \['moved'\]"),
        (b'{"v":5,"kind":"moved","job":"j","step":1}', r"lacks the fields \['quorum_id'\]"),
        (b'{"v":5,"kind":"forgotten","job":"j","step":1}', r"has the unknown fields \['step'\]"),
        (b'{"v":5,"kind":"moved","job":"j","quorum_id":1,"step":-1}', "step is -1, not a whole number"),
        (b'{"v":5,"kind":"moved","job":"j","quorum_id":1,"step":true}', "step is True"),
        (b'{"v":5,"kind":"moved","job":"\\ud800","quorum_id":1,"step":1}', "UTF-8"),
    ],
)
def test_foreign_bytes_are_refused_with_what_is_wrong(data: bytes, reason: str):
    with pytest.raises(RecordError, match=reason):
        decode(data)


@settings(max_examples=50)
@given(st.binary(max_size=200))
@example(b"null")
def test_any_bytes_are_a_record_or_refused(data: bytes):
    try:
        assert decode(data)
    except RecordError:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=50)
@given(examples.any_saved(), st.data())
def test_a_record_with_anything_in_any_place_is_a_record_or_refused(record: Saved, data: st.DataObject):
    value = json.loads(encode(record))
    path = data.draw(st.sampled_from(field_paths(value)))
    try:
        decode(json.dumps(changed(value, path, data.draw(JSON))).encode())
    except RecordError:
        pass


def test_what_could_not_be_read_again_is_not_written():
    for wrong in (
        examples.moved(-1),
        examples.moved(1 << 64),
        examples.saved("\ud800"),
        examples.saved(places=True),
    ):
        with pytest.raises(RecordError):
            encode(wrong)
    with pytest.raises(RecordError, match="does not decode to itself"):
        encode(examples.saved(held={"a": [1, 2]}))
