"""One peer's connection during one exchange: sends and receives frames, and never blocks.

A frame is a header, its payload, and the tag of both (`_seals.py`). A payload is used only after its tag has been
verified: all members would share the wrong sum of a damaged or forged payload, so comparing states would not find it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from jaxft._exchange._frames import HEADER_BYTES, difference
from jaxft._exchange._plan import CHUNK_BYTES, Planned
from jaxft._transport._seals import Connection, is_tag
from jaxft._transport._sockets import SEND_FLAGS, drop_sent

# At most this many frames go into one system call.
_FRAMES_PER_SEND = 16
_PARTS = 3  # header, payload, tag

Frame = tuple[bytes, memoryview]  # header, payload


class Channel:
    """Sends frames to one peer, and receives the frames that the plan expects from it.

    Each direction has two sequences of frames, partial sums and results. Each sequence is in order, and the sender
    chooses how to interleave them, so at most two headers can come next.
    """

    def __init__(  # noqa: PLR0913 (by name: the two directions of one connection)
        self,
        connection: Connection,
        *,
        outgoing: Iterator[Frame],
        partials: Sequence[Planned],
        results: Sequence[Planned],
        buffer_for: Callable[[Planned], memoryview | None],
        arrived: Callable[[Planned], None],
        progress_in: bytes | None = None,
        heeds_progress: bool = False,
    ) -> None:
        """Start with nothing sent or received."""
        self.sock = connection.sock
        self.partials = deque(partials)
        self.results = deque(results)
        self.paused = False
        self._tags_out, self._tags_in = connection.outgoing, connection.incoming
        self._buffer_for = buffer_for
        self._arrived = arrived
        self._progress_in = progress_in
        self._heeds_progress = heeds_progress
        self._is_progress = False  # the current frame
        self._outgoing: Iterator[Frame] | None = outgoing
        self._urgent: deque[Frame] = deque()
        self._pending: deque[memoryview] = deque()
        self._pending_bytes = 0
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._tag = memoryview(bytearray(self._tags_in.size_bytes))
        self._payload: memoryview | None = None  # of the current frame, until its tag has been verified
        self._wanted_tag: bytes | None = None  # set once the payload is complete
        self._current: Planned | None = None
        self._rest = self._header if self.receiving else self._header[:0]
        self._refill()

    @property
    def sending(self) -> bool:
        return bool(self._pending)

    @property
    def receiving(self) -> bool:
        return self._current is not None or bool(self.partials) or bool(self.results)

    @property
    def owes_partials(self) -> bool:
        """Whether this peer owes us partial sums, which it can send without waiting for any other member."""
        arriving = self._current is not None and self._current.node is not None
        return not self.paused and (arriving or bool(self.partials))

    def push(self, frame: Frame) -> None:
        """Queue a frame of results. Results go before partial sums: a peer may need only them to finish its step."""
        self._urgent.append(frame)
        self._refill()

    def send(self) -> int:
        """Send as many bytes as the kernel takes at once. Raises OSError if the connection is lost."""
        try:
            sent = self.sock.sendmsg(tuple(islice(self._pending, _PARTS * _FRAMES_PER_SEND)), (), SEND_FLAGS)
        except BlockingIOError:
            return 0
        drop_sent(self._pending, sent)
        self._pending_bytes -= sent
        self._refill()
        return sent

    def receive(self) -> int:
        """Read available bytes, up to the end of a frame. Raises OSError if the connection is lost.

        Returns how many; frames that only show that bytes move are left out, if they do not count.
        """
        if self.paused:
            raise ConnectionResetError("closed the connection")  # the only event polled for while paused
        taken = 0
        while self._rest.nbytes:
            try:
                count = self.sock.recv_into(self._rest)
            except BlockingIOError:
                return taken
            if count == 0:
                raise ConnectionResetError("closed the connection")
            taken += count if self._heeds_progress or not self._is_progress else 0
            self._rest = self._rest[count:]
            if self._rest.nbytes:
                continue
            if self._wanted_tag is not None:
                self._complete()
                return taken
            if self._header == self._progress_in:
                self._is_progress = True
                taken -= 0 if self._heeds_progress else min(taken, HEADER_BYTES)
                self._wanted_tag = self._tags_in.tag(self._header, b"")
                self._rest = self._tag
                continue
            if self._payload is not None:
                self._wanted_tag = self._tags_in.tag(self._header, self._payload)
                self._rest = self._tag
                continue
            self._current = self._match()
            self.resume()
        return taken

    def resume(self) -> None:
        """Request a buffer for the next payload again, if it has none yet."""
        if self._current is None or self._rest.nbytes:
            return
        buffer = self._buffer_for(self._current)
        self.paused = buffer is None
        if buffer is not None:
            self._rest = self._payload = buffer

    def _match(self) -> Planned:
        received = bytes(self._header)
        expected = [queue for queue in (self.results, self.partials) if queue]
        for queue in expected:
            if queue[0].header == received:
                return queue.popleft()
        raise ConnectionError(
            f"sent an unexpected frame: {difference(received, [q[0].header for q in expected])}"
        )

    def _complete(self) -> None:
        done = self._current
        assert (done is None) == self._is_progress
        assert self._wanted_tag is not None
        if not is_tag(self._tag, self._wanted_tag):
            raise ConnectionError(
                "sent a frame whose tag does not match: its data were damaged or changed on the way"
            )
        self._current = self._payload = self._wanted_tag = None
        self._is_progress = False
        self._rest = self._header if self.receiving else self._header[:0]
        if done is not None:
            self._arrived(done)

    def _refill(self) -> None:
        while self._pending_bytes < CHUNK_BYTES and len(self._pending) < _PARTS * _FRAMES_PER_SEND:
            frame = self._next_frame()
            if frame is None:
                return
            for part in (*frame, self._tags_out.tag(*frame)):
                self._pending.append(memoryview(part))
                self._pending_bytes += len(part)

    def _next_frame(self) -> Frame | None:
        if self._urgent:
            return self._urgent.popleft()
        if self._outgoing is None:
            return None
        frame = next(self._outgoing, None)
        if frame is None:
            self._outgoing = None
        return frame
