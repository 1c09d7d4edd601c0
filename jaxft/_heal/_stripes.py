"""Fetches one blob into one arena, in stripes from several donors at once.

Chunks that have not been requested yet are free. Each donor has a thread, which takes spans of chunks, requests them,
and verifies the tag of each chunk that arrives. Spans taken by a donor that fails become free again.

A donor is asked for its stripe first, which it keeps in any case. As long as its state is *live*, that is, not yet
donated, it is then asked for the rest as well. It answers NOT_KEPT to a request that comes too late, and from then
on it is asked for its stripe only. The blob completes as long as each chunk is kept by a donor that serves. As soon
as a chunk is kept by none, the fetch ends.

A donor that has started to send is asked for its next span before it has sent the current one, so that it never waits
for a request. Spans become smaller towards the end, and the last ones are not requested ahead: so donors that have
the same chunks end at nearly the same time, each having sent what its link allows.

A stalled donor holds up only the spans that it has taken. While others are free for it, no thread waits for a stalled
donor; once none are, that is cut off much sooner (`_STALL_S`) than a donor that alone keeps its spans. Nor is a donor
waited for any longer whose manifest has not come.
"""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from jaxft_protocol.messages import WHOLE, Stripe

from jaxft._heal._blob import BlobLayout, keeps
from jaxft._heal._frames import MAX_TEXT_BYTES, REPLY_BYTES, BadFrame, Damaged, Reply, Request, Status
from jaxft._transport._listener import Abort, Connection, recv_exactly, send_all
from jaxft._transport._seals import is_tag
from jaxft._transport._sockets import Aborted, wait_flags

# At most this many chunks are taken at once: with as many again requested ahead, enough to keep a connection busy.
SPAN_CHUNKS = 8
# At most this fraction (1/n) of a donor's share of the free chunks is taken at once: with the span requested ahead, a
# donor of half the speed of the others ends when they do.
_SPANS_OF_A_SHARE = 4
# How long a donor may take for a chunk while others could send it and have nothing left to do.
_STALL_S = 3.0


@dataclass(slots=True)
class _Span:
    """A range of chunks, without the arrived chunks."""

    first: int
    count: int


@dataclass(slots=True)
class _Taken:
    """The stripe of a donor, and the spans requested from it and not received yet, in order."""

    stripe: Stripe = WHOLE
    live: bool = True
    spans: deque[_Span] = field(default_factory=deque[_Span])
    moved_s: float = 0.0  # when its last chunk arrived, or when it was asked while idle
    stalled: bool = False


class Stripes:
    """The state that the donors' threads share. `over` is set at the end, and ends all their waits.

    `lost` names the chunks that no donor keeps, if the fetch has ended for that.
    """

    def __init__(
        self,
        request: Request,
        layout: BlobLayout,
        arena: np.ndarray,
        *,
        timeout_s: float,
        donors: int,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.over = Abort()
        self.complete = False
        self.lost = ""
        self._request = request
        self._layout = layout
        self._arena = arena.data
        self._timeout_s = timeout_s
        self._stall_s = min(_STALL_S, timeout_s)
        self._donors = donors
        self._moved = moved
        self._changed = threading.Condition()
        self._missing = layout.chunks
        self._free = deque(_spans_of(layout))
        self._free_chunks = layout.chunks
        self._taken: dict[socket.socket, _Taken] = {}
        self._moved_s = time.monotonic()  # when a chunk or a manifest arrived

    # ---- the thread that wants the blob ----

    def wait(self, cancel: Abort) -> None:
        """Return when the fetch has ended, in success or failure. The donors' threads then end at once."""
        wait_flags(self.over, cancel)  # every wait of a donor's thread has a deadline
        self.end("cancelled")

    def end(self, reason: str) -> None:
        """End the fetch, and all waits of the donors' threads."""
        self.over.set(reason)
        with self._changed:
            self._changed.notify_all()

    # ---- the donors' threads ----

    def serve(
        self,
        connection: Connection,
        stripe: Stripe = WHOLE,
        *,
        live: bool = True,
    ) -> None:
        """Fetch spans from one donor that has the blob, until every chunk has arrived from some donor.

        Raises:
            ConnectionError: the donor failed. Damaged, if a chunk did not match its tag. Aborted, if the fetch ended
                in the middle of a span.
            TimeoutError: it stalled.
        """
        taken = _Taken(stripe, live)
        with self._changed:
            self._taken[connection.sock] = taken
            self._moved_s = time.monotonic()
            self._find_lost()
        try:
            while self._ask_for_some(connection, taken):
                self._fetch(connection, taken)
        except ConnectionError as error:
            if taken.stalled:
                text = f"it sent nothing for {self._stall_s:g} s while other donors were idle"
                raise TimeoutError(text) from error
            raise
        finally:
            self._put_back(taken)
            with self._changed:
                del self._taken[connection.sock]

    def leave(self) -> None:
        """Count this donor's thread as finished."""
        with self._changed:
            self._donors -= 1
            self._find_lost()
            last = self._donors == 0
        if last:
            self.end("no donor is left")

    def _ask_for_some(self, connection: Connection, taken: _Taken) -> bool:
        """Make sure that this donor has a request to answer; return False when every chunk has arrived."""
        with self._changed:
            while self._missing:
                if self.over.is_set:
                    raise Aborted(self.over.reason)
                if taken.spans:
                    return True
                if (span := self._take(taken)) is not None:
                    break
                # Nothing is free for it now, but another donor may still fail and give back its spans.
                self._changed.wait(self._cut_off_stalled())
                self._find_lost()
            else:
                self.complete = True
                span = None
        if span is None:
            self.end("complete")
            return False
        self._ask(connection, span)
        return True

    def _ask_ahead(self, connection: Connection, taken: _Taken) -> None:
        if len(taken.spans) > 1:
            return
        with self._changed:
            if self._free_chunks < self._donors:  # leave the last ones to idle donors
                return
            span = self._take(taken)
        if span is not None:
            self._ask(connection, span)

    def _ask(self, connection: Connection, span: _Span) -> None:
        request = replace(self._request, first=span.first, count=span.count)
        ask(connection, request, time.monotonic() + self._timeout_s, self.over)

    def _take(self, taken: _Taken) -> _Span | None:
        """Move a span from the free chunks to a donor; return None if it keeps none of them. Under the lock."""
        free = self._free_for(taken)
        if free is None:
            return None
        most = SPAN_CHUNKS
        if self._donors > 1:
            share = self._free_chunks // self._donors
            most = max(1, min(most, share // _SPANS_OF_A_SHARE))
        span = _Span(free.first, min(most, free.count))
        free.first, free.count = free.first + span.count, free.count - span.count
        if not free.count:
            self._free.remove(free)
        self._free_chunks -= span.count
        if not taken.spans:
            taken.moved_s = time.monotonic()
        taken.spans.append(span)
        return span

    def _free_for(self, taken: _Taken) -> _Span | None:
        """The free span that a donor is asked for next: of its stripe, if there is one. Under the lock."""
        own = (span for span in self._free if keeps(taken.stripe, self._band(span)))
        return next(own, self._free[0] if self._free and taken.live else None)

    def _band(self, span: _Span) -> int:
        return self._layout.bands[span.first]

    def _find_lost(self) -> None:
        """End the fetch if no donor keeps some of the free chunks. Under the lock."""
        silent_s = time.monotonic() - self._moved_s
        if self.over.is_set or (len(self._taken) < self._donors and silent_s < self._stall_s):
            return  # a donor whose manifest has not come may keep all of them
        stripes = [WHOLE if taken.live else taken.stripe for taken in self._taken.values()]
        lost = [span for span in self._free if not any(keeps(stripe, self._band(span)) for stripe in stripes)]
        if stripes and lost:
            count, first = sum(span.count for span in lost), min(span.first for span in lost)
            self.lost = f"{count} of {self._layout.chunks} chunks, from chunk {first} on"
            self.end(f"no donor keeps {self.lost}")

    def _note_not_kept(self, taken: _Taken) -> None:
        """Give back the oldest request of a donor whose state is no longer live."""
        with self._changed:
            span = taken.spans.popleft()
            if keeps(taken.stripe, self._band(span)):
                taken.spans.appendleft(span)
                raise BadFrame(f"it does not keep chunk {span.first}, which is of its stripe")
            taken.live = False
            taken.moved_s = time.monotonic()
            self._free.appendleft(span)
            self._free_chunks += span.count
            self._find_lost()
            self._changed.notify_all()

    def _put_back(self, taken: _Taken) -> None:
        with self._changed:
            while taken.spans:
                span = taken.spans.pop()
                self._free.appendleft(span)
                self._free_chunks += span.count
            self._changed.notify_all()

    def _cut_off_stalled(self) -> float:
        """Shut down stalled connections; return how long to wait before the next check. Under the lock."""
        now_s = time.monotonic()
        until_s = now_s + self._stall_s
        for sock, taken in self._taken.items():
            if not taken.spans or taken.stalled:
                continue
            limit_s = self._stall_s if self._others_keep(sock, taken) else self._timeout_s / 2
            if now_s >= taken.moved_s + limit_s:
                taken.stalled = True
                with contextlib.suppress(OSError):  # the donor closed it first
                    sock.shutdown(socket.SHUT_RDWR)
            else:
                until_s = min(until_s, taken.moved_s + limit_s)
        return until_s - now_s

    def _others_keep(self, sock: socket.socket, taken: _Taken) -> bool:
        """Whether other donors can send all that was requested from this donor. Under the lock.

        If not, the heal ends with this donor, which may only be waiting for a large leaf: it has more time.
        """
        others = [
            WHOLE if other.live else other.stripe for key, other in self._taken.items() if key is not sock
        ]
        return all(any(keeps(stripe, self._band(span)) for stripe in others) for span in taken.spans)

    def _fetch(self, connection: Connection, taken: _Taken) -> None:
        """Fetch the oldest requested span, as far as the donor keeps it."""
        span = taken.spans[0]
        while span.count:
            if not self._fetch_chunk(connection, span.first):
                self._note_not_kept(taken)
                return
            self._note_arrival(taken)
            self._ask_ahead(connection, taken)

    def _note_arrival(self, taken: _Taken) -> None:
        with self._changed:
            span = taken.spans[0]
            span.first, span.count = span.first + 1, span.count - 1
            if not span.count:
                taken.spans.popleft()
            taken.moved_s = self._moved_s = time.monotonic()
            self._missing -= 1
            self._moved()

    def _fetch_chunk(self, connection: Connection, chunk: int) -> bool:
        """Receive a chunk; return False if the donor does not keep it."""
        deadline_s = time.monotonic() + self._timeout_s
        reply = header(connection, deadline_s, self.over)
        if reply.status is not Status.OK:
            answer = text(connection, reply, MAX_TEXT_BYTES, deadline_s, self.over)
            if reply.status is Status.NOT_KEPT:
                return False
            if reply.status is Status.NOT_YET:
                raise BadFrame(f"it stopped in the middle of a state or means: {answer}")
            raise BadFrame(answer)
        start, length = self._layout.span_of(chunk)
        if (reply.index, reply.length) != (chunk, length):
            raise BadFrame(
                f"it sent chunk {reply.index} with {reply.length} bytes instead of chunk {chunk} with {length}"
            )
        target = self._arena[start : start + length]
        if not _received(connection, reply, target, deadline_s, self.over, "chunk"):
            raise Damaged(f"chunk {chunk} was damaged or changed on the way: its tag does not match")
        return True


def _spans_of(layout: BlobLayout) -> list[_Span]:
    """All chunks, in spans of one band each."""
    found: list[_Span] = []
    for chunk, band in enumerate(layout.bands):
        if chunk and band == layout.bands[chunk - 1]:
            found[-1].count += 1
        else:
            found.append(_Span(chunk, 1))
    return found


def ask(connection: Connection, request: Request, deadline_s: float, abort: Abort | None) -> None:
    data = request.encode()
    send_all(
        connection.sock,
        [data, connection.outgoing.tag(data)],
        deadline_s=deadline_s,
        abort=abort,
        what=f"donor {connection.peer} to take a request",
    )


def header(connection: Connection, deadline_s: float, abort: Abort) -> Reply:
    """Receive the header of the next answer. Its tag comes after the payload."""
    data = bytearray(REPLY_BYTES)
    what = f"donor {connection.peer}'s answer"
    recv_exactly(connection.sock, memoryview(data), deadline_s=deadline_s, abort=abort, what=what)
    return Reply.decode(data)


def text(connection: Connection, reply: Reply, limit_bytes: int, deadline_s: float, abort: Abort) -> str:
    if reply.length > limit_bytes:
        raise BadFrame(f"it announced a text of {reply.length} bytes, and at most {limit_bytes} are allowed")
    data = bytearray(reply.length)
    if not _received(connection, reply, memoryview(data), deadline_s, abort, "answer"):
        raise BadFrame("its answer was damaged or changed on the way: its tag does not match")
    return data.decode(errors="replace")


def _received(
    connection: Connection, reply: Reply, buffer: memoryview, deadline_s: float, abort: Abort, what: str
) -> bool:
    """Fill `buffer` with the payload that follows a header, called `what`; return whether its tag matches."""
    what = f"donor {connection.peer}'s {what}"
    recv_exactly(connection.sock, buffer, deadline_s=deadline_s, abort=abort, what=what)
    tag = memoryview(bytearray(connection.incoming.size_bytes))
    recv_exactly(connection.sock, tag, deadline_s=deadline_s, abort=abort, what=what)
    return is_tag(tag, connection.incoming.tag(reply.encode(), buffer))
