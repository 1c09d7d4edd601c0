"""What is written down comes back as it was, and nothing else is taken for it."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jaxft_coordinator.stores.records import Led, RecordError, Unreadable, decode, decode_or_keep, encode
from jaxft_protocol.coordinator.job import Frontier, Record, Saved
from jaxft_protocol.messages import HistoryId, QuorumId, Step

from tests.stores import examples

# As a coordinator of format 1 has written it.
OLDER = (
    '{"distrusted":[["b",2]],"finished":9,"frontier":{"digest":"d","fresh":true,"holders":[["a",1]],'
    '"quorum_id":0,"step":9},"held":{"a":[0,1]},"history":1,"job":"j","kind":"saved","last_quorum_id":4,'
    '"members":[["a",1]],"min_replicas":1,"places":1,"proven":{"a":1},"settings":null,"v":1}'
)
LED = st.builds(Led, examples.numbers, examples.texts)


@given(examples.any_record() | LED)
def test_a_record_comes_back_as_it_was(record: Record | Led):
    assert decode(encode(record)) == record


@given(examples.any_record() | LED)
def test_a_record_has_no_control_character(record: Record | Led):
    """Stores set records apart with them."""
    assert not any(byte < 0x20 for byte in encode(record))


@given(examples.any_record())
def test_equal_records_have_equal_bytes(record: Record):
    assert encode(decode(encode(record))) == encode(record)  # pyright: ignore[reportArgumentType]


def test_the_record_of_a_step_is_small():
    widest = examples.moved(examples.WIDEST, job="", quorum_id=examples.WIDEST)
    assert len(encode(widest)) < 100


def test_what_older_coordinators_have_written_is_read_for_ever():
    """As it stands on disks. If this fails, old records would not be read any more."""
    assert decode(b'{"job":"j","kind":"moved","quorum_id":7,"step":41,"v":1}') == examples.moved(41, "j")
    assert decode(b'{"address":"a:1","kind":"led","term":3,"v":1}') == Led(3, "a:1")
    text = OLDER
    a, b = examples.holder("a", 1), examples.holder("b", 2)
    frontier = Frontier(Step(9), QuorumId(0), 0xD, frozenset([a]), fresh=True)
    expected = Saved(
        "j",
        QuorumId(4),
        None,
        1,
        examples.HistoryId(1),
        frontier,
        dict([a]),
        frozenset([b]),
        (a,),
        {a[0]: (0, 1)},
        1,
        Step(9),
    )
    assert decode(text.encode()) == expected
    newer = text.replace('"job"', '"idle_since":1790000000,"job"').replace('"v":1', '"v":2')
    assert decode(newer.encode()) == replace(expected, idle_since=1_790_000_000)
    for digest, found in (("", frontier_with(None)), ("no majority", frontier_with(None, disputed=True))):
        unknown = text.replace('"digest":"d"', f'"digest":"{digest}"')
        assert decode(unknown.encode()) == replace(expected, frontier=found)
    for shards, total in (('"4"', 4), ('"members"', None)):
        settings = text.replace('"settings":null', f'"settings":{{"program":"x","shards":{shards}}}')
        found = replace(expected, settings={"program": "x"}, total_shards=total)
        assert decode(settings.encode()) == found
        assert decode(encode(found)) == found
    three = (
        text.replace('"digest":"d"', '"digest":13,"disputed":false')
        .replace('"job"', '"idle_since":null,"job"')
        .replace('"settings":null,"v":1', '"settings":null,"total_shards":null,"v":3')
    )
    assert encode(expected) == three.encode()


def frontier_with(digest: int | None, *, disputed: bool = False) -> Frontier:
    holders = frozenset([examples.holder("a", 1)])
    return Frontier(Step(9), QuorumId(0), digest, holders, fresh=True, disputed=disputed)


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        (
            '"digest":"d"',
            '"digest":"fresh"',
            "frontier.digest is 'fresh', not a number in hexadecimal digits",
        ),
        ('"settings":null', '"settings":{"shards":"x"}', "'x', neither \"members\" nor a number"),
        ('"settings":null', '"settings":{"shards":"' + "9" * 5000 + '"}', 'neither "members" nor a number'),
        ('"settings":null', '"settings":null,"total_shards":4', "which only a record of a newer format has"),
    ],
)
def test_an_older_record_is_checked_too(was: str, now: str, says: str):
    with pytest.raises(RecordError, match=says):
        decode(OLDER.replace(was, now).encode())


def test_of_a_record_that_does_not_decode_the_job_is_known_if_it_says_so():
    data = encode(examples.saved("j")).replace(b'"places":2', b'"places":-1')
    kept = decode_or_keep(data)
    assert isinstance(kept, Unreadable)
    assert (kept.job, kept.data) == ("j", data)
    assert "places is -1" in kept.why
    assert decode_or_keep(encode(examples.saved("j"))) == examples.saved("j")
    for foreign in (b"hello", b"[1]", b'{"v":4,"kind":"led","job":"j"}', b'{"job":7}', b'{"job":"\\ud800"}'):
        with pytest.raises(RecordError):
            decode_or_keep(foreign)


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


EXAMPLES = [examples.saved(step=3), examples.moved(4), Led(5, "host:1")]
WRONG = [-1, 1 << 64, 1.5, True, "\ud800", "text", None, [], {}, [1, 2, 3], {"x": 1}]


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_each_field_is_checked(record: Record | Led, wrong: Any):
    """With any field at all replaced by something odd, the bytes are refused, or a record that keeps its types."""
    value = json.loads(encode(record))
    for path in field_paths(value):
        data = json.dumps(changed(value, path, wrong)).encode()
        try:
            found = decode(data)
        except RecordError:
            continue
        assert type(found) is type(record)
        assert decode(encode(found)) == found


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"v":1,"kind":"moved","job":"j","quorum_id":NaN,"step":1}', "NaN is not valid in JSON"),
        (b'{"v":1,"kind":"moved","job":"j","quorum_id":1' + b"0" * 5000 + b',"step":1}', "not JSON"),
        (b"[]", r"a record is \[\], not an object"),
        (b"{}", "format None"),
        (
            b'{"v":6,"kind":"moved"}',
            "format 6, but this coordinator reads formats 1 to 5.* newer jaxft-coordinator",
        ),
        (b'{"v":true,"kind":"moved"}', "format True"),
        (b'{"v":1,"kind":"frontier"}', "kind is 'frontier'"),
        (b'{"v":1,"kind":["moved"]}', r"kind is \['moved'\]"),
        (b'{"v":1,"kind":"moved","job":"j","step":1}', r"lacks the fields \['quorum_id'\]"),
        (b'{"v":1,"kind":"forgotten","job":"j","step":1}', r"has the unknown fields \['step'\]"),
        (b'{"v":1,"kind":"moved","job":"j","quorum_id":1,"step":-1}', "step is -1, not a whole number"),
        (b'{"v":1,"kind":"moved","job":"j","quorum_id":1,"step":true}', "step is True"),
        (b'{"v":1,"kind":"moved","job":"\\ud800","quorum_id":1,"step":1}', "UTF-8"),
    ],
)
def test_foreign_bytes_are_refused_with_what_is_wrong(data: bytes, says: str):
    with pytest.raises(RecordError, match=says):
        decode(data)


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


def test_only_a_paused_job_needs_the_newest_format():
    paused = Saved(
        "j", QuorumId(1), None, 0, HistoryId(0), None, {}, frozenset(), (), {}, 0, None, paused=True
    )
    data = encode(paused)
    assert (b'"v":5' in data, decode(data)) == (True, paused)
    going = encode(replace(paused, paused=False))
    assert (b'"v":3' in going, b"paused" in going) == (True, False)
    with pytest.raises(RecordError, match="paused is True, which only a record of a newer format has"):
        decode(data.replace(b'"v":5', b'"v":3'))
