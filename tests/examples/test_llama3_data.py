"""The corpus and the ledger: every window once an epoch, whoever asks for it, in whatever order."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from llama3_cases import corpus_of

from examples.llama3._config import SettingsError
from examples.llama3._data import BOS, EOS, Batches, check_vocabulary, decode, encode, load_corpus


def batches(
    *, tokens: int = 801, seq_len: int = 8, batch_per_shard: int = 2, shards: int = 4, seed: int = 0
) -> Batches:
    return Batches(
        corpus=corpus_of(tokens), seq_len=seq_len, batch_per_shard=batch_per_shard, shards=shards, seed=seed
    )


def ledger(data: Batches, steps: range) -> list[int]:
    return [window for step in steps for shard in range(data.shards) for window in data.windows(step, shard)]


# The ledger.


def test_each_window_is_used_exactly_once_an_epoch() -> None:
    data = batches()
    assert data.window_count == 100
    used = ledger(data, range(25))  # 25 steps of 8 samples are two epochs
    assert Counter(used[:100]) == Counter(range(100))
    assert Counter(used[100:]) == Counter(range(100))
    assert used[:100] != used[100:]


def test_an_epoch_may_end_within_a_step() -> None:
    data = batches(tokens=8 * 13 + 1)
    used = ledger(data, range(13))
    assert all(Counter(used[e * 13 : (e + 1) * 13]) == Counter(range(13)) for e in range(8))


def test_the_order_of_samples_does_not_depend_on_the_number_of_shards() -> None:
    four, two = batches(shards=4, batch_per_shard=2), batches(shards=2, batch_per_shard=4)
    assert ledger(four, range(10)) == ledger(two, range(10))


def test_a_batch_is_pure_and_so_may_be_asked_for_by_anyone_at_any_time() -> None:
    here, elsewhere = batches(), batches()
    late = here(7, 3)
    here(0, 0)
    assert np.array_equal(late, elsewhere(7, 3))
    assert np.array_equal(late, here(7, 3))
    assert not np.array_equal(late, here(7, 2))
    assert not np.array_equal(late, here(8, 3))
    assert not np.array_equal(late, batches(seed=1)(7, 3))


def test_a_batch_holds_its_windows_and_the_token_after_each() -> None:
    data = batches()
    batch = data(3, 1)
    assert (batch.shape, batch.dtype) == ((2, 9), np.int32)
    for row, window in zip(batch, data.windows(3, 1), strict=True):
        assert row.tolist() == [i % 256 for i in range(window * 8, window * 8 + 9)]


def test_every_token_but_the_first_is_predicted_once() -> None:
    data = batches(tokens=201, batch_per_shard=1, shards=1)
    targets = [data(step, 0)[0, 1:] for step in range(data.window_count)]
    assert sorted(np.concatenate(targets).tolist()) == list(range(1, 201))


@pytest.mark.parametrize("name", ["seq_len", "batch_per_shard", "shards"])
def test_counts_below_one_are_refused_by_name(name: str) -> None:
    with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')} must be above 0, not 0"):
        batches(**{name: 0})


def test_a_corpus_shorter_than_one_sequence_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"has 8 tokens, but one sequence takes 9 \(--seq-len"):
        batches(tokens=8)
    assert batches(tokens=9).window_count == 1


# The corpus.


def test_bytes_survive_the_tokenizer() -> None:
    text = bytes(range(256)) + "Grüße".encode()
    tokens = encode(text)
    assert (tokens[0], tokens[-1], len(tokens)) == (BOS, EOS, len(text) + 2)
    assert decode(tokens) == text


def test_a_vocabulary_must_hold_the_bytes_and_the_specials() -> None:
    check_vocabulary(259)
    with pytest.raises(SettingsError, match="A vocabulary of 258 is too small for bytes, which need 259"):
        check_vocabulary(258)


def test_the_standard_library_is_the_default_corpus() -> None:
    corpus = load_corpus(None, limit_bytes=200_000)
    again = load_corpus(None, limit_bytes=200_000)
    assert corpus.fingerprint == again.fingerprint
    assert len(corpus.tokens) == 200_000 + 2 * corpus.documents
    text = decode(corpus.tokens)
    assert b"import" in text
    assert text.startswith(Path(os.__file__).with_name("__future__.py").read_bytes()[:100])


def test_a_file_is_a_corpus(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"to be or not to be")
    corpus = load_corpus(path, limit_bytes=1000)
    assert corpus.documents == 1
    assert decode(corpus.tokens) == b"to be or not to be"


def test_a_folder_is_read_in_the_order_of_names_without_hidden_and_binary_files(tmp_path: Path) -> None:
    for name, text in (
        ("b.txt", b"two "),
        ("a.txt", b"one "),
        ("test/c.txt", b"three "),
        ("z/y/x.md", b"four"),
        (".hidden", b"no"),
        (".git/config", b"no"),
        ("image.png", b"\x89\0no"),
        ("empty.txt", b""),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    corpus = load_corpus(tmp_path, limit_bytes=1000)
    assert (decode(corpus.tokens), corpus.documents) == (b"one two three four", 4)


def test_reading_stops_at_the_limit_in_the_middle_of_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"0123456789")
    (tmp_path / "b.txt").write_bytes(b"abcdefghij")
    (tmp_path / "c.txt").write_bytes(b"never read")
    assert decode(load_corpus(tmp_path, limit_bytes=13).tokens) == b"0123456789abc"


def test_the_fingerprint_tells_texts_apart(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"one")
    one = load_corpus(path, limit_bytes=100).fingerprint
    path.write_bytes(b"two")
    assert load_corpus(path, limit_bytes=100).fingerprint != one


def test_a_missing_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"There is no corpus at '.*nowhere'\. Point --corpus to a text file"
    ):
        load_corpus(tmp_path / "nowhere", limit_bytes=100)


@pytest.mark.parametrize("make", ["folder", "file", "binary"])
def test_an_empty_corpus_is_refused(tmp_path: Path, make: str) -> None:
    source = tmp_path / "corpus"
    source.mkdir() if make == "folder" else source.write_bytes(b"" if make == "file" else b"\0\1")
    with pytest.raises(SettingsError, match=r"The corpus '.*corpus' has no text"):
        load_corpus(source, limit_bytes=100)


def test_an_unreadable_file_of_a_corpus_is_named(tmp_path: Path) -> None:
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(
        SettingsError, match=r"The corpus file '.*dangling\.txt' cannot be read: No such file"
    ):
        load_corpus(tmp_path, limit_bytes=100)


def test_a_limit_of_no_bytes_is_refused() -> None:
    with pytest.raises(SettingsError, match="--corpus-bytes must be above 0, not 0"):
        load_corpus(None, limit_bytes=0)
