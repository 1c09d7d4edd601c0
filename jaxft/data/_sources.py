"""The iterators of other libraries, positioned: to seek where the source can, and to skip where it cannot.

What is used, in this order:

* `make(shard, start=n)`: your own code opens the stream at batch n;
* a state: `get_state` and `set_state` of the iterator (grain), or `state_dict` and `load_state_dict` of the source or
  of the iterator (torchdata, Hugging Face datasets);
* `source.skip(n)` (tf.data, Hugging Face datasets);
* reading batches and dropping them.
"""

import inspect
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxft._base import _progress
from jaxft._errors import ConfigurationError
from jaxft.data._states import Kept

_log = logging.getLogger("jaxft")

MENTION_S = 2.0


class Source:
    """One shard's stream, open at a position."""

    def __init__(self, make: Callable[..., Any], shard: int) -> None:
        self._make = make
        self._shard = shard
        self.seeks = "start" in parameters(make)
        self._source: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._skipped = False  # the iterator is of what `skip` returned, and not of the source
        self.position = 0  # the number of the next batch

    def open(self, position: int, known: Kept | None) -> None:
        """Open the stream so that the next batch is number `position`.

        Args:
            position: counts from 0.
            known: a state at a position before it, if there is one.

        Raises:
            ConfigurationError: what `make` returns is not iterable.
        """
        if self.seeks:
            self._source = self._iterable(self._make(self._shard, start=position))
            self._iterator, self.position = iter(self._source), position
            return
        self._source = self._iterable(self._make(self._shard))
        if known is not None:
            self._restore(known.position, known.state)
        elif position and self.skips:
            _log.info("shard %d: its source skips to batch %d", self._shard, position)
            rest: Any = self._source.skip(position)
            self._iterator, self.position, self._skipped = iter(rest), position, True
        else:
            self._iterator, self.position = iter(self._source), 0
        self.skip_to(position)

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
        first, began_s, mention_s = self.position, time.monotonic(), MENTION_S
        while self.position < position:
            self.read()
            _progress.got_on()
            took_s = time.monotonic() - began_s
            if took_s >= mention_s:
                done = self.position - first
                left_s = took_s / done * (position - self.position)
                _log.warning(
                    "shard %d: its source cannot seek, so batches are read and dropped: %d of %d, about %.0f s left. "
                    "Let `make` take `start=`, or keep states (docs/data.md)",
                    *(self._shard, done, position - first, left_s),
                )
                mention_s = 2 * took_s

    def read(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: there is none.
        """
        batch = next(self._iterator)
        self.position += 1
        return batch

    def state(self) -> Any:
        """The state at the position, from which `open` can go on; None if the source has none.

        After a `skip` there is none: what is read then is another source than `make` returns.
        """
        if self._skipped:
            return None
        for owner, name in (
            (self._iterator, "get_state"),
            (self._iterator, "state_dict"),
            (self._source, "state_dict"),
        ):
            if callable(taken := getattr(owner, name, None)):
                return taken()
        return None

    def _restore(self, position: int, state: Any) -> None:
        if callable(load := getattr(self._source, "load_state_dict", None)):
            load(state)
            self._iterator = iter(self._source)
        else:
            self._iterator = iter(self._source)
            restore = getattr(self._iterator, "set_state", None) or self._iterator.load_state_dict  # pyright: ignore
            restore(state)
        self.position = position


def parameters(make: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(make).parameters)
    except (TypeError, ValueError):  # some builtins have none
        return frozenset()
