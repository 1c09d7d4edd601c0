"""Batches from iterators, as a function of step and shard.

A group that starts later, or takes over a shard, must find its place in a stream. It uses, in this order:

* `make(shard, start=n)`: the user's code opens the stream at batch n;
* `source.skip(n)` (tf.data, Hugging Face datasets);
* reading batches and dropping them.
"""

import contextlib
import inspect
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxft_protocol.values import LongWait

from jaxft._base import _calls
from jaxft._base._numbers import whole
from jaxft._errors import ConfigurationError, JobFinished
from jaxft._programs._checks import check_function, takes_next
from jaxft.data._batch_functions import difference

_log = logging.getLogger("jaxft")

# Batches of each shard that are kept for a step that is tried again, in addition to prefetched ones.
KEPT = 8
# Streams of each shard that are kept open: a group that starts again reads batch 0 as well, to compare programs.
OPEN = 2
MENTION_S = 2.0


def from_iterator(make: Callable[..., Any], shards: int) -> "Streams":
    """Make a batch function of iterators, one for each shard: batch number s of a shard's stream is for step s.

    For sources that can only be read in order: generators, grain iterators, tf.data, torch's DataLoader, an
    IterableDataset of Hugging Face. `make(shard)` opens the stream of one shard, from its start, and must give the
    same batches each time: seed what shuffles. A group opens only the streams of the shards that it computes, reads
    each in order, and closes the streams of shards that it has not computed for a while.

    A group that comes later, or takes over the shard of a lost one, must find the right place in a stream. It seeks
    if it can: with `make(shard, start=n)`, or with the source's own `skip(n)`. Otherwise it reads all batches before,
    and logs how long that takes: for a long run on such a source, prefer `jaxft.data.Batches`, which has
    random access.

    Streams may end. The step for which the first shard has no batch left is taken by no group: the job finishes
    before it, in all groups (`JobFinished`).

    Example:
        >>> import itertools, numpy as np
        >>> from jaxft.data import from_iterator
        >>> def make(shard, start=0):
        ...     return (np.full(2, 10 * shard + n) for n in itertools.count(start))
        >>> batches = from_iterator(make, shards=4)
        >>> batches(7, 3).tolist()
        [37, 37]

    Args:
        make: `make(shard)` returns an iterable of batches: pytrees of numpy arrays, numbers, or tensors of torch or
            TensorFlow, which become numpy arrays. If it has a parameter `start`, it is called as
            `make(shard, start=n)` and begins with batch n. Give each shard its own samples, such as
            `dataset.shard(shards, shard)`.
        shards: as passed to `jaxft.fault_tolerant`.

    Returns:
        A batch function, with the attribute `shards`. It may be used in several threads (`jaxft.data.Prefetch`).

    Raises:
        ConfigurationError: for arguments that cannot be right; from a call, if a stream is empty, or if `make` gives
            other batches when it is called again, with `start=1`, or while another stream is read.
        JobFinished: from a call, if the stream has ended.
    """
    shards = whole("shards", shards, 1)
    if not callable(make) or takes_next(make):
        raise ConfigurationError(
            f"make is a {type(make).__name__}, but it must be a function that opens the stream of a shard: a group "
            "may have to read any shard, and begin again. Pass `lambda shard: ...`."
        )
    instead = "Pass `lambda shard: ...`, with a second parameter `start` if it seeks."
    check_function("make", make, "the number of a shard", 1, instead, seeks="start" in _parameters(make))
    return Streams(make, shards)


class Streams:
    """The batches of `from_iterator`."""

    def __init__(self, make: Callable[..., Any], shards: int) -> None:
        self.shards = shards
        self._make = make
        self._keep = KEPT
        self._streams = {shard: _Stream(make, shard) for shard in range(shards)}
        self._checked = False
        self._lock = threading.Lock()

    def __call__(self, step: int, shard: int) -> Any:
        """Return the batch of a shard of a step.

        Raises:
            ConfigurationError: there is no such shard, its stream is shorter than before, or `make` does not repeat
                itself.
            JobFinished: the stream has ended.
        """
        if step < 0 or shard not in self._streams:
            raise ConfigurationError(
                f"There is no shard {shard} of step {step}: steps count from 0, and these streams have {self.shards} "
                "shards. Pass the same number to jaxft.fault_tolerant: `shards=batches.shards`."
            )
        batch = self._streams[shard].batch(step, keep=self._keep)
        with self._lock:
            if step == 0 and not self._checked:  # later it would have to be searched for once more
                self._check_repeats(shard, batch)
                self._checked = True
        for stream in self._streams.values():
            stream.close_unless_used_since(step - self._keep)
        return batch

    def read_ahead(self, steps: int) -> None:
        """Keep this many more batches of each shard: one may be asked for again while later ones are read."""
        self._keep = max(self._keep, KEPT + steps)

    def _check_repeats(self, shard: int, batch: Any) -> None:
        """Read the first two batches from a stream that was opened again, in turn with the first stream.

        If the source seeks, also the second batch of a stream that sought it.
        """
        with contextlib.closing(_Source(self._make, shard)) as again:
            again.open(0)
            if differing := difference(batch, _next_of(again)):
                raise ConfigurationError(
                    f"make({shard}) was called twice, and the two streams differ in batch 0: {differing}. Each "
                    "group opens the streams itself, and opens them again after a failure, so they must repeat: seed "
                    "what shuffles or augments inside `make` (a torch.Generator with a fixed seed, "
                    "`shuffle(seed=...)`)."
                )
            if (second := _next_of(again)) is None:
                return
            if differing := difference(second, self._streams[shard].batch(1, keep=self._keep)):
                raise ConfigurationError(
                    f"Two streams of make({shard}) begin with the same batch, but read in turn they differ in batch "
                    f"1, counted from 0: {differing}. They share a source: a global generator, as of "
                    "numpy.random.seed, random.seed or torch.manual_seed, or an open file or iterator. Which streams "
                    "a group reads in turn depends on which groups are there, so a run with "
                    "failures would train on other samples. Open all of it inside `make`, and draw from a generator "
                    "that belongs to the stream (numpy.random.default_rng([seed, shard]), random.Random, "
                    "torch.Generator)."
                )
            seeks, skips = again.seeks, again.skips
        if seeks or skips:
            self._check_seeks(
                shard, second, f"make({shard}, start=1)" if seeks else f"make({shard}) and skip(1)"
            )

    def _check_seeks(self, shard: int, second: Any, how: str) -> None:
        with contextlib.closing(_Source(self._make, shard)) as sought:
            sought.open(1)
            differing = difference(second, _next_of(sought))
        if differing:
            raise ConfigurationError(
                f"{how} does not begin with batch 1 of the stream, counted from 0: {differing}. A group that comes "
                "later finds its place so, and would train on other samples. Count in batches, and not in samples, "
                "and let what shuffles or augments batch n depend on n, and not on where the stream was opened."
            )


class _Stream:
    """One shard's stream, and its last batches."""

    def __init__(self, make: Callable[..., Any], shard: int) -> None:
        self._make = make
        self._shard = shard
        self._open: list[_Source] = []
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._last = -1  # the highest batch that was asked for
        self._lock = threading.Lock()

    def batch(self, number: int, *, keep: int) -> Any:
        with self._lock:
            self._last = max(self._last, number)
            if number not in self._kept:
                self._read(number, keep)
            return self._kept[number]

    def close_unless_used_since(self, number: int) -> None:
        """Close all sources if no batch from `number` on was asked for: another group computes the shard now."""
        if self._last >= number or not self._open or not self._lock.acquire(blocking=False):
            return
        try:
            if self._last < number:
                self._let_go(self._open)
                self._open = []
                self._kept.clear()
        finally:
            self._lock.release()

    def _read(self, number: int, keep: int) -> None:
        source = self._at(number)
        try:
            if source is None:
                source = _Source(self._make, self._shard)
                source.open(number)
            elif number - source.position > KEPT:
                source.skip_to(number)
            while source.position <= number:  # a thread that prefetches may be faster than the one before it
                position = source.position
                self._kept[position] = _taken(source)
                if position < number:
                    _calls.got_on()
        except StopIteration as error:
            raise self._ended(number, 0 if source is None else source.position) from error
        while len(self._kept) > keep:
            self._kept.popitem(last=False)
        kept = [other for other in self._open if other.position >= number - keep][-(OPEN - 1) :]
        self._let_go([other for other in self._open if other not in kept])
        self._open = [*kept, source]

    def _ended(self, number: int, length: int) -> JobFinished | ConfigurationError:
        if number == length > 0:
            text = (
                f"the stream of shard {self._shard} has ended after {length} batches, so the job is finished at step "
                f"{number}: no group can take a further one. To train on, let the stream repeat (with another order "
                "in each epoch, if you like), and choose another job name."
            )
            _log.warning("%s", text)  # Python ends such a program without a word
            return JobFinished(text)
        return ConfigurationError(
            f"The stream of shard {self._shard} has ended after {length} batches, and batch {number} was asked for: "
            "it is empty here, or shorter than where the job has read it. Check its files, and `make`."
        )

    def _at(self, number: int) -> "_Source | None":
        """Take the open stream from which batch `number` is reached best; None if it is better to open another."""
        behind = [source for source in self._open if source.position <= number]
        if not behind:
            return None
        best = max(behind, key=lambda source: source.position)
        if best.seeks and number - best.position > KEPT:
            return None
        self._open.remove(best)  # until it has been read: a source that raises is not used again
        return best

    def _let_go(self, sources: "list[_Source]") -> None:
        for source in sources:
            try:
                source.close()
            except Exception as error:  # of the user's code: it must not stop the training
                _log.warning("shard %d: its stream could not be closed: %r", self._shard, error)


class _Source:
    """One shard's stream, open at a position."""

    def __init__(self, make: Callable[..., Any], shard: int) -> None:
        self._make = make
        self._shard = shard
        self.seeks = "start" in _parameters(make)
        self._source: Any = None
        self._iterator: Iterator[Any] = iter(())
        self.position = 0  # the number of the next batch

    def open(self, position: int) -> None:
        """Open the stream so that the next batch is number `position`.

        Raises:
            ConfigurationError: what `make` returns is not iterable.
            StopIteration: the stream has ended before.
        """
        if self.seeks:
            self._source = self._iterable(self._make(self._shard, start=position))
            self._iterator, self.position = iter(self._source), position
            return
        self._source = self._iterable(self._make(self._shard))
        if position and self.skips:
            _log.info("shard %d: its source skips to batch %d", self._shard, position)
            self._source, self.position = self._source.skip(position), position
        self._iterator = iter(self._source)
        self.skip_to(position)

    def close(self) -> None:
        """Let go of the stream: of its files, and of the processes that a loader has started."""
        iterator, self._iterator, self._source = self._iterator, iter(()), None
        if callable(close := getattr(iterator, "close", None)):
            close()

    def _iterable(self, made: Any) -> Any:
        if hasattr(made, "__iter__") or hasattr(made, "__getitem__"):
            return made
        raise ConfigurationError(
            f"make({self._shard}) returned {made!r:.60}, a {type(made).__name__}, which is not iterable. It opens "
            "the stream of a shard: let it return the batches in order, as a generator or a DataLoader does."
        )

    @property
    def skips(self) -> bool:
        """Whether the source, once open, has a `skip`."""
        return callable(getattr(self._source, "skip", None))

    def skip_to(self, position: int) -> None:
        """Read and drop batches, up to `position`.

        Raises:
            StopIteration: the stream has ended before it.
        """
        first, wait = self.position, LongWait(time.monotonic(), MENTION_S)
        while self.position < position:
            self.read()
            _calls.got_on()
            if (took_s := wait.to_say(time.monotonic())) is not None:
                done = self.position - first
                left_s = took_s / done * (position - self.position)
                _log.warning(
                    "shard %d: its source cannot seek, so batches are read and dropped: %d of %d, about %.0f s left. "
                    "Let `make` take `start=`, or use jaxft.data.Batches (docs/data.md)",
                    *(self._shard, done, position - first, left_s),
                )

    def read(self) -> Any:
        """Return the next batch. Raises StopIteration if there is none."""
        batch = next(self._iterator)
        self.position += 1
        return batch


def _parameters(make: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # some builtins have none
        return frozenset()


def _taken(source: _Source) -> Any:
    """Read the next batch. Raises StopIteration if there is none."""
    return jax.tree.map(_as_numpy, source.read())


def _next_of(source: _Source) -> Any:
    """Read the next batch, to compare it; None if there is none."""
    try:
        return _taken(source)
    except StopIteration:
        return None
    finally:
        _calls.got_on()


def _as_numpy(leaf: Any) -> Any:
    """A copy, because sources may use the memory of a batch for the next one."""
    if isinstance(leaf, jax.Array):
        return leaf
    return np.array(leaf.numpy() if callable(getattr(leaf, "numpy", None)) else leaf)
