"""One blob on its way into one arena, in stripes from several donors at once.

Spans of chunks lie in one queue. Each donor has a thread, which takes the next span, fetches its chunks, and checks
each against its digest. What a donor that fails had taken goes back into the queue. So the blob becomes complete as
long as one of them serves.

A donor that stands still is in the way only of what it has taken. While there are other spans, nobody waits for it;
when there are none, the others lose patience much sooner than a donor that is alone is given (`_STALL_S`).
"""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from jaxft._dataplane import Abort, recv_exactly, send_all
from jaxft._heal._blob import BlobLayout, checksum
from jaxft._heal._frames import MAX_TEXT_BYTES, REPLY_BYTES, BadFrame, Reply, Request, Status
from jaxft._wire import Aborted

# Chunks taken at once: enough to keep a connection busy, few enough that the last donor does not drag on.
SPAN_CHUNKS = 8
# So long may a donor take for a chunk while others have nothing left to do. It says "not yet" after 1 s.
_STALL_S = 3.0
# What one donor does not have yet is left so long to the others before that one is asked again.
_HAND_OVER_S = 0.02


@dataclass(slots=True)
class _Span:
    """Chunks that a donor has taken, less those that have arrived."""

    first: int
    count: int
    moved_s: float = 0.0  # when it was taken, or when its last chunk arrived
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
        self._free = deque(
            _Span(first, min(SPAN_CHUNKS, layout.chunks - first))
            for first in range(0, layout.chunks, SPAN_CHUNKS)
        )
        self._taken: dict[socket.socket, _Span] = {}

    # ---- the thread that wants the blob ----

    def wait(self, cancel: Abort) -> None:
        """Return when it is over, one way or another. The donors' threads end at once then."""
        poller = select.poll()
        poller.register(self.over, select.POLLIN)
        poller.register(cancel, select.POLLIN)
        poller.poll()  # without a deadline: each wait of each donor's thread has one
        self._end("cancelled")

    # ---- the donors' threads ----

    def serve(self, sock: socket.socket) -> None:
        """Fetch spans from one donor, until every chunk is there, from whomever.

        Raises:
            ConnectionError: the donor failed. Aborted, if all was over in the middle of a span.
            TimeoutError: it stood still, or does not have what it should.
        """
        patient_until_s = time.monotonic() + self._timeout_s
        while (span := self._take(sock)) is not None:
            try:
                excuse = self._fetch(sock, span)
            except ConnectionError as error:
                if span.stalled:
                    text = f"it stood still for {self._stall_s:g} s while other donors waited"
                    raise TimeoutError(text) from error
                raise
            finally:
                self._put_back(sock)
            if not excuse:
                patient_until_s = time.monotonic() + self._timeout_s
            elif time.monotonic() >= patient_until_s:
                raise TimeoutError(f"for {self._timeout_s:g} s it has said: {excuse}")
            else:
                self._let_others_try()

    def leave(self) -> None:
        """This donor's thread is done."""
        with self._changed:
            self._donors -= 1
            last = self._donors == 0
        if last:
            self._end("no donor is left")

    def _take(self, sock: socket.socket) -> _Span | None:
        with self._changed:
            while self._missing:
                if self.over.is_set:
                    raise Aborted(self.over.reason)
                if self._free:
                    span = self._taken[sock] = self._free.popleft()
                    span.moved_s, span.stalled = time.monotonic(), False
                    return span
                # Nothing to take now, but another donor may still fail and give back what it took.
                self._changed.wait(self._cut_off_stalled())
            self.complete = True
        self._end("complete")
        return None

    def _cut_off_stalled(self) -> float:
        """End the connections that stand still; return after how long to look again."""
        now_s = time.monotonic()
        until_s = now_s + self._stall_s
        for sock, span in self._taken.items():
            if now_s >= span.moved_s + self._stall_s and not span.stalled:
                span.stalled = True
                with contextlib.suppress(OSError):  # its donor was quicker
                    sock.shutdown(socket.SHUT_RDWR)
            elif not span.stalled:
                until_s = min(until_s, span.moved_s + self._stall_s)
        return until_s - now_s

    def _put_back(self, sock: socket.socket) -> None:
        with self._changed:
            span = self._taken.pop(sock)
            if span.count:
                self._free.appendleft(span)
            self._changed.notify_all()

    def _let_others_try(self) -> None:
        with self._changed:
            if self._donors > 1:
                self._changed.wait_for(lambda: not self._free, _HAND_OVER_S)

    def _fetch(self, sock: socket.socket, span: _Span) -> str:
        """Fetch a span; return what the donor says if it does not have it yet, and nothing if it had."""
        request = Request(
            self._request.kind, self._request.heal_id, self._request.step, span.first, span.count
        )
        ask(sock, request, time.monotonic() + self._timeout_s, self.over)
        while span.count:
            excuse = self._fetch_chunk(sock, span.first)
            if excuse:
                return excuse
            with self._changed:
                span.first, span.count, span.moved_s = span.first + 1, span.count - 1, time.monotonic()
                self._missing -= 1
        return ""

    def _fetch_chunk(self, sock: socket.socket, chunk: int) -> str:
        deadline_s = time.monotonic() + self._timeout_s
        reply = header(sock, deadline_s, self.over)
        if reply.status is not Status.OK:
            said = text(sock, reply, MAX_TEXT_BYTES, deadline_s, self.over)
            if reply.status is Status.NOT_YET:
                return said or "not yet"
            raise BadFrame(said)
        start, length = self._layout.span_of(chunk)
        if (reply.index, reply.length) != (chunk, length):
            raise BadFrame(
                f"it sent chunk {reply.index} of {reply.length} bytes for chunk {chunk} of {length}"
            )
        target = self._arena[start : start + length]
        recv_exactly(sock, target, deadline_s=deadline_s, abort=self.over, what="a donor's chunk")
        if checksum([target]) != reply.digest:
            raise BadFrame(f"chunk {chunk} arrived damaged: its digest is not the one it was sent with")
        return ""

    def _end(self, reason: str) -> None:
        self.over.set(reason)
        with self._changed:
            self._changed.notify_all()


def ask(sock: socket.socket, request: Request, deadline_s: float, abort: Abort | None) -> None:
    send_all(sock, [request.encode()], deadline_s=deadline_s, abort=abort, what="a donor to take a request")


def header(sock: socket.socket, deadline_s: float, abort: Abort) -> Reply:
    data = bytearray(REPLY_BYTES)
    recv_exactly(sock, memoryview(data), deadline_s=deadline_s, abort=abort, what="a donor's answer")
    return Reply.decode(data)


def text(sock: socket.socket, reply: Reply, limit_bytes: int, deadline_s: float, abort: Abort) -> str:
    if reply.length > limit_bytes:
        raise BadFrame(f"it announced a text of {reply.length} bytes; {limit_bytes} are allowed")
    data = bytearray(reply.length)
    recv_exactly(sock, memoryview(data), deadline_s=deadline_s, abort=abort, what="a donor's answer")
    if checksum([memoryview(data)]) != reply.digest:
        raise BadFrame("its answer arrived damaged")
    return data.decode(errors="replace")
