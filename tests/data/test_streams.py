"""Iterators as a function of step and shard: read in order, found again, and refused if they do not repeat."""

import errno
import functools
import importlib.util
import io
import itertools
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxft
from jaxft._base import _progress
from jaxft._errors import ConfigurationError
from jaxft.data import Prefetch, Streams, _sources, _states, from_iterator
from tests import patience


class Counted:
    """Streams of the numbers 100 * shard + n, which count what is opened and read."""

    def __init__(self, length: int = 10_000) -> None:
        self.opened: list[int] = []
        self.read = 0
        self.length = length

    def __call__(self, shard: int) -> Iterator[np.ndarray]:
        self.opened.append(shard)
        buffer = np.zeros(2)
        for number in range(self.length):
            self.read += 1
            buffer[:] = 100 * shard + number  # the same memory each time
            yield buffer


def values(batches: Streams, *asked: tuple[int, int]) -> list[float]:
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


@pytest.mark.parametrize("ahead", [2, 8, 12, 40])
def test_what_is_asked_for_again_is_kept_however_far_a_worker_is_ahead(ahead: int) -> None:
    """As every thousandth batch is, and that of a step that is tried again."""
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


def test_threads_that_overtake_each_other_read_each_batch_once() -> None:
    make = Counted()
    batches = from_iterator(make, shards=1)
    assert values(batches, (0, 0), (3, 0), (1, 0), (2, 0), (6, 0), (5, 0), (4, 0)) == [0, 3, 1, 2, 6, 5, 4]
    assert make.read == 7 + 2, "and the first two once more, to see that it repeats"


def test_going_back_opens_it_again_and_the_place_before_is_not_lost() -> None:
    make = Counted()
    batches = from_iterator(make, shards=1)
    assert values(batches, (1000, 0), (0, 0)) == [1000.0, 0.0]
    read = make.read
    assert values(batches, (1001, 0)) == [1001.0]
    assert make.read == read + 1, "a group that starts again asks for batch 0 as well"


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

    assert values(from_iterator(lambda shard: Dataset(0), shards=1), (5000, 0), (5001, 0)) == [5000.0, 5001.0]


class Stated:
    """An iterator with a state, as those of grain."""

    def __init__(self) -> None:
        self.number = -1
        self.restored = 0

    def __iter__(self) -> "Stated":
        return self

    def __next__(self) -> np.ndarray:
        self.number += 1
        return np.full(1, self.number)

    def get_state(self) -> dict[str, Any]:
        return {"number": self.number, "as bytes": b"\xff"}

    def set_state(self, state: dict[str, Any]) -> None:
        assert state["as bytes"] == b"\xff"
        self.number = state["number"]
        self.restored += 1


def test_another_process_goes_on_from_a_kept_state(tmp_path: Path) -> None:
    first = from_iterator(lambda shard: Stated(), 2, states=tmp_path, states_every=10)
    assert values(first, *[(step, 1) for step in range(45)])[-1] == 44.0
    assert sorted(int(path.stem) for path in (tmp_path / "shard-1").iterdir()) == [10, 20, 30, 40]
    made: list[Stated] = []

    def make(shard: int) -> Stated:
        made.append(Stated())
        return made[-1]

    second = from_iterator(make, 2, states=tmp_path, states_every=10)
    assert values(second, (37, 1)) == [37.0]
    assert [one.restored for one in made] == [1, 1], "the first is tried out"
    assert values(second, (5, 1), (49, 1)) == [5.0, 49.0]
    assert len(made) == 4
    # One that is damaged is passed over, and said.
    (tmp_path / "shard-1" / "40.json").write_text("{")
    assert values(from_iterator(make, 2, states=tmp_path), (42, 1)) == [42.0]


def test_a_program_that_changes_its_folder_finds_its_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batches = from_iterator(lambda shard: Stated(), 1, states="states", states_every=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    values(batches, (0, 0), (1, 0), (2, 0))
    assert sorted(path.name for path in (tmp_path / "states" / "shard-0").iterdir()) == ["1.json", "2.json"]


def test_only_the_newest_states_are_kept(tmp_path: Path) -> None:
    batches = from_iterator(lambda shard: Stated(), 1, states=tmp_path, states_every=1)
    values(batches, *[(step, 0) for step in range(30)])
    kept = sorted(int(path.stem) for path in (tmp_path / "shard-0").iterdir())
    assert kept == list(range(22, 30))


def test_a_state_that_cannot_be_written_is_left_out_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Stated):
        def get_state(self) -> dict[str, Any]:
            return {"a": object()}

    batches = from_iterator(lambda shard: Odd(), 1, states=tmp_path, states_every=1)
    values(batches, *[(step, 0) for step in range(3)])
    (warning,) = caplog.messages
    assert warning.startswith(
        f"states of streams in {tmp_path} are not used: a object in the state of the stream cannot be written as JSON"
    )


@pytest.mark.parametrize("call", ["fsync", "mkdir", "rename", "unlink", "stat"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.ESTALE])
def test_a_disk_that_takes_no_state_does_not_stop_the_training(
    code: int, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    batches = from_iterator(lambda shard: Stated(), 1, states=tmp_path, states_every=1)
    asked = [(step, 0) for step in range(12)]
    monkeypatch.setattr(os, {"rename": "replace"}.get(call, call), failing)
    assert values(batches, *asked) == list(range(12))
    monkeypatch.undo()
    (said,) = (record.message for record in caplog.records if "cannot be read" not in record.message)
    assert said.startswith(f"the state of a stream was not written to {tmp_path / 'shard-0'}")
    assert os.strerror(code) in said
    assert "Training goes on" in said
    assert not list(tmp_path.rglob("*.tmp"))
    assert values(batches, (12, 0)) == [12.0]
    assert (tmp_path / "shard-0" / "12.json").is_file(), "the next state is tried"


def test_states_that_cannot_be_listed_are_read_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(_states.States, "_positions", failing)
    batches = from_iterator(lambda shard: Stated(), 1, states=tmp_path)
    assert values(batches, (12, 0)) == [12.0]
    assert "the states of shard 0 in" in caplog.records[0].message


def test_a_state_from_which_a_stream_goes_on_elsewhere_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of a Hugging Face dataset with a shuffle buffer."""

    class Forgets(Stated):
        def set_state(self, state: dict[str, Any]) -> None:
            super().set_state({**state, "number": state["number"] + 3})

    values(
        from_iterator(lambda shard: Forgets(), 1, states=tmp_path, states_every=5),
        *[(s, 0) for s in range(12)],
    )
    again = from_iterator(lambda shard: Forgets(), 1, states=tmp_path)
    assert values(again, (11, 0), (12, 0)) == [11.0, 12.0]
    (said,) = (record.message for record in caplog.records)
    assert (
        "restored from its state before batch 10, the stream of shard 0 does not go on with the same batch"
        in said
    )


@pytest.mark.parametrize(
    ("odd", "why"), [({}, "KeyError: 'number'"), ({"number": 99, "as bytes": b"\xff"}, "StopIteration: ")]
)
def test_a_state_that_the_source_does_not_take_is_not_used(
    odd: dict[str, Any], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after the source was changed: its stream is shorter now, or its state has other fields."""

    class Changed(Stated):
        def set_state(self, state: dict[str, Any]) -> None:
            self.number = odd["number"]

        def __next__(self) -> np.ndarray:
            if self.number >= 50:
                raise StopIteration
            return super().__next__()

    first = from_iterator(lambda shard: Stated(), 1, states=tmp_path, states_every=5)
    values(first, *[(step, 0) for step in range(12)])
    assert values(from_iterator(lambda shard: Changed(), 1, states=tmp_path), (11, 0), (12, 0)) == [
        11.0,
        12.0,
    ]
    (said,) = (record.message for record in caplog.records)
    assert f"shard 0 cannot be restored from its state before batch 10: {why}" in said


def test_a_stream_that_was_skipped_to_leaves_no_state(tmp_path: Path) -> None:
    """The state would be that of the source itself, which nothing reads: the first one, at any batch."""

    class Dataset:
        def __init__(self, start: int = 0) -> None:
            self.number = start

        def skip(self, count: int) -> "Dataset":
            return Dataset(self.number + count)

        def __iter__(self) -> Iterator[np.ndarray]:
            while True:
                self.number += 1
                yield np.full(1, self.number - 1)

        def state_dict(self) -> dict[str, Any]:
            return {"number": self.number}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.number = state["number"]

    def opened() -> Streams:
        return from_iterator(lambda shard: Dataset(), 2, states=tmp_path, states_every=10)

    values(opened(), *[(step, 0) for step in range(21)])
    values(opened(), *[(step, 1) for step in range(5, 21)])
    assert values(opened(), (25, 0), (25, 1)) == [25.0, 25.0]
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["shard-0", "shard-0"]


@pytest.mark.skipif(importlib.util.find_spec("grain") is None, reason="grain is not installed")
@pytest.mark.filterwarnings("ignore")  # of grain's own imports
def test_a_grain_iterator_with_its_state(tmp_path: Path) -> None:
    import grain

    def make(shard: int) -> Any:
        numbers = grain.MapDataset.range(4000).seed(3).shuffle()[shard::2]
        return numbers.map(lambda i: {"x": np.full(3, i, np.float32)}).repeat().batch(4).to_iter_dataset()

    wanted = from_iterator(make, 2)
    expected = [wanted(step, 1)["x"].tolist() for step in range(25)]
    first = from_iterator(make, 2, states=tmp_path, states_every=5)
    assert [first(step, 1)["x"].tolist() for step in range(22)] == expected[:22]
    assert (tmp_path / "shard-1" / "20.json").is_file()
    again = from_iterator(make, 2, states=tmp_path)
    assert again(24, 1)["x"].tolist() == expected[24]


@pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed")
@pytest.mark.filterwarnings("ignore")
def test_a_loader_of_torchdata_that_shuffles_with_its_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The state of a torch.Generator is a tensor."""
    torch: Any = importlib.import_module("torch")
    loaders: Any = importlib.import_module("torchdata.stateful_dataloader")

    def make(shard: int) -> Any:
        order = torch.Generator().manual_seed(shard)
        return loaders.StatefulDataLoader(
            torch.arange(4000)[shard::2], batch_size=4, shuffle=True, generator=order
        )

    wanted = from_iterator(make, 2)
    expected = [wanted(step, 1).tolist() for step in range(25)]
    first = from_iterator(make, 2, states=tmp_path, states_every=5)
    assert [first(step, 1).tolist() for step in range(22)] == expected[:22]
    opened: list[int] = []
    again = from_iterator(lambda shard: opened.append(shard) or make(shard), 2, states=tmp_path)
    with caplog.at_level(logging.WARNING, "jaxft"):
        assert again(24, 1).tolist() == expected[24]
    assert not caplog.messages
    assert opened == [1, 1], "to try the state out, and to go on from it"


def test_reading_through_is_said_with_its_cost_and_counts_as_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_sources, "MENTION_S", 0.0)
    moves: list[None] = []
    with _progress.told(lambda: moves.append(None)), caplog.at_level(logging.WARNING, "jaxft"):
        values(from_iterator(Counted(), 1), (500, 0))
    assert len(moves) == 500
    first = caplog.records[0].message
    assert first.startswith(
        "shard 0: its source cannot seek, so batches are read and dropped: 1 of 500, about "
    )


# What is refused.


def test_texts_for_a_function_that_makes_a_batch_of_them() -> None:
    texts = [{"prompts": np.array(["ab", "c"]), "task": "sums", "n": 1}] * 2
    batches = from_iterator(lambda shard: iter(texts), shards=1)
    assert batches(0, 0)["prompts"].tolist() == ["ab", "c"]
    opened = iter(["sums", "times"])
    for make, why in (
        (lambda shard: iter([next(opened)] * 3), r"the batch was array\('sums', .*, then array\('times'"),
        (lambda shard: iter([{"task": object()}] * 3), "and not an array of numbers"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            from_iterator(make, shards=1)(0, 0)


def test_a_stream_that_does_not_repeat_is_refused() -> None:
    unseeded = np.random.default_rng()
    batches = from_iterator(lambda shard: iter([{"x": unseeded.standard_normal(3)}]), 1)
    with pytest.raises(
        ConfigurationError, match=r"make\(0\) was called twice.*batch 0: \['x'\] differs in 3 of 3"
    ):
        batches(0, 0)


class Rows:
    """A source with `skip`, whose batches have so many rows."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first = size, first

    def skip(self, rows: int) -> "Rows":
        return Rows(self.size, self.first + rows)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (np.arange(row, row + self.size) for row in itertools.count(self.first, self.size))


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (lambda shard, start=0: iter(Rows(4, start)), r"make\(1, start=1\)"),
        (lambda shard, start=0: itertools.islice(Rows(4), 1 if start else None), r"make\(1, start=1\)"),
        (lambda shard: Rows(4), r"make\(1\) and skip\(1\)"),
    ],
    ids=["start", "an end", "skip"],
)
def test_a_stream_that_seeks_to_another_place_is_refused(make: Any, how: str) -> None:
    """A run without failures would never seek, and a group that comes back would train on other samples."""
    with pytest.raises(ConfigurationError, match=rf"{how} does not begin with batch 1 of the stream"):
        from_iterator(make, 2)(0, 1)


@pytest.mark.parametrize("make", [lambda shard: Rows(1), lambda shard, start=0: iter([7][start:])])
def test_a_stream_that_seeks_to_its_place_is_not_refused(make: Any) -> None:
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


def shuffled_by_a_global_generator(shard: int) -> Iterator[np.ndarray]:
    np.random.seed(shard)
    while True:
        yield from np.random.permutation(8).reshape(4, 2)


def shuffled_by_its_own(shard: int) -> Iterator[np.ndarray]:
    own = np.random.default_rng(shard)
    while True:
        yield from own.permutation(8).reshape(4, 2)


def test_a_stream_that_seeds_a_global_generator_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Its next epoch depends on which others are read, which its first batches do not show."""
    np.random.seed(7)
    batches = from_iterator(shuffled_by_a_global_generator, 2)
    for _ in range(2):
        batches(0, 1)
    (warning,) = caplog.messages
    assert warning.startswith(
        "make(1) seeds a generator that all streams of this process share, with numpy.random.seed. "
    )


def test_the_check_leaves_global_generators_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    np.random.seed(7)
    random.seed(7)
    wanted = np.random.random(), random.random()
    np.random.seed(7)
    random.seed(7)
    from_iterator(shuffled_by_its_own, 2)(0, 1)
    assert (np.random.random(), random.random()) == wanted
    assert not caplog.messages


@pytest.mark.parametrize("make", [lambda shard: None, lambda shard, start: None])
def test_what_is_no_stream_is_refused(make: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"make\(1\) returned None, a NoneType, which is not iterable"
    ):
        from_iterator(make, 2)(3, 1)


def test_a_stream_that_ends_is_named() -> None:
    batches = from_iterator(Counted(3), 2)
    assert values(batches, (2, 1)) == [102.0]
    for step in (3, 7):
        with pytest.raises(
            ConfigurationError, match=f"shard 1 has ended after 3 batches, and batch {step} was"
        ):
            batches(step, 1)
    assert values(batches, (1, 1)) == [101.0]


def test_an_exception_of_the_source_goes_through_and_the_next_call_reads_it_again() -> None:
    fails = [True]

    def make(shard: int) -> Iterator[np.ndarray]:
        yield np.zeros(1)
        if fails:
            fails.clear()
            raise OSError("cannot read sample 17")
        yield np.ones(1)

    batches = from_iterator(make, 1)
    with pytest.raises(OSError, match="sample 17"):
        batches(1, 0)
    assert values(batches, (1, 0)) == [1.0]


@pytest.mark.parametrize(("step", "shard"), [(-1, 0), (0, 2), (0, -1)])
def test_no_such_shard(step: int, shard: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"no shard {shard} of step {step}.*shards=batches\.shards"):
        from_iterator(Counted(), 2)(step, shard)


def test_arguments_that_cannot_be_right() -> None:
    with pytest.raises(ConfigurationError, match="shards must be at least 1, not 0"):
        from_iterator(Counted(), 0)
    with pytest.raises(ConfigurationError, match="states_every must be at least 1, not -1"):
        from_iterator(Counted(), 2, states_every=-1)
    with pytest.raises(ConfigurationError, match="states must be a path, not the empty string"):
        from_iterator(Counted(), 2, states="")
    with pytest.raises(ConfigurationError, match="make is a list, but it must be a function"):
        from_iterator([1, 2], 2)  # pyright: ignore[reportArgumentType]


# In a step.


def test_it_trains_a_step() -> None:
    def train_step(w: Any, batch: Any) -> tuple[Any, Any]:
        mean = jaxft.pmean(jnp.mean(batch) + 0.0 * w)
        return w + mean, mean

    batches = from_iterator(Counted(), shards=2)
    step, w = jaxft.fault_tolerant(train_step, None, shards=batches.shards), jnp.zeros(())
    while step.step < 4:
        w, _ = step(w, batches)
    assert float(w) == sum(50 + n for n in range(4))
    with pytest.raises(ConfigurationError, match="divided into 2 shards"):
        jaxft.fault_tolerant(train_step, None, shards=4)(jnp.zeros(()), batches)
    assert isinstance(jax.tree.leaves(batches(0, 0))[0], np.ndarray)
