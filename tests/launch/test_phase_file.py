"""Records that are read while they are written."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxft._supervised._phase_file import WORD_BYTES, Word, WordFile, read_word

TIMES = st.floats(0.0, 4e9)
WORDS = st.builds(
    Word,
    phase=st.sampled_from(["compute", "exchange", "vote", "wait", "apply"]),
    step=st.integers(0, 10**9),
    t_s=TIMES,
    first_t_s=TIMES,
    members=st.integers(0, 4096),
    committed=st.integers(0, 10**9),
)


@given(before=WORDS, after=WORDS, cut=st.integers(0, WORD_BYTES))
def test_a_record_that_is_partly_overwritten_is_none(
    tmp_path_factory: pytest.TempPathFactory, before: Word, after: Word, cut: int
) -> None:
    """The kernel copies a record byte after byte, and a reader may come in between."""
    path = tmp_path_factory.mktemp("words") / "phase"
    file = WordFile(path)
    records: list[bytes] = []
    for word in (before, after):
        file.write(word)
        assert read_word(path) == word
        records.append(path.read_bytes())
    path.write_bytes(records[1][:cut] + records[0][cut:])
    assert read_word(path) in (None, before, after)


def test_a_file_that_cannot_be_read_now_says_nothing(tmp_path: Path) -> None:
    """As without a free descriptor: a launcher looks again soon."""
    assert read_word(tmp_path / "none") is None
    assert read_word(tmp_path) is None  # EISDIR, for any other error
