"""A corpus as one array of token ids on disk, mapped into memory: never read whole, however large.

Text is tokenized once, into a file of the cache: a header of one JSON line, padded, then the ids, in the smallest
unsigned integer that holds the vocabulary. The file's name is a hash of everything that its content depends on. It is
written under another name and renamed, so several groups may do it at the same time.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from examples.llama3._config import SettingsError, check_positive
from examples.llama3._documents import Piece, files_of, pieces, standard_library
from examples.llama3._tokenizer import Tokenizer

logger = logging.getLogger("llama3")

DEFAULT_BYTES = 8 * 2**20  # of the standard library

_HEADER_BYTES = 4096
_FORMAT = 1
_BATCH_BYTES = 2**20  # of text that is tokenized at once
# File systems keep times in steps of up to 2 s, so a file changed so soon may look unchanged.
_CLOCK_STEP_S = 2.0
_LOG_EVERY_S = 10.0
# Of an array that was tokenized elsewhere, these many blocks of ids go into the fingerprint.
_SAMPLED_BLOCKS, _BLOCK_TOKENS = 256, 2**14


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """All documents of a source, one after the other, as token ids.

    Attributes:
        tokens: (tokens,), an unsigned integer type, mapped from a file.
        documents: how many; None if the array was tokenized elsewhere.
        fingerprint: groups that print different ones train on different texts.
        bos, eos: the ids with which documents begin and end.
    """

    tokens: np.ndarray
    documents: int | None
    fingerprint: str
    bos: int | None
    eos: int | None


def load_corpus(
    source: Path | None, *, tokenizer: Tokenizer, cache: Path, limit_bytes: int | None, field: str = "text"
) -> Corpus:
    """Tokenize a corpus, unless the cache has it, and map it into memory.

    Args:
        source: a text, .jsonl or .parquet file, a folder of them, or a .npy array of token ids; None: the source of
            Python's standard library. Hidden and binary files of a folder are skipped.
        limit_bytes: stop reading text there. None: at the end; for the standard library, after 8 MiB.
        field: the field with the text in .jsonl and .parquet files.

    Raises:
        SettingsError: the source does not exist, cannot be read, or has no text; or the cache cannot be written.
    """
    if limit_bytes is not None:
        check_positive(corpus_bytes=limit_bytes)
    elif source is None:
        limit_bytes = DEFAULT_BYTES
    files = files_of(source)
    if source is not None and source.suffix == ".npy":
        return _load_array(source, tokenizer)
    try:
        stamps = [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    except OSError as error:
        raise SettingsError(
            f"The corpus file {error.filename!r} cannot be read: {error.strerror}."
        ) from error
    key = json.dumps([_FORMAT, stamps, tokenizer.fingerprint, field, limit_bytes])
    path = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.tokens"
    changed_s = max((stamp[2] for stamp in stamps), default=0) / 1e9
    header = _header_of(path)
    if header is None or header["created_s"] < changed_s + _CLOCK_STEP_S:
        header = _tokenize(pieces(files, field=field, limit_bytes=limit_bytes), tokenizer, path)
    if header["tokens"] == 0:
        raise SettingsError(
            f"The corpus {_name(source)} has no text. Point --corpus to text, .jsonl or .parquet files, or a folder "
            "of them."
        )
    return Corpus(
        tokens=np.memmap(path, header["dtype"], "r", _HEADER_BYTES, (header["tokens"],)),
        documents=header["documents"],
        fingerprint=header["fingerprint"],
        bos=tokenizer.bos,
        eos=tokenizer.eos,
    )


def _tokenize(documents: Iterator[Piece], tokenizer: Tokenizer, path: Path) -> dict[str, Any]:
    """Write the tokens of all documents to a file; return its header."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            try:
                header = _write(documents, tokenizer, file)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise SettingsError(
            f"The tokens of the corpus cannot be written to {str(path.parent)!r}: {error.strerror}. Name another "
            "folder with --corpus-cache."
        ) from error
    return header


def _write(documents: Iterator[Piece], tokenizer: Tokenizer, file: IO[bytes]) -> dict[str, Any]:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    digest, written, count = hashlib.sha256(), 0, 0
    begun_s = logged_s = time.monotonic()
    created_s = time.time()
    file.write(b"\0" * _HEADER_BYTES)
    for batch in _batches(documents):
        for piece, ids in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
            tokens = _with_specials(ids.astype(dtype), piece, tokenizer)
            digest.update(tokens.data)
            file.write(tokens.data)
            written += len(tokens)
            count += piece.first
        if time.monotonic() - logged_s > _LOG_EVERY_S:
            logged_s = time.monotonic()
            logger.info("tokenizing: %s tokens in %.0f s", f"{written:,}", logged_s - begun_s)
    header = {
        "created_s": created_s,
        "dtype": dtype.name,
        "tokens": written,
        "documents": count,
        "fingerprint": digest.hexdigest()[:12],
    }
    file.seek(0)
    file.write(json.dumps(header).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())  # before it has its name: a power cut must not leave one with gaps
    return header


def _batches(documents: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for piece in documents:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _with_specials(ids: np.ndarray, piece: Piece, tokenizer: Tokenizer) -> np.ndarray:
    before = [tokenizer.bos] if piece.first and tokenizer.bos is not None else []
    after = [tokenizer.eos] if piece.last and tokenizer.eos is not None else []
    return np.concatenate([np.array(before, ids.dtype), ids, np.array(after, ids.dtype)])


def _header_of(path: Path) -> dict[str, Any] | None:
    """The header of a file of the cache; None if there is none, or it is not whole."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(_HEADER_BYTES).partition(b"\n")[0])
            whole = os.fstat(file.fileno()).st_size == _HEADER_BYTES + (
                header["tokens"] * np.dtype(header["dtype"]).itemsize
            )
        return header if whole else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _load_array(path: Path, tokenizer: Tokenizer) -> Corpus:
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise SettingsError(f"The corpus file {str(path)!r} is not a .npy array: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise SettingsError(
            f"The corpus {str(path)!r} must be one row of integers, but is {tokens.dtype}{list(tokens.shape)}."
        )
    digest = hashlib.sha256(f"{tokens.dtype} {len(tokens)}".encode())
    for start in sorted({len(tokens) * k // _SAMPLED_BLOCKS for k in range(_SAMPLED_BLOCKS)}):
        digest.update(tokens[start : start + _BLOCK_TOKENS].tobytes())
    return Corpus(tokens, None, digest.hexdigest()[:12], tokenizer.bos, tokenizer.eos)


def _name(source: Path | None) -> str:
    return f"of the standard library in {str(standard_library())!r}" if source is None else repr(str(source))
