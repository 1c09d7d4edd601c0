"""Batches from iterators, as a function of step and shard."""

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxft._arrays._digest import digest
from jaxft._base import _progress
from jaxft._base._numbers import whole
from jaxft._errors import ConfigurationError
from jaxft._programs._checks import check_function, takes_next
from jaxft.data._global_generators import seeded
from jaxft.data._pure import difference
from jaxft.data._sources import Source, parameters
from jaxft.data._states import Kept, States

_log = logging.getLogger("jaxft")

# Batches of each shard that are kept for a step that is tried again, beside what a prefetching worker is ahead.
KEPT = 8
# Streams of each shard that are kept open: a group that starts again reads batch 0 as well, to compare programs.
OPEN = 2


def from_iterator(
    make: Callable[..., Any],
    shards: int,
    *,
    states: str | os.PathLike[str] | None = None,
    states_every: int = 100,
) -> "Streams":
    """Make a batch function of iterators, one for each shard: batch number s of a shard's stream is that of step s.

    For sources that can only be read in order: generators, grain iterators, tf.data, torch's DataLoader, an
    IterableDataset of Hugging Face. `make(shard)` opens the stream of one shard, from its start, and must give the
    same batches each time: seed what shuffles. A group opens only the streams of the shards that it computes, and
    reads each in order.

    A group that comes later, or takes over the shard of a lost one, must find the right place in a stream. It seeks
    if it can: with `make(shard, start=n)`, with a kept state, or with the source's own `skip(n)`. Otherwise it reads
    all batches before, and the log says how long that takes: for a long run on such a source, prefer
    `jaxft.data.Batches`, which has random access.

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
        states: a folder that all groups share. Sources with a state (grain, torchdata, datasets) save it there every
            `states_every` batches, so that a group that starts later begins from the last one before its step.
        states_every: see `states`.

    Returns:
        A batch function, with the attribute `shards`. It may be used in several threads (`jaxft.data.Prefetch`).

    Raises:
        ConfigurationError: for arguments that cannot be right; from a call, if a stream has ended, or if `make` gives
            other batches when it is called again, with `start=1`, or while another stream is read.
    """
    shards, states_every = whole("shards", shards, 1), whole("states_every", states_every, 1)
    if not callable(make) or takes_next(make):
        raise ConfigurationError(
            f"make is a {type(make).__name__}, but it must be a function that opens the stream of a shard: a group "
            "may have to read any shard, and begin again. Pass `lambda shard: ...`."
        )
    instead = "Pass `lambda shard: ...`, with a second parameter `start` if it seeks."
    if states is not None and not os.fspath(states):
        raise ConfigurationError(
            "states must be a path, not the empty string. Name a folder that all groups share, or leave it out."
        )
    check_function("make", make, "the number of a shard", 1, instead, seeks="start" in parameters(make))
    return Streams(make, shards, None if states is None else States(Path(states)), states_every)


class Streams:
    """The batches of `from_iterator`."""

    def __init__(self, make: Callable[..., Any], shards: int, states: States | None, every: int) -> None:
        self.shards = shards
        self._make = make
        self._states = states
        self._every = every
        self._streams = {shard: _Stream(make, shard, states, every) for shard in range(shards)}
        self._checked = False
        self._lock = threading.Lock()

    def __call__(self, step: int, shard: int) -> Any:
        """Return the batch of a shard of a step.

        Raises:
            ConfigurationError: there is no such shard, its stream has ended, or `make` does not repeat itself.
        """
        if step < 0 or shard not in self._streams:
            raise ConfigurationError(
                f"There is no shard {shard} of step {step}: steps count from 0, and these streams have {self.shards} "
                "shards. Pass the same number to jaxft.fault_tolerant: `shards=batches.shards`."
            )
        batch = self._streams[shard].batch(step)
        with self._lock:
            if step == 0 and not self._checked:  # later it would have to be searched for once more
                self._check_repeats(shard, batch)
                self._checked = True
        return batch

    def read_ahead(self, steps: int) -> None:
        """Keep so many batches of each shard more: one may be asked for again while later ones are read."""
        for stream in self._streams.values():
            stream.keep(KEPT + steps)

    def _check_repeats(self, shard: int, batch: Any) -> None:
        """Read the first two batches from a stream that was opened again, in turn with the first stream.

        If the source seeks, also the second batch of a stream that sought it.
        """
        again = Source(self._make, shard)
        with seeded(by := list[str]()):
            again.open(0, None)
            repeated = _next_of(again)
        if differing := difference(batch, repeated):
            raise ConfigurationError(
                f"make({shard}) was called twice, and the two streams differ in batch 0: {differing}. Each "
                "group opens the streams itself, and opens them again after a failure, so they must repeat: seed "
                "what shuffles or augments inside `make` (a torch.Generator with a fixed seed, `shuffle(seed=...)`)."
            )
        for function in by:
            _log.warning(
                "make(%d) seeds a generator that all streams of this process share, with %s. What a stream draws "
                "from it later, such as the order of its next epoch, depends on which other streams the group reads, "
                "so a run with failures would train on other samples. Draw from a generator that belongs to the "
                "stream (numpy.random.default_rng([seed, shard]), random.Random(seed); for a DataLoader "
                "generator=torch.Generator().manual_seed(seed))",
                *(shard, function),
            )
        if (second := _next_of(again)) is None:
            return
        if differing := difference(second, self._streams[shard].batch(1)):
            raise ConfigurationError(
                f"Two streams of make({shard}) begin with the same batch, but read in turn they differ in batch 1, "
                f"counted from 0: {differing}. They share what they draw from or read: a global generator, such as "
                "that of numpy.random.seed, random.seed or torch.manual_seed, or a file or iterator that is open. "
                "Which streams a group reads in turn depends on which groups are there, so a run with failures would "
                "train on other samples. Open all of it inside `make`, and draw from a generator that belongs to "
                "the stream (numpy.random.default_rng([seed, shard]), random.Random, torch.Generator)."
            )
        if not (again.seeks or again.skips):
            return
        sought = Source(self._make, shard)
        sought.open(1, None)
        if differing := difference(second, _next_of(sought)):
            how = f"make({shard}, start=1)" if again.seeks else f"make({shard}) and skip(1)"
            raise ConfigurationError(
                f"{how} does not begin with batch 1 of the stream, counted from 0: {differing}. A group that comes "
                "later finds its place so, and would train on other samples. Count in batches, and not in samples, "
                "and let what shuffles or augments batch n depend on n, and not on where the stream was opened."
            )


class _Stream:
    """One shard's stream, and its last batches."""

    def __init__(self, make: Callable[..., Any], shard: int, states: States | None, every: int) -> None:
        self._open: list[Source] = []
        self._new = lambda: Source(make, shard)
        self._shard = shard
        self._states = states
        self._every = every
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._keep = KEPT
        self._lock = threading.Lock()

    def keep(self, count: int) -> None:
        """Keep at least so many batches."""
        with self._lock:
            self._keep = max(self._keep, count)

    def batch(self, number: int) -> Any:
        with self._lock:
            if number not in self._kept:
                self._add(number, self._read(number))
            return self._kept[number]

    def _add(self, number: int, batch: Any) -> None:
        self._kept[number] = batch
        if len(self._kept) > self._keep:
            self._kept.popitem(last=False)

    def _read(self, number: int) -> Any:
        source = self._at(number)
        try:
            if source is None:
                source = self._new()
                source.open(number, self._proven(number))
            elif number - source.position > KEPT:
                source.skip_to(number)
            while source.position < number:  # a thread that prefetches was faster than the one before it
                self._add(source.position, self._next(source))
                _progress.got_on()
            batch = self._next(source)
        except StopIteration as error:
            position = 0 if source is None else source.position
            raise ConfigurationError(
                f"The stream of shard {self._shard} has ended after {position} batches, and batch {number} was asked "
                "for. Let it repeat (with another order in each epoch, if you like), or end the loop earlier."
            ) from error
        self._open = [*self._open[-(OPEN - 1) :], source]
        return batch

    def _at(self, number: int) -> Source | None:
        """Take the open stream from which batch `number` is reached best; None if it is better to open another."""
        behind = [source for source in self._open if source.position <= number]
        if not behind:
            return None
        best = max(behind, key=lambda source: source.position)
        far = number - best.position > KEPT
        if far and (
            best.seeks or ((known := self._known(number)) is not None and known.position > best.position)
        ):
            return None
        self._open.remove(best)  # until it has been read: one that raises is not used again
        return best

    def _next(self, source: Source) -> Any:
        """Read the next batch, and keep the state before it now and then."""
        position, states = source.position, self._states
        due = states is not None and position > 0 and position % self._every == 0
        state = source.state() if due else None
        batch = _taken(source)
        if states is not None and state is not None:
            states.save(self._shard, Kept(position, state, digest(batch)))
        return batch

    def _proven(self, number: int) -> Kept | None:
        """A state before batch `number`. The first is tried out: some sources leave a shuffle buffer out of it."""
        known = self._known(number)
        if known is None or self._states is None or self._states.proven:
            return known
        trial = self._new()
        try:
            trial.open(known.position, known)
            goes_on = digest(_taken(trial)) == known.digest
        except Exception as error:  # of the source, StopIteration too: the state is of another one
            self._states.refuse(
                f"the stream of shard {self._shard} cannot be restored from its state before batch {known.position}: "
                f"{type(error).__name__}: {error}. If its source was changed since, name another folder for `states`"
            )
            return None
        if goes_on:
            self._states.proven = True
            return known
        self._states.refuse(
            f"restored from its state before batch {known.position}, the stream of shard {self._shard} does not go "
            "on with the same batch, as streams with a shuffle buffer often do not"
        )
        return None

    def _known(self, number: int) -> Kept | None:
        return None if self._states is None else self._states.newest(self._shard, number)


def _taken(source: Source) -> Any:
    """Read the next batch. Raises StopIteration if there is none."""
    return jax.tree.map(_as_numpy, source.read())


def _next_of(source: Source) -> Any:
    """Read the next batch, to compare it; None if there is none."""
    try:
        return _taken(source)
    except StopIteration:
        return None
    finally:
        _progress.got_on()


def _as_numpy(leaf: Any) -> Any:
    """A copy, because sources may use the memory of a batch for the next one."""
    if isinstance(leaf, jax.Array):
        return leaf
    return np.array(leaf.numpy() if callable(getattr(leaf, "numpy", None)) else leaf)
