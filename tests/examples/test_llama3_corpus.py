"""Corpora on disk: text, JSONL, Parquet and arrays become one mapped array of token ids."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from examples.llama3 import _corpus, _documents
from examples.llama3._config import SettingsError
from examples.llama3._corpus import Corpus, load_corpus
from examples.llama3._documents import files_of, pieces
from examples.llama3._tokenizer import Bytes, Tokenizer, load_tokenizer

BYTES = Bytes()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def load(cache: Path) -> Any:
    def load(
        source: Path | None, *, tokenizer: Tokenizer = BYTES, limit_bytes: int | None = None, **more: str
    ) -> Corpus:
        return load_corpus(source, tokenizer=tokenizer, cache=cache, limit_bytes=limit_bytes, **more)

    return load


def text_of(corpus: Corpus) -> bytes:
    return BYTES.decode(np.asarray(corpus.tokens))


# Text.


def test_a_file_is_a_document_between_two_special_tokens(tmp_path: Path, load: Any) -> None:
    text = bytes(range(1, 256)) + "Grüße".encode()
    (tmp_path / "text.txt").write_bytes(text)
    corpus = load(tmp_path / "text.txt")
    assert (corpus.tokens[0], corpus.tokens[-1], len(corpus.tokens)) == (256, 257, len(text) + 2)
    assert (text_of(corpus), corpus.documents, corpus.tokens.dtype) == (text, 1, np.uint16)


def test_the_standard_library_is_the_default_corpus(load: Any) -> None:
    corpus = load(None, limit_bytes=200_000)
    assert load(None, limit_bytes=200_000).fingerprint == corpus.fingerprint
    assert len(corpus.tokens) == 200_000 + 2 * corpus.documents
    assert b"import" in text_of(corpus)
    assert text_of(corpus).startswith(Path(os.__file__).with_name("__future__.py").read_bytes()[:100])


def test_a_folder_is_read_in_the_order_of_names_without_hidden_and_binary_files(
    tmp_path: Path, load: Any
) -> None:
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
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(text)
    os.mkfifo(tmp_path / "in" / "pipe.txt")  # to open it would wait for its writer
    corpus = load(tmp_path / "in")
    assert (text_of(corpus), corpus.documents) == (b"one two three four", 4)


def test_reading_stops_at_the_limit_in_the_middle_of_a_document(tmp_path: Path, load: Any) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_bytes(b"0123456789")
    (source / "b.txt").write_bytes(b"abcdefghij")
    (source / "c.txt").write_bytes(b"never read")
    corpus = load(source, limit_bytes=13)
    assert text_of(corpus) == b"0123456789abc"
    assert corpus.tokens[-1] == 257


@pytest.mark.parametrize(
    "text",
    [b"line of text\n" * 50, "äöüß€😀".encode() * 40, b"\xff\x80" * 200, b"x" * 1000, b"a\n" + b"b" * 300],
)
def test_a_long_document_is_read_in_pieces_that_cut_no_character(
    tmp_path: Path, load: Any, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setattr(_documents, "PIECE_BYTES", 64)
    (tmp_path / "long.txt").write_bytes(text)
    parts = list(pieces(files_of(tmp_path / "long.txt"), field="text", limit_bytes=None))
    assert len(parts) > 4
    assert b"".join(part.text for part in parts) == text
    assert [part.first for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    if b"\xff" not in text:
        assert "".join(part.text.decode() for part in parts).encode() == text
    corpus = load(tmp_path / "long.txt")
    assert (text_of(corpus), corpus.documents, len(corpus.tokens)) == (text, 1, len(text) + 2)


# JSONL and Parquet.


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_every_row_is_a_document(tmp_path: Path, load: Any, name: str) -> None:
    rows = [{"id": i, "body": f"Text {i} ü\n"} for i in range(5)]
    without_text = [{"id": 5, "body": ""}, {"id": 6, "body": None}]
    corpus = load(write_rows(tmp_path / name, rows + without_text), field="body")
    assert text_of(corpus).decode() == "".join(row["body"] for row in rows)
    assert corpus.documents == 5
    assert np.sum(np.asarray(corpus.tokens) == 256) == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "rows.jsonl",
            r"Line 1 of '.*' has no text in a field 'text'. Name it with --text-field, one of 'id', 'n'",
        ),
        ("rows.parquet", r"'.*' has no text in a column 'text'. Name it with --text-field, one of 'id', 'n'"),
    ],
)
def test_a_field_that_is_not_there_is_named_with_those_that_are(
    tmp_path: Path, load: Any, name: str, message: str
) -> None:
    path = write_rows(tmp_path / name, [{"id": 1, "n": 2}])
    with pytest.raises(SettingsError, match=message):
        load(path)
    with pytest.raises(SettingsError, match=r"has no text in a (field|column) 'n'"):
        load(path, field="n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"{nothing of the kind", "Line 1 of '.*' is not JSON"),
        ("x.jsonl", b"[" * 100_000, "Line 1 of '.*' is not JSON"),
        ("x.parquet", b"{nothing of the kind", "is not a Parquet file"),
        ("x.npy", b"PK\x03\x04 as of a .npz", r"'.*x\.npy' is not a \.npy array"),
    ],
    ids=["JSON", "deep JSON", "Parquet", "no array"],
)
def test_a_damaged_file_is_named(tmp_path: Path, load: Any, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        load(tmp_path / name)


# Arrays.


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_an_array_is_mapped_as_it_is(tmp_path: Path, load: Any, cache: Path, dtype: Any) -> None:
    tokens = np.arange(200, dtype=dtype)
    np.save(tmp_path / "tokens.npy", tokens)
    corpus = load(tmp_path / "tokens.npy")
    assert isinstance(corpus.tokens, np.memmap)
    assert (corpus.tokens.dtype, corpus.documents) == (np.dtype(dtype), None)
    assert np.array_equal(corpus.tokens, tokens)
    assert not cache.exists()


# The cache.


def age(path: Path, seconds: float) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns - int(seconds * 1e9)))


def test_text_is_tokenized_once(
    tmp_path: Path, load: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(b"some text")
    age(tmp_path / "a.txt", 60)
    first = load(tmp_path / "a.txt")
    monkeypatch.setattr(_corpus, "_tokenize", None)  # would raise
    assert load(tmp_path / "a.txt").fingerprint == first.fingerprint
    assert [path.suffix for path in cache.iterdir()] == [".tokens"]


@pytest.mark.parametrize("size", [0, 100, -1], ids=["empty", "in its header", "zeros"])
def test_a_file_of_the_cache_that_is_not_whole_is_made_again(
    tmp_path: Path, load: Any, cache: Path, size: int
) -> None:
    """As a power cut leaves it, or a copy of the folder that was broken off."""
    (tmp_path / "a.txt").write_bytes(b"some text")
    age(tmp_path / "a.txt", 60)
    first = load(tmp_path / "a.txt")
    [file] = cache.iterdir()
    whole = file.read_bytes()
    file.unlink()  # as `first` still maps it
    file.write_bytes(whole[:size] if size >= 0 else bytes(len(whole)))
    again = load(tmp_path / "a.txt")
    assert (text_of(again), again.fingerprint) == (b"some text", first.fingerprint)


@pytest.mark.parametrize("seconds", [0, 60])
def test_changed_text_is_tokenized_again(tmp_path: Path, load: Any, seconds: float) -> None:
    """Of the same length, and within the step of the file system's clock."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"one")
    age(path, seconds)
    stamp = path.stat().st_mtime_ns
    one = load(path)
    path.write_bytes(b"two")
    if seconds == 0:
        os.utime(path, ns=(stamp, stamp))
    two = load(path)
    assert text_of(two) == b"two"
    assert one.fingerprint != two.fingerprint


def test_no_part_of_a_file_is_left_when_tokenizing_fails(tmp_path: Path, load: Any, cache: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\nbroken')
    with pytest.raises(SettingsError, match="Line 2 of"):
        load(tmp_path / "a.jsonl")
    assert list(cache.iterdir()) == []


# Tokenizers.


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real byte-level BPE, trained on a little text, with Llama 3's special tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_is_used_as_it_is(bpe: Path, tmp_path: Path, load: Any) -> None:
    tokenizer = load_tokenizer(bpe.parent)  # a folder will do
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size <= 400) == (0, 1, True)
    text = "the quick brown fox — über alles\n"
    (tmp_path / "a.txt").write_text(text)
    corpus = load(tmp_path / "a.txt", tokenizer=tokenizer)
    reference = tokenizers.Tokenizer.from_file(str(bpe)).encode(text).ids
    assert np.asarray(corpus.tokens).tolist() == [0, *reference, 1]
    assert tokenizer.decode(np.asarray(corpus.tokens)).decode() == text
    assert len(corpus.tokens) < len(text)


def test_the_special_tokens_are_those_that_the_configuration_names(bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(bpe.read_bytes())
    named = {"bos_token": None, "eos_token": {"content": "<|begin_of_text|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert load_tokenizer(tmp_path).eos == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<nope>"}))
    with pytest.raises(SettingsError, match="names the eos_token '<nope>', which the tokenizer lacks"):
        load_tokenizer(tmp_path)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"The tokenizer '.*nowhere' cannot be read: No such file"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"'.*x\.json' is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "x.json")
