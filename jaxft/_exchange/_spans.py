"""The exchange of one process with groups of any number of processes: one exchange for each span of lanes.

Lanes that lie in one process in every member travel together. Usually that is all of a process's lanes, and there is
one exchange. A process whose lanes are spread over several processes of another member runs several at once, each
with its own connections: one after the other, a peer that has nothing but the last span would seem to hang.
"""

import select
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxft_protocol.ranks.lanes import Span

from jaxft._arrays._layout import Layout
from jaxft._arrays._pieces import Pieces
from jaxft._errors import ExchangeFailed
from jaxft._exchange._exchange import exchange
from jaxft._exchange._links import Links
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import Patience
from jaxft._transport._sockets import Abort


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one process contributes to an exchange.

    Attributes:
        partials: its contributions.
        pieces: how the leaves are split in this process.
        layout_of: the layout of the parts of a span; for None, that of `partials`.
    """

    partials: Partials
    pieces: Pieces
    layout_of: Callable[[Span | None], Layout]


class SpanLinks:
    """This process's connections to all other members of one quorum, for each of its spans.

    Args:
        quorum_id: the quorum.
        spans: this process's spans; None: there is one, and leaves travel whole.
        abort: a flag that ends all exchanges.
        open_links: makes the connections for the lanes of a span: `open_links(span, abort, before)`.
        before: those of an older quorum, of which some may be used again; owned.
    """

    def __init__(
        self,
        quorum_id: int,
        spans: Sequence[Span | None],
        abort: Abort,
        open_links: Callable[[Span | None, Abort, Links | None], Links],
        before: "SpanLinks | None" = None,
    ) -> None:
        self.quorum_id = quorum_id
        self._spans = tuple(spans)
        self._abort = abort
        self._open = open_links
        # Several exchanges end together, but a failure of one must not look like an abort from outside.
        self._stop = abort if len(self._spans) == 1 else Abort()
        self._links: dict[Span | None, Links] = {}
        self._before = {} if before is None else {**before._before, **before._links}
        for span in self._before.keys() - set(self._spans):
            self._before.pop(span).close()

    def exchange(
        self, given: Contribution, *, step: int, total_shards: int, patience: Callable[[], Patience]
    ) -> list[np.ndarray]:
        """As `_exchange.exchange`, for all spans. Raises ExchangeFailed."""

        def one(span: Span | None) -> list[np.ndarray]:
            layout, partials = given.layout_of(span), given.partials
            if not layout.specs:
                return []  # nothing belongs to these lanes, which all members know
            if span not in self._links:
                self._links[span] = self._open(span, self._stop, self._before.pop(span, None))
            if layout.digest != partials.layout.digest:
                partials = partials.select(layout, given.pieces.picks(span or given.pieces.own))
            return exchange(
                self._links[span],
                layout=layout,
                step=step,
                partials=partials,
                total_shards=total_shards,
                patience=patience(),
            )

        if len(self._spans) == 1:
            found = one(self._spans[0])
        else:
            found = [mean for means in self._at_once(one) for mean in means]
        return found if self._spans[0] is None else list(given.pieces.gathered(found))

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for links in [*self._links.values(), *self._before.values()]:
            links.close()

    def _at_once(self, one: Callable[[Span | None], list[np.ndarray]]) -> list[list[np.ndarray]]:
        running = _Running(len(self._spans), self._stop)
        threads = [
            threading.Thread(target=running.run, args=(one, span), name=f"jaxft-span-{span}", daemon=True)
            for span in self._spans
        ]
        for thread in threads:
            thread.start()
        poller = select.poll()
        poller.register(self._abort, select.POLLIN)
        poller.register(running.over, select.POLLIN)
        poller.poll()  # no deadline needed: every wait of an exchange has one
        if self._abort.is_set:
            self._stop.set(self._abort.reason)
        for thread in threads:
            thread.join()
        if running.errors:
            error = self._joined(running.errors)
            # Their tracebacks hold this frame: without this, all that was received stays until the next collection.
            running.errors.clear()
            try:
                raise error
            finally:
                del error
        return [running.results[span] for span in self._spans]

    def _joined(self, errors: Sequence[BaseException]) -> BaseException:
        """The error that came first; of the peers, all that were seen to fail."""
        first = errors[0]
        if self._abort.is_set or not isinstance(first, ExchangeFailed):
            return first
        peers = {peer for error in errors if isinstance(error, ExchangeFailed) for peer in error.peers}
        return ExchangeFailed(str(first), tuple(sorted(peers)))


@dataclass
class _Running:
    """Exchanges that run at once: the first that fails stops the others."""

    left: int
    stop: Abort
    over: Abort = field(default_factory=Abort)  # all have ended, or one has failed
    results: dict[Span | None, list[np.ndarray]] = field(default_factory=dict[Span | None, list[np.ndarray]])
    errors: list[BaseException] = field(default_factory=list[BaseException])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, one: Callable[[Span | None], list[np.ndarray]], span: Span | None) -> None:
        try:
            found = one(span)
        except BaseException as error:  # raised by the training thread, which waits for all
            with self.lock:
                self.errors.append(error)
            self.stop.set("the exchange of other lanes failed")
        else:
            with self.lock:
                self.results[span] = found
        with self.lock:
            self.left -= 1
            last = self.left == 0
        if last or self.errors:
            self.over.set("ended")
