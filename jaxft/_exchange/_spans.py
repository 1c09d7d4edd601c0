"""The exchange of one process with groups of any number of processes: one exchange for each span of lanes.

Lanes that lie in one process in every member travel together. Usually that is all of a process's lanes, and there is
one exchange. A process whose lanes are spread over several processes of another member runs several at once, each
with its own connections: one after the other, a peer that has nothing but the last span would seem to hang.

One thread has a limit, which a fast network may exceed. So a large exchange is divided into *strands*,
which travel at once too: each has a part of every slice (`_plan.py`), and its own thread and connections, so no
strand waits for another. How many there are follows from what all members offer, and from the size of the exchange,
which all of them know; bits do not depend on it.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxft_protocol.ranks.lanes import Span

from jaxft._arrays._layout import Layout
from jaxft._arrays._memory import leaves_of, result_regions
from jaxft._arrays._pieces import Pieces
from jaxft._errors import ExchangeFailed
from jaxft._exchange._grid_links import AnyLinks, MakePatience, exchange_over
from jaxft._exchange._partials import Partials
from jaxft._exchange._plan import Task, strands_of
from jaxft._transport._sockets import Abort, wait_flags
from jaxft._transport._threads import Team


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one process contributes to an exchange.

    Attributes:
        partials: its contributions.
        pieces: how the leaves are split in this process.
        layout_of: the layout of the parts of a span; for None, the layout of `partials`.
    """

    partials: Partials
    pieces: Pieces
    layout_of: Callable[[Span | None], Layout]

    def tasks(self, span: Span | None, step: int, most_strands: int) -> "list[tuple[Way, Task]]":
        """The exchange of a span, strand by strand; none if nothing belongs to its lanes, which all members know."""
        layout, partials = self.layout_of(span), self.partials
        if not layout.specs:
            return []
        if layout.digest != partials.layout.digest:
            partials = partials.select(layout, self.pieces.picks(span or self.pieces.own))
        strands = strands_of(layout, most_strands)
        task = Task(layout, step, partials, result_regions(layout), strands)
        return [(Way(span, strand), task) for strand in range(strands)]


class Way(NamedTuple):
    """What one thread carries by its own connections: one strand of the exchanges of a span."""

    span: Span | None
    strand: int


class SpanLinks:
    """This process's connections to all other members of one quorum, for each of its spans and their strands."""

    def __init__(
        self,
        quorum_id: int,
        spans: Sequence[Span | None],
        abort: Abort,
        open_links: Callable[[Span | None, int, Abort, AnyLinks | None], AnyLinks],
        before: "SpanLinks | None" = None,
        strands: int = 1,
    ) -> None:
        self.quorum_id = quorum_id
        self._spans = tuple(spans)
        self._strands = strands
        self._abort = abort
        self._open = open_links
        ways = {Way(span, strand) for span in self._spans for strand in range(strands)}
        # Several exchanges end together, but a failure of one must not look like an abort from outside.
        self._stop = abort if len(ways) == 1 else Abort()
        self._links: dict[Way, AnyLinks] = {}
        self._before = {} if before is None else {**before._before, **before._links}
        for way in self._before.keys() - ways:
            self._before.pop(way).close()

    def exchange(
        self, given: Contribution, *, step: int, total_shards: int, patience: MakePatience
    ) -> list[np.ndarray]:
        """Average or sum the contributions of all members; return the means in fresh memory. Raises ExchangeFailed.

        Args:
            given: the contributions of this process.
            step: the step that the contributions are for.
            total_shards: the number of all shards of the step.
            patience: makes the limit on a time without progress, for each thread, and each round of a large quorum.
        """
        given.partials.to_host()
        of_spans = [given.tasks(span, step, self._strands) for span in self._spans]

        def carry_out(way: Way, task: Task) -> None:
            exchange_over(self._links_for(way), task, total_shards, patience)

        self._at_once(carry_out, [each for tasks in of_spans for each in tasks])
        found = [
            mean
            for tasks in of_spans
            for _, task in tasks[:1]
            for mean in leaves_of(task.layout, task.result)
        ]
        return found if self._spans[0] is None else list(given.pieces.gathered(found))

    def _links_for(self, way: Way) -> AnyLinks:
        if way not in self._links:
            self._links[way] = self._open(*way, self._stop, self._before.get(way))
            self._before.pop(way, None)
        return self._links[way]

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for links in [*self._links.values(), *self._before.values()]:
            links.close()

    def _at_once(self, carry_out: Callable[[Way, Task], None], work: Sequence[tuple[Way, Task]]) -> None:
        if self._stop is self._abort or not work:
            for way, task in work:
                carry_out(way, task)
            return

        running = _Running(len(work), self._stop)
        team = Team()
        try:
            for number, each in enumerate(work):
                team.start(f"jaxft-exchange-{number}", functools.partial(running.run, carry_out, *each))
            wait_flags(self._abort, running.over)  # every wait of an exchange has a deadline
            if self._abort.is_set:
                self._stop.set(self._abort.reason)
            team.wait()
        except BaseException as error:  # such as Ctrl-C, or no room for another thread
            self._stop.set(f"this group ends it: {error!r}")
            team.end()  # or they would use connections that the caller closes
            raise
        if running.errors:
            error = self._joined(running.errors)
            # Their tracebacks hold this frame: without this, all that was received stays until the next collection.
            running.errors.clear()
            try:
                raise error
            finally:
                del error

    def _joined(self, errors: Sequence[BaseException]) -> BaseException:
        """The cause of all of them; of the peers, all that were seen to fail."""
        failed = [error for error in errors if isinstance(error, ExchangeFailed)]
        if len(failed) < len(errors):  # an error of this group, which has ended the others
            return next(error for error in errors if not isinstance(error, ExchangeFailed))
        if self._abort.is_set:
            return failed[0]
        # A strand that was ended by another may have failed first.
        first = next((error for error in failed if error.peers), failed[0])
        return ExchangeFailed(str(first), tuple(sorted({peer for error in failed for peer in error.peers})))


@dataclass
class _Running:
    """Exchanges that run at once: the first that fails stops the others."""

    left: int
    stop: Abort
    over: Abort = field(default_factory=Abort)  # all have ended, or one has failed
    errors: list[BaseException] = field(default_factory=list[BaseException])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, carry_out: Callable[[Way, Task], None], way: Way, task: Task) -> None:
        try:
            carry_out(way, task)
        except BaseException as error:  # raised by the training thread, which waits for all
            with self.lock:
                self.errors.append(error)
            self.stop.set("another part of the exchange failed")
        with self.lock:
            self.left -= 1
            last = self.left == 0
        if last or self.errors:
            self.over.set("ended")
