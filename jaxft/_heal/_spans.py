"""Fetches for one process from donors of any number of processes: one fetch for each span of its lanes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxft_protocol.ranks.lanes import Span

from jaxft._arrays._layout import LeafSpec
from jaxft._arrays._pieces import Pieces
from jaxft._heal._blob import bands_in
from jaxft._heal._fetch import Fetcher
from jaxft._transport._listener import Abort


@dataclass(frozen=True, slots=True)
class SpanFetcher:
    """The fetchers of one heal, for each span of this process. Not thread-safe.

    All methods return pieces of this process, as `Pieces.split` does, in host memory. Methods that fetch raise
    HealFailed, as in `Fetcher`.
    """

    fetchers: Sequence[tuple[Span | None, Fetcher]]

    @property
    def transferred_bytes(self) -> int:
        return sum(fetcher.transferred_bytes for _, fetcher in self.fetchers)

    def state(self, step: int, pieces: Pieces, *, cancel: Abort) -> Sequence[np.ndarray]:
        """The pinned state."""
        found = [
            fetcher.state(step, pieces.types(span), bands_in(pieces, span), cancel=cancel)
            for span, fetcher in self.fetchers
        ]
        return self._gathered(found, pieces)

    def edits(self, step: int, pieces: Pieces, *, cancel: Abort) -> Sequence[np.ndarray]:
        """The leaves that were edited before a committed step."""
        found = [fetcher.edits(step, pieces.types(span), cancel=cancel) for span, fetcher in self.fetchers]
        return self._gathered(found, pieces)

    def means(
        self,
        step: int,
        specs_of: Callable[[Span | None], Sequence[LeafSpec]],
        stages: Sequence[Pieces],
        more: LeafSpec,
        *,
        cancel: Abort,
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """The means of a committed step, and one more array that is logged with them."""
        by_span: list[list[np.ndarray]] = []
        for span, fetcher in self.fetchers:
            by_span.append(fetcher.means(step, [*specs_of(span), more], cancel=cancel))
        means: list[np.ndarray] = []
        starts = [0] * len(by_span)
        for pieces in stages:
            parts: list[list[np.ndarray]] = []
            for number, (span, _) in enumerate(self.fetchers):
                stop = starts[number] + len(pieces.types(span))
                parts.append(by_span[number][starts[number] : stop])
                starts[number] = stop
            means += self._gathered(parts, pieces)
        return means, by_span[0][-1]

    def close(self) -> None:
        for _, fetcher in self.fetchers:
            fetcher.close()

    def _gathered(self, by_span: Sequence[Sequence[np.ndarray]], pieces: Pieces) -> Sequence[np.ndarray]:
        found = [array for arrays in by_span for array in arrays]
        return found if self.fetchers[0][0] is None else pieces.gathered(found)
