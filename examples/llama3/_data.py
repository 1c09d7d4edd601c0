"""Text as bytes, and the pure function from (step, shard) to a batch of it.

The corpus is cut into windows of one sequence each. A sample's number in the job, counted over steps, shards
and sequences, determines its window: sample n of epoch e takes window shuffle(e, n). So each window is used exactly
once per epoch, whichever group computes it and however often a step is retried.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.llama3._config import SettingsError, check_positive
from jaxft.data import mix, permute

# A byte is its own token.
BOS, EOS, PAD = 256, 257, 258
SPECIAL_TOKENS = 3

# In the standard library: tests are repetitive, and installed packages differ between environments.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """All documents of a source, concatenated, as token ids."""

    tokens: np.ndarray
    documents: int
    fingerprint: str
    """A fingerprint of the tokens. Groups that print different ones train on different texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The job's samples: `(step, shard) -> batch`, pure."""

    corpus: Corpus
    seq_len: int
    batch_per_shard: int
    shards: int
    seed: int

    def __post_init__(self) -> None:
        check_positive(seq_len=self.seq_len, batch_per_shard=self.batch_per_shard, shards=self.shards)
        if self.window_count < 1:
            raise SettingsError(
                f"The corpus has {len(self.corpus.tokens)} tokens, but one sequence takes "
                f"{self.seq_len + 1} (--seq-len and the token after it). Provide more text or lower --seq-len."
            )

    @property
    def window_count(self) -> int:
        return (len(self.corpus.tokens) - 1) // self.seq_len

    def __call__(self, step: int, shard: int) -> np.ndarray:
        """Return token ids, (batch_per_shard, seq_len + 1): the last column is only predicted, never read."""
        starts = np.asarray(self.windows(step, shard)) * self.seq_len
        positions = starts[:, None] + np.arange(self.seq_len + 1)
        return self.corpus.tokens[positions].astype(np.int32)

    def windows(self, step: int, shard: int) -> list[int]:
        """Return the numbers of the windows that this shard of this step reads."""
        assert 0 <= shard < self.shards
        first_sample = (step * self.shards + shard) * self.batch_per_shard
        return [self._window(first_sample + i) for i in range(self.batch_per_shard)]

    def _window(self, sample: int) -> int:
        epoch, position = divmod(sample, self.window_count)
        return permute(position, size=self.window_count, key=mix(self.seed, epoch))


def load_corpus(source: Path | None, *, limit_bytes: int) -> Corpus:
    """Read a text file, a folder of them, or (None) the source of Python's standard library.

    Args:
        source: read in the order of sorted names; hidden and binary files are skipped.
        limit_bytes: stop reading there, in the middle of a document if necessary.

    Raises:
        SettingsError: the file does not exist, cannot be read, or has no text.
    """
    check_positive(corpus_bytes=limit_bytes)
    documents = [encode(text) for text in _read_up_to(_paths(source), limit_bytes)]
    if not documents:
        raise SettingsError(
            f"The corpus {_name(source)} has no text. Point --corpus to a text file or a folder of them."
        )
    tokens = np.concatenate(documents)
    fingerprint = hashlib.sha256(tokens.tobytes()).hexdigest()[:12]
    return Corpus(tokens=tokens, documents=len(documents), fingerprint=fingerprint)


def check_vocabulary(vocab_size: int) -> None:
    """Refuse a model whose embedding cannot hold every byte and the specials."""
    if vocab_size < 256 + SPECIAL_TOKENS:
        raise SettingsError(
            f"A vocabulary of {vocab_size} is too small for bytes, which need {256 + SPECIAL_TOKENS}. "
            "Choose another --size."
        )


def encode(text: bytes) -> np.ndarray:
    """Return one document's token ids, between a BOS and an EOS."""
    tokens = np.empty(len(text) + 2, np.uint16)
    tokens[0], tokens[-1] = BOS, EOS
    tokens[1:-1] = np.frombuffer(text, np.uint8)
    return tokens


def decode(tokens: np.ndarray) -> bytes:
    """Return the bytes of token ids, without special tokens."""
    return tokens[tokens < BOS].astype(np.uint8).tobytes()


def _paths(source: Path | None) -> Iterator[Path]:
    if source is None:
        paths = _walk(_standard_library(), without=_SKIPPED_FOLDERS)
        return (path for path in paths if path.suffix == ".py" and os.access(path, os.R_OK))
    if source.is_dir():
        return _walk(source)
    if source.is_file():
        return iter((source,))
    raise SettingsError(
        f"There is no corpus at {_name(source)}. Point --corpus to a text file or a folder of them."
    )


def _walk(folder: Path, *, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files below a folder in an order that depends on names alone."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in without and name[0] != ".")
        yield from (Path(parent, name) for name in sorted(files) if name[0] != ".")


def _read_up_to(paths: Iterator[Path], limit_bytes: int) -> Iterator[bytes]:
    room = limit_bytes
    for path in paths:
        try:
            with path.open("rb") as file:
                text = file.read(room)
        except OSError as error:
            raise SettingsError(f"The corpus file {str(path)!r} cannot be read: {error.strerror}.") from error
        if b"\0" in text or not text:  # a NUL byte means binary, as for grep and git
            continue
        yield text
        room -= len(text)
        if room == 0:
            return


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _name(source: Path | None) -> str:
    return f"of the standard library in {str(_standard_library())!r}" if source is None else repr(str(source))
