import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxft_protocol.names import natural_key, one_line


def test_numbers_in_names_count():
    names = ["group-10", "group-2", "group-1", "group"]
    assert sorted(names, key=natural_key) == ["group", "group-1", "group-2", "group-10"]


def test_numbers_count_at_every_place():
    names = ["pod10-rack2", "pod2-rack10", "pod2-rack9"]
    assert sorted(names, key=natural_key) == ["pod2-rack9", "pod2-rack10", "pod10-rack2"]


def test_names_that_count_alike_still_have_one_order():
    assert natural_key("g-1") != natural_key("g-01")
    assert sorted(["g-1", "g-01"], key=natural_key) == sorted(["g-01", "g-1"], key=natural_key)


@pytest.mark.parametrize("name", ["²", "g-²", "٣", "", "1", "0x1f", "-1", "1.5", "Ⅷ", "①"])
def test_any_name_has_a_key(name: str):
    # "²".isdigit() holds, but int("²") raises: such a name would have stopped its whole job.
    assert natural_key(name)[-1] == (2, 0, name)


@given(st.lists(st.text(max_size=20), max_size=8))
def test_any_names_can_be_put_in_order(names: list[str]):
    assert sorted(sorted(names, key=natural_key), key=natural_key) == sorted(names, key=natural_key)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("plain 'text', größer", "plain 'text', größer"),
        (" two\n  lines\u2028three\t", "two lines three"),
        ("\x1b[2J\x1b]0;title\x07 \x9b31m", "\\x1b[2J\\x1b]0;title\\x07 \\x9b31m"),
        ("right \u202e to left, \udc80", "right \\u202e to left, \\udc80"),
    ],
)
def test_a_text_becomes_one_line(text: str, line: str):
    assert one_line(text) == line


@given(st.text())
def test_one_line_can_be_shown_and_encoded(text: str):
    line = one_line(text)
    assert line.isprintable()
    line.encode()
    assert one_line(line) == line
