"""The ledger: every window once an epoch, for any group and in any order; corpora mixed by weight; documents."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from llama3_cases import corpus_of

from examples.llama3._config import SettingsError
from examples.llama3._corpus import Corpus
from examples.llama3._data import Batches, document_starts

BOS, EOS = 256, 257


def batches(*, tokens: int = 801, **changes: object) -> Batches:
    sizes = {"seq_len": 8, "batch_per_shard": 2, "shards": 4, "seed": 0, "vocab_size": 320}
    return Batches(**{"corpora": (corpus_of(tokens),), **sizes, **changes})  # pyright: ignore


def ledger(data: Batches, steps: range) -> list[tuple[int, int]]:
    return [window for step in steps for shard in range(data.shards) for window in data.windows(step, shard)]


def windows(count: int, corpus: int = 0) -> Counter[tuple[int, int]]:
    return Counter((corpus, window) for window in range(count))


# The ledger.


def test_each_window_is_used_exactly_once_an_epoch() -> None:
    data = batches()
    assert data.training_windows == (100,)
    used = ledger(data, range(25))  # 25 steps of 8 samples are two epochs
    assert Counter(used[:100]) == windows(100)
    assert Counter(used[100:]) == windows(100)
    assert used[:100] != used[100:]


def test_the_order_of_samples_does_not_depend_on_the_number_of_shards() -> None:
    four, two = batches(shards=4, batch_per_shard=2), batches(shards=2, batch_per_shard=4)
    assert ledger(four, range(10)) == ledger(two, range(10))


def test_a_batch_is_pure_and_so_may_be_asked_for_by_anyone_at_any_time() -> None:
    here, elsewhere = batches(), batches()
    late = here(7, 3)
    here(0, 0)

    def same(other: dict[str, np.ndarray]) -> bool:
        return all(np.array_equal(late[name], other[name]) for name in late)

    assert same(elsewhere(7, 3))
    assert same(here(7, 3))
    assert not same(here(7, 2))
    assert not same(here(8, 3))
    assert not same(batches(seed=1)(7, 3))


def test_a_batch_holds_its_windows_and_the_token_after_each() -> None:
    data = batches()
    tokens = data(3, 1)["tokens"]
    assert (tokens.shape, tokens.dtype) == ((2, 9), np.int32)
    for row, (_, window) in zip(tokens, data.windows(3, 1), strict=True):
        assert row.tolist() == [i % 256 for i in range(window * 8, window * 8 + 9)]


@pytest.mark.parametrize("seed", [-1, 2**32, 2**64])
def test_a_seed_that_no_generator_takes_is_refused(seed: int) -> None:
    with pytest.raises(SettingsError, match=f"--seed must be from 0 to 4294967295, not {seed}"):
        batches(seed=seed)


def test_a_corpus_shorter_than_one_sequence_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"has 8 tokens, but one sequence takes 9 \(--seq-len"):
        batches(tokens=8)
    assert batches(tokens=9).training_windows == (1,)


def test_a_token_that_the_vocabulary_lacks_is_refused() -> None:
    data = batches(vocab_size=200)
    step = next(step for step in range(25) if any(window % 32 >= 25 for _, window in data.windows(step, 0)))
    with pytest.raises(
        SettingsError, match=r"the model's vocabulary has 200\. Name the corpus's --tokenizer"
    ):
        data(step, 0)


# Mixing.


def test_corpora_are_mixed_by_weight_and_each_keeps_its_epochs() -> None:
    data = batches(corpora=(corpus_of(81), corpus_of(161), corpus_of(401)), weights=(0.5, 0.3, 0.2))
    used = ledger(data, range(50))
    share = Counter(which for which, _ in used)
    assert [share[which] / len(used) for which in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    first = [window for window in used if window[0] == 0]
    assert all(Counter(first[e * 10 : (e + 1) * 10]) == windows(10) for e in range(len(first) // 10))


def test_without_weights_all_tokens_are_read_equally_often() -> None:
    data = batches(corpora=(corpus_of(81), corpus_of(241)))
    assert Counter(ledger(data, range(5))) == windows(10) + windows(30, corpus=1)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0,), "--corpus-weights has 1 numbers for 2 corpora"),
        ((1.0, -0.5), r"--corpus-weights must be above 0 and finite, not -0\.5"),
        ((1.0, float("inf")), "--corpus-weights must be above 0 and finite, not inf"),
    ],
)
def test_bad_weights_are_refused(weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        batches(corpora=(corpus_of(81), corpus_of(81)), weights=weights)


def test_the_fingerprint_tells_texts_and_their_order_apart() -> None:
    def print_of(**changes: object) -> str:
        return batches(**changes).fingerprint  # pyright: ignore

    other = dataclasses.replace(corpus_of(801), fingerprint="other")
    assert print_of() == print_of()
    assert len({print_of(), print_of(corpora=(other,)), print_of(seed=1), print_of(held_out=0.1)}) == 4


# Held-out windows.


def test_held_out_windows_are_never_trained_on() -> None:
    data = batches(held_out=0.1)
    assert data.training_windows == (90,)
    assert {window for _, window in ledger(data, range(100))} == set(range(90))
    held_out = [batch["tokens"] for batch in data.held_out_batches(5)]
    assert np.concatenate(held_out)[:, 0].tolist() == [window * 8 % 256 for window in range(90, 100)]
    assert np.array_equal(held_out, [batch["tokens"] for batch in data.held_out_batches(5)])


# Documents.


def test_a_token_knows_its_document_and_its_place_in_it() -> None:
    tokens = np.array([7, EOS, BOS, 1, 2, EOS, BOS, EOS, BOS, 3, 4, 5, 6], np.uint16)
    corpus = Corpus(tokens=tokens, documents=3, fingerprint="", bos=BOS, eos=EOS)
    batch = batches(corpora=(corpus,), seq_len=12, batch_per_shard=1, shards=1)(0, 0)
    assert batch["segment_ids"].tolist() == [[0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3]]
    assert batch["positions"].tolist() == [[0, 1, 0, 1, 2, 3, 0, 1, 0, 1, 2, 3]]
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}


@pytest.mark.parametrize(("bos", "eos"), [(BOS, EOS), (BOS, None), (None, EOS)])
def test_one_of_the_two_special_tokens_is_enough(bos: int | None, eos: int | None) -> None:
    documents = ([1, 2, 3], [4], [5, 6])
    special = [[bos] if bos is not None else [], [eos] if eos is not None else []]
    tokens = [special[0] + text + special[1] for text in documents]
    starts = np.cumsum([0, *map(len, tokens)])[:-1].tolist()
    found = document_starts(np.concatenate(tokens), bos=bos, eos=eos)
    found[0] = True  # the window's own beginning
    assert np.flatnonzero(found).tolist() == starts
