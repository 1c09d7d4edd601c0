"""The pure function from (step, shard) to a batch.

A corpus is cut into windows of one sequence each. A sample's number in the job, counted over steps, shards and
sequences, determines its window: grain shuffles the windows of each corpus in every epoch, and mixes the corpora
by their weights, all by arithmetic on that number. So each window is used exactly once per epoch of its corpus,
whichever group computes it and however often a step is retried.

A batch is a dict of int32 arrays:

    tokens       (batch, seq_len + 1): the last column is only predicted, never read
    segment_ids  (batch, seq_len): which document of its window a token belongs to, counted from 0
    positions    (batch, seq_len): where in its document, or in the part of it that is in the window
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from examples.llama3._config import SettingsError, check_not_negative, check_positive, check_seed
from examples.llama3._corpus import Corpus

if TYPE_CHECKING:
    import grain

Batch = dict[str, np.ndarray]

# So many samples' windows are in the fingerprint of the order, which shows if another grain shuffles differently.
_FINGERPRINTED = 64


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of one corpus, as a source for grain: element i is (corpus, i)."""

    corpus: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.corpus, index


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batches:
    """The job's samples: `(step, shard) -> batch`, pure.

    Args:
        corpora: the corpora to read.
        weights: how often each corpus is drawn from; None: in proportion to its windows.
        batch_per_shard: sequences in a shard.
        vocab_size: above all token ids.
        held_out: the fraction of each corpus's windows, at its end, that is left out for `held_out_batch`.
        seed: determines the order of the samples.

    Raises:
        SettingsError: a number is out of range, or a corpus is shorter than one sequence.
    """

    corpora: Sequence[Corpus]
    weights: Sequence[float] | None = None
    seq_len: int
    batch_per_shard: int
    shards: int
    vocab_size: int
    seed: int
    held_out: float = 0.0
    training_windows: tuple[int, ...] = field(init=False)
    _samples: "grain.MapDataset[tuple[int, int]]" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive(seq_len=self.seq_len, batch_per_shard=self.batch_per_shard, shards=self.shards)
        check_seed(self.seed)
        check_not_negative(held_out=self.held_out)
        counts = tuple(self._training_windows(corpus) for corpus in self.corpora)
        weights = counts if self.weights is None else _checked_weights(self.weights, len(counts))
        object.__setattr__(self, "training_windows", counts)
        object.__setattr__(self, "_samples", _order(counts, weights, self.seed))

    @property
    def fingerprint(self) -> str:
        """Differs between groups that read different texts, or the same in another order."""
        digest = hashlib.sha256(" ".join(corpus.fingerprint for corpus in self.corpora).encode())
        digest.update(str([self._sample(number) for number in range(_FINGERPRINTED)]).encode())
        return digest.hexdigest()[:12]

    def __call__(self, step: int, shard: int) -> Batch:
        """Return the batch of a shard of a step.

        Raises:
            SettingsError: a corpus that was tokenized elsewhere has a token that the vocabulary lacks.
        """
        return self._batch(self.windows(step, shard))

    def windows(self, step: int, shard: int) -> list[tuple[int, int]]:
        """Return the windows that this shard of this step reads, as pairs of the corpus's number and the window's."""
        assert 0 <= shard < self.shards
        first_sample = (step * self.shards + shard) * self.batch_per_shard
        return [self._sample(first_sample + i) for i in range(self.batch_per_shard)]

    def held_out_batches(self, count: int) -> Iterator[Batch]:
        """Yield batches of held-out windows, always the same, from each corpus in turn."""
        for batch in range(count):
            numbers = range(batch * self.batch_per_shard, (batch + 1) * self.batch_per_shard)
            yield self._batch([self._held_out(number) for number in numbers])

    def _sample(self, number: int) -> tuple[int, int]:
        sample = self._samples[number]
        assert sample is not None  # only a filtered dataset has gaps
        return sample

    def _held_out(self, number: int) -> tuple[int, int]:
        which, number = number % len(self.corpora), number // len(self.corpora)
        first = self.training_windows[which]
        return which, first + number % (self._window_count(self.corpora[which]) - first)

    def _window_count(self, corpus: Corpus) -> int:
        return (len(corpus.tokens) - 1) // self.seq_len

    def _training_windows(self, corpus: Corpus) -> int:
        count = self._window_count(corpus)
        if count < 1:
            raise SettingsError(
                f"The corpus has {len(corpus.tokens)} tokens, but one sequence takes {self.seq_len + 1} (--seq-len "
                "and the token after it). Provide more text or lower --seq-len."
            )
        if self.held_out == 0:
            return count
        left = count - max(1, round(self.held_out * count))
        if left < 1:
            raise SettingsError(
                f"--held-out {self.held_out} of {count} sequences leaves none to train on. Lower it, provide more "
                "text or lower --seq-len."
            )
        return left

    def _batch(self, windows: Sequence[tuple[int, int]]) -> Batch:
        """Read windows; a corpus's pages that are not in memory come from its file."""
        tokens = np.empty((len(windows), self.seq_len + 1), np.int32)
        starts = np.empty((len(windows), self.seq_len), bool)
        for row, (which, window) in enumerate(windows):
            corpus, first = self.corpora[which], window * self.seq_len
            read = corpus.tokens[first : first + self.seq_len + 1]
            if not 0 <= read.min() <= read.max() < self.vocab_size:
                raise SettingsError(
                    f"Tokens {first} to {first + self.seq_len} of corpus {which} have ids from {read.min()} to "
                    f"{read.max()}, but the model's vocabulary has {self.vocab_size}. Name the corpus's --tokenizer."
                )
            tokens[row] = read
            starts[row] = document_starts(tokens[row, :-1], bos=corpus.bos, eos=corpus.eos)
        index = np.arange(self.seq_len, dtype=np.int32)
        return {
            "tokens": tokens,
            "segment_ids": np.cumsum(starts, axis=1, dtype=np.int32) - starts[:, :1],
            "positions": index - np.maximum.accumulate(np.where(starts, index, 0), axis=1),
        }


def _order(counts: Sequence[int], weights: Sequence[float], seed: int) -> "grain.MapDataset[tuple[int, int]]":
    """Return the windows in the order in which they are read, without end."""
    import grain  # on import it logs, and so would set up logging before `main` does

    parts = [
        grain.MapDataset.source(Windows(number, count)).shuffle(seed=seed).repeat()
        for number, count in enumerate(counts)
    ]
    return parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, weights)


def document_starts(tokens: np.ndarray, *, bos: int | None, eos: int | None) -> np.ndarray:
    """Return where documents begin, as booleans of the same shape: at a `bos`, or after an `eos`."""
    starts = np.zeros(tokens.shape, bool)
    if bos is not None:
        starts |= tokens == bos
    if eos is not None:
        starts[..., 1:] |= tokens[..., :-1] == eos
    return starts


def _checked_weights(weights: Sequence[float], corpora: int) -> Sequence[float]:
    if len(weights) != corpora:
        raise SettingsError(
            f"--corpus-weights has {len(weights)} numbers for {corpora} corpora. Give one for each."
        )
    for weight in weights:
        check_positive(corpus_weights=weight)
    return weights
