"""One blob on its way into one arena, in stripes from several donors at once.

What nobody has been asked for yet is free. Each donor has a thread, which takes spans of chunks, asks for them, and
checks each chunk that comes against its tag. What a donor that fails had taken becomes free again. So the blob
becomes complete as long as one of them serves.

A donor that has begun to send is asked for the next span before it has sent the one before, so that it never waits
for a request. Spans become smaller towards the end, and the last are not asked for ahead: so all donors end at nearly
the same time, each having sent what its link allows.

A donor that stands still is in the way only of what it has taken. While there are other spans, nobody waits for it;
when there are none, the others lose patience much sooner than a donor that is alone is given (`_STALL_S`).
"""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from jaxft._heal._blob import BlobLayout
from jaxft._heal._frames import MAX_TEXT_BYTES, REPLY_BYTES, BadFrame, Reply, Request, Status
from jaxft._transport._listener import Abort, Connection, recv_exactly, send_all
from jaxft._transport._seals import is_tag
from jaxft._transport._sockets import Aborted

# Chunks taken at once, at most: with as many again asked for ahead, enough to keep a connection busy.
SPAN_CHUNKS = 8
# At most this part of a donor's share of what is free is taken at once: with what is asked for ahead, a donor of half
# the speed of the others ends when they do.
_SPANS_OF_A_SHARE = 4
# So long may a donor take for a chunk while others have nothing left to do. It says "not yet" after 1 s.
_STALL_S = 3.0
# What one donor does not have yet is left so long to the others before that one is asked again.
_HAND_OVER_S = 0.02


@dataclass(slots=True)
class _Span:
    """Chunks, less those that have arrived."""

    first: int
    count: int


@dataclass(slots=True)
class _Taken:
    """What a donor has been asked for and has not sent yet, in the order in which it was asked."""

    spans: deque[_Span] = field(default_factory=deque[_Span])
    moved_s: float = 0.0  # when its last chunk arrived, or when it was asked while nothing was to come
    stalled: bool = False


class Stripes:
    """What the donors' threads share. `over` is set at the end, and ends every wait of theirs."""

    def __init__(
        self, request: Request, layout: BlobLayout, arena: np.ndarray, *, timeout_s: float, donors: int
    ) -> None:
        self.over = Abort()
        self.complete = False
        self._request = request
        self._layout = layout
        self._arena = arena.data
        self._timeout_s = timeout_s
        self._stall_s = min(_STALL_S, timeout_s)
        self._donors = donors
        self._changed = threading.Condition()
        self._missing = layout.chunks
        self._free = deque([_Span(0, layout.chunks)])
        self._free_chunks = layout.chunks
        self._taken: dict[socket.socket, _Taken] = {}

    # ---- the thread that wants the blob ----

    def wait(self, cancel: Abort) -> None:
        """Return when it is over, one way or another. The donors' threads end at once then."""
        poller = select.poll()
        poller.register(self.over, select.POLLIN)
        poller.register(cancel, select.POLLIN)
        poller.poll()  # without a deadline: each wait of each donor's thread has one
        self._end("cancelled")

    # ---- the donors' threads ----

    def serve(self, connection: Connection) -> None:
        """Fetch spans from one donor, until every chunk is there, from whomever.

        Raises:
            ConnectionError: the donor failed. Aborted, if all was over in the middle of a span.
            TimeoutError: it stood still, or does not have what it should.
        """
        patient_until_s = time.monotonic() + self._timeout_s
        taken = _Taken()
        with self._changed:
            self._taken[connection.sock] = taken
        try:
            while self._ask_for_some(connection, taken):
                excuse = self._fetch(connection, taken)
                if not excuse:
                    patient_until_s = time.monotonic() + self._timeout_s
                elif time.monotonic() >= patient_until_s:
                    raise TimeoutError(f"for {self._timeout_s:g} s it has said: {excuse}")
                else:
                    self._put_back(taken)
                    self._let_others_try()
        except ConnectionError as error:
            if taken.stalled:
                text = f"it stood still for {self._stall_s:g} s while other donors waited"
                raise TimeoutError(text) from error
            raise
        finally:
            self._put_back(taken)

    def leave(self) -> None:
        """This donor's thread is done."""
        with self._changed:
            self._donors -= 1
            last = self._donors == 0
        if last:
            self._end("no donor is left")

    def _ask_for_some(self, connection: Connection, taken: _Taken) -> bool:
        """Have something asked of this donor; returns False when every chunk is there."""
        with self._changed:
            while self._missing:
                if self.over.is_set:
                    raise Aborted(self.over.reason)
                if taken.spans:
                    return True
                if self._free:
                    span = self._take(taken)
                    break
                # Nothing to take now, but another donor may still fail and give back what it took.
                self._changed.wait(self._cut_off_stalled())
            else:
                self.complete = True
                span = None
        if span is None:
            self._end("complete")
            return False
        self._ask(connection, span)
        return True

    def _ask_ahead(self, connection: Connection, taken: _Taken) -> None:
        if len(taken.spans) > 1:
            return
        with self._changed:
            if self._free_chunks < self._donors:  # the last ones are for those who have nothing to do
                return
            span = self._take(taken)
        self._ask(connection, span)

    def _ask(self, connection: Connection, span: _Span) -> None:
        request = Request(
            self._request.kind, self._request.heal_id, self._request.step, span.first, span.count
        )
        ask(connection, request, time.monotonic() + self._timeout_s, self.over)

    def _take(self, taken: _Taken) -> _Span:
        """Move a span from what is free to a donor. Under the lock."""
        most = SPAN_CHUNKS
        if self._donors > 1:
            share = self._free_chunks // self._donors
            most = max(1, min(most, share // _SPANS_OF_A_SHARE))
        free = self._free[0]
        span = _Span(free.first, min(most, free.count))
        free.first, free.count = free.first + span.count, free.count - span.count
        if not free.count:
            self._free.popleft()
        self._free_chunks -= span.count
        if not taken.spans:
            taken.moved_s = time.monotonic()
        taken.spans.append(span)
        return span

    def _put_back(self, taken: _Taken) -> None:
        with self._changed:
            while taken.spans:
                span = taken.spans.pop()
                self._free.appendleft(span)
                self._free_chunks += span.count
            self._changed.notify_all()

    def _cut_off_stalled(self) -> float:
        """End the connections that stand still; return after how long to look again. Under the lock."""
        now_s = time.monotonic()
        until_s = now_s + self._stall_s
        for sock, taken in self._taken.items():
            if not taken.spans or taken.stalled:
                continue
            if now_s >= taken.moved_s + self._stall_s:
                taken.stalled = True
                with contextlib.suppress(OSError):  # its donor was quicker
                    sock.shutdown(socket.SHUT_RDWR)
            else:
                until_s = min(until_s, taken.moved_s + self._stall_s)
        return until_s - now_s

    def _let_others_try(self) -> None:
        with self._changed:
            if self._donors > 1:
                self._changed.wait_for(lambda: not self._free, _HAND_OVER_S)

    def _fetch(self, connection: Connection, taken: _Taken) -> str:
        """Fetch what was asked for first; return what the donor says if it does not have it yet."""
        span = taken.spans[0]
        while span.count:
            excuse = self._fetch_chunk(connection, span.first)
            if excuse and len(taken.spans) > 1:
                raise BadFrame(f"it had begun, and then it said: {excuse}")
            if excuse:
                return excuse
            self._note_arrival(taken)
            self._ask_ahead(connection, taken)
        return ""

    def _note_arrival(self, taken: _Taken) -> None:
        with self._changed:
            span = taken.spans[0]
            span.first, span.count = span.first + 1, span.count - 1
            if not span.count:
                taken.spans.popleft()
            taken.moved_s = time.monotonic()
            self._missing -= 1

    def _fetch_chunk(self, connection: Connection, chunk: int) -> str:
        deadline_s = time.monotonic() + self._timeout_s
        reply = header(connection, deadline_s, self.over)
        if reply.status is not Status.OK:
            said = text(connection, reply, MAX_TEXT_BYTES, deadline_s, self.over)
            if reply.status is Status.NOT_YET:
                return said or "not yet"
            raise BadFrame(said)
        start, length = self._layout.span_of(chunk)
        if (reply.index, reply.length) != (chunk, length):
            raise BadFrame(
                f"it sent chunk {reply.index} of {reply.length} bytes for chunk {chunk} of {length}"
            )
        target = self._arena[start : start + length]
        if not _received(connection, reply, target, deadline_s, self.over, "a donor's chunk"):
            raise BadFrame(
                f"chunk {chunk} arrived damaged or changed: its tag is not the one it was sent with"
            )
        return ""

    def _end(self, reason: str) -> None:
        self.over.set(reason)
        with self._changed:
            self._changed.notify_all()


def ask(connection: Connection, request: Request, deadline_s: float, abort: Abort | None) -> None:
    data = request.encode()
    send_all(
        connection.sock,
        [data, connection.outgoing.tag(data)],
        deadline_s=deadline_s,
        abort=abort,
        what="a donor to take a request",
    )


def header(connection: Connection, deadline_s: float, abort: Abort) -> Reply:
    """The header of the next answer. Its tag comes after the payload."""
    data = bytearray(REPLY_BYTES)
    recv_exactly(
        connection.sock, memoryview(data), deadline_s=deadline_s, abort=abort, what="a donor's answer"
    )
    return Reply.decode(data)


def text(connection: Connection, reply: Reply, limit_bytes: int, deadline_s: float, abort: Abort) -> str:
    if reply.length > limit_bytes:
        raise BadFrame(f"it announced a text of {reply.length} bytes; {limit_bytes} are allowed")
    data = bytearray(reply.length)
    if not _received(connection, reply, memoryview(data), deadline_s, abort, "a donor's answer"):
        raise BadFrame("its answer arrived damaged or changed")
    return data.decode(errors="replace")


def _received(
    connection: Connection, reply: Reply, room: memoryview, deadline_s: float, abort: Abort, what: str
) -> bool:
    """Fill `room` with the payload that follows a header; whether the tag after it is theirs."""
    recv_exactly(connection.sock, room, deadline_s=deadline_s, abort=abort, what=what)
    tag = memoryview(bytearray(connection.incoming.size_bytes))
    recv_exactly(connection.sock, tag, deadline_s=deadline_s, abort=abort, what=what)
    return is_tag(tag, connection.incoming.tag(reply.encode(), room))
