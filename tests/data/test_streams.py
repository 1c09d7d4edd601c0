"""Iterators as a function of step and shard: read in order, found again, and refused if they do not repeat."""

import functools
import io
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxft._base import _calls
from jaxft._errors import ConfigurationError, JobFinished
from jaxft.data import Prefetch, Streams, _streams, from_iterator
from tests import patience


class Counted:
    """Streams of the numbers 100 * shard + n, which count how often they are opened and read, and which are open."""

    def __init__(self, length: int = 10_000) -> None:
        self.opened: list[int] = []
        self.open: list[int] = []
        self.read = 0
        self.length = length

    def __call__(self, shard: int) -> Iterator[np.ndarray]:
        self.opened.append(shard)
        self.open.append(shard)
        buffer = np.zeros(2)
        try:
            for number in range(self.length):
                self.read += 1
                buffer[:] = 100 * shard + number  # the same memory each time
                yield buffer
        finally:
            self.open.remove(shard)


def values(batches: Streams | Prefetch, *asked: tuple[int, int]) -> list[float]:
    return [float(batches(*at)[0]) for at in asked]


def test_a_stream_is_read_in_order_and_what_was_read_is_kept() -> None:
    make = Counted()
    batches = from_iterator(make, shards=3)
    kept = [batches(step, 1) for step in range(5)]
    assert [float(batch[1]) for batch in kept] == [100.0, 101.0, 102.0, 103.0, 104.0], (
        "the buffer is not shared"
    )
    assert make.opened == [1, 1], "once more, to see that it repeats; no other shard"
    assert make.read == 5 + 2
    assert values(batches, (4, 1), (2, 1), (3, 1)) == [104.0, 102.0, 103.0], "a step that is tried again"
    assert make.read == 5 + 2
    assert values(batches, (5, 1), (7, 2)) == [105.0, 207.0]


@pytest.mark.parametrize("ahead", [2, 40])
def test_what_is_asked_for_again_is_kept_however_far_a_worker_is_ahead(ahead: int) -> None:
    """As every thousandth batch is, and the batch of a step that is tried again."""
    make = Counted()
    batches = Prefetch(from_iterator(make, shards=2), ahead=ahead)
    once = 2  # the first batches of the shard that is asked for first, to see that it repeats
    for step in range(60):
        for _ in range(2):
            for shard in range(2):
                assert float(batches(step, shard)[0]) == 100 * shard + step
            read = 2 * (step + 1 + ahead) + once
            patience.until(lambda read=read: make.read >= read, "the worker to read ahead")
            assert make.read == read, "each batch is read once"
    assert len(make.opened) == 2 + 1


def test_going_back_opens_it_again_and_the_place_before_is_not_lost() -> None:
    make = Counted()
    batches = from_iterator(make, shards=1)
    assert values(batches, (1000, 0), (0, 0)) == [1000.0, 0.0]
    read = make.read
    assert values(batches, (1001, 0)) == [1001.0]
    assert make.read == read + 1, "a group that starts again asks for batch 0 as well"


@pytest.mark.parametrize("ahead", [0, 4])
def test_streams_of_shards_that_another_group_computes_are_closed(ahead: int) -> None:
    """A loader of torch has its processes as long as it is open."""
    make = Counted()
    streams = from_iterator(make, shards=8)
    batches = Prefetch(streams, ahead=ahead) if ahead else streams
    for step in range(3):
        for shard in range(8):
            batches(step, shard)
    assert set(make.open) == set(range(8))
    for step in range(3, 30):
        batches(step, 5)
    patience.until(lambda: make.open == [5], "the other streams to be closed")
    assert values(batches, (30, 2)) == [230.0]


def test_what_can_seek_is_not_read_through() -> None:
    opened: list[tuple[int, int]] = []

    def make(shard: int, start: int = 0) -> Iterator[np.ndarray]:
        opened.append((shard, start))
        return (np.full(1, 100 * shard + number) for number in itertools.count(start))

    batches = from_iterator(make, shards=2)
    assert values(batches, (5000, 1), (5001, 1), (9000, 1), (3, 0)) == [5100.0, 5101.0, 9100.0, 3.0]
    assert opened == [(1, 5000), (1, 9000), (0, 3)]


def test_a_source_with_skip_is_asked_to() -> None:
    class Dataset:
        """As tf.data.Dataset and IterableDataset."""

        def __init__(self, start: int) -> None:
            self.start = start

        def skip(self, count: int) -> "Dataset":
            return Dataset(self.start + count)

        def __iter__(self) -> Iterator[np.ndarray]:
            assert self.start == 5000
            return (np.full(1, number) for number in itertools.count(self.start))

    assert values(from_iterator(lambda _: Dataset(0), shards=1), (5000, 0), (5001, 0)) == [5000.0, 5001.0]


def test_reading_through_is_said_with_its_cost_and_counts_as_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_streams, "MENTION_S", 0.0)
    moves: list[None] = []
    with _calls.reporting(lambda: moves.append(None)), caplog.at_level(logging.WARNING, "jaxft"):
        values(from_iterator(Counted(), 1), (500, 0))
    assert len(moves) == 500
    first = caplog.records[0].message
    assert first.startswith(
        "shard 0: its source cannot seek, so batches are read and dropped: 1 of 500, about "
    )


# Errors.


def test_a_stream_that_does_not_repeat_is_refused() -> None:
    unseeded = np.random.default_rng()
    batches = from_iterator(lambda _: iter([{"x": unseeded.standard_normal(3)}]), 1)
    with pytest.raises(
        ConfigurationError, match=r"make\(0\) was called twice.*batch 0: \['x'\] differs in 3 of 3"
    ):
        batches(0, 0)


class Rows:
    """A source with `skip`, whose batches have several rows."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first = size, first

    def skip(self, rows: int) -> "Rows":
        return Rows(self.size, self.first + rows)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (np.arange(row, row + self.size) for row in itertools.count(self.first, self.size))


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (lambda _shard, start=0: iter(Rows(4, start)), r"make\(1, start=1\)"),
        (lambda _shard, start=0: itertools.islice(Rows(4), 1 if start else None), r"make\(1, start=1\)"),
        (lambda _: Rows(4), r"make\(1\) and skip\(1\)"),
    ],
    ids=["start", "an end", "skip"],
)
def test_a_stream_that_seeks_to_another_place_is_refused(make: Any, how: str) -> None:
    """A run without failures would never seek, and a group that comes back would train on other samples."""
    with pytest.raises(ConfigurationError, match=rf"{how} does not begin with batch 1 of the stream"):
        from_iterator(make, 2)(0, 1)


def noisy(shard: int) -> Iterator[np.ndarray]:
    np.random.seed(shard)
    return (np.random.normal(size=3) for _ in itertools.count())


def at_a_place_in_one_file(file: io.BytesIO, shard: int) -> Iterator[np.ndarray]:
    file.seek(32 * shard)
    return (np.frombuffer(file.read(4), np.uint8) for _ in itertools.count())


@pytest.mark.parametrize(
    "make",
    [noisy, functools.partial(at_a_place_in_one_file, io.BytesIO(bytes(range(64))))],
    ids=["a global generator", "a file that is open"],
)
def test_streams_that_depend_on_which_others_are_read_are_refused(make: Any) -> None:
    """Each repeats if it is read alone. How a group reads several in turn depends on which groups are there."""
    with pytest.raises(
        ConfigurationError,
        match=r"Two streams of make\(0\) begin with the same batch, but read in turn they diff",
    ):
        from_iterator(lambda shard: make(shard), 2)(0, 0)


@pytest.mark.parametrize("make", [lambda _: None, lambda _, start: None])  # noqa: ARG005 - its name counts
def test_what_is_no_stream_is_refused(make: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"make\(1\) returned None, a NoneType, which is not iterable"
    ):
        from_iterator(make, 2)(3, 1)


def test_a_stream_that_ends_finishes_the_job_at_its_step(caplog: pytest.LogCaptureFixture) -> None:
    batches = from_iterator(Counted(3), 2)
    assert values(batches, (2, 1)) == [102.0]
    with pytest.raises(
        JobFinished, match="shard 1 has ended after 3 batches, so the job is finished at step 3"
    ) as over:
        batches(3, 1)
    assert over.value.code == 0
    assert str(over.value) in caplog.text
    assert values(batches, (1, 1)) == [101.0]


@pytest.mark.parametrize(("length", "asked"), [(3, 7), (0, 0)])
def test_a_stream_that_is_empty_or_shorter_than_before_is_refused(length: int, asked: int) -> None:
    with pytest.raises(
        ConfigurationError, match=f"after {length} batches, and batch {asked} was .* empty here"
    ):
        from_iterator(Counted(length), 2)(asked, 1)


def test_an_exception_of_the_source_goes_through_and_the_next_call_reads_it_again() -> None:
    fails = [True]

    def make(_shard: int) -> Iterator[np.ndarray]:
        yield np.zeros(1)
        if fails:
            fails.clear()
            raise OSError("cannot read sample 17")
        yield np.ones(1)

    batches = from_iterator(make, 1)
    with pytest.raises(OSError, match="sample 17"):
        batches(1, 0)
    assert values(batches, (1, 0)) == [1.0]


def test_arguments_that_cannot_be_right() -> None:
    for step, shard in ((-1, 0), (0, 2)):
        with pytest.raises(
            ConfigurationError, match=rf"no shard {shard} of step {step}.*shards=batches\.shards"
        ):
            from_iterator(Counted(), 2)(step, shard)
    with pytest.raises(ConfigurationError, match="shards must be at least 1, not 0"):
        from_iterator(Counted(), 0)
    with pytest.raises(ConfigurationError, match="make is a list, but it must be a function"):
        from_iterator([1, 2], 2)  # pyright: ignore[reportArgumentType]
