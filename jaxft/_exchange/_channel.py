"""One peer's connection during one exchange: frames go out, frames come in, and no call ever blocks.

A frame is a header, its payload, and the tag of both (`_seals.py`). It is added to a sum, or returned, only when the
tag has been compared: a sum of damaged or forged parts would be the same wrong sum for all, so no comparison of
states could find it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from jaxft._exchange._frames import HEADER_BYTES, difference
from jaxft._exchange._plan import CHUNK_BYTES, Planned
from jaxft._transport._seals import Connection, is_tag
from jaxft._transport._sockets import SEND_FLAGS, drop_sent

# So many frames are handed to the kernel at once, while they are small.
_FRAMES_PER_SEND = 16
_PARTS = 3  # header, payload, tag

Frame = tuple[bytes, memoryview]  # header, payload


class Channel:
    """Sends frames to one peer and receives those that the plan expects from it.

    There are two sequences of frames in each direction, partial sums and results. Each keeps its own order, and
    between them the sender chooses, so at most two headers can come next.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        outgoing: Iterator[Frame],
        partials: Sequence[Planned],
        results: Sequence[Planned],
        place: Callable[[Planned], memoryview | None],
        arrived: Callable[[Planned], None],
    ) -> None:
        """Start with nothing sent or received.

        Args:
            connection: of a non-blocking socket.
            outgoing: the partial sums for this peer.
            partials: what this peer will send of partial sums.
            results: what this peer will send of the results.
            place: where a payload goes; None if there is no room yet.
            arrived: called when a payload is complete.
        """
        self.sock = connection.sock
        self.partials = deque(partials)
        self.results = deque(results)
        self.paused = False
        self._tags_out, self._tags_in = connection.outgoing, connection.incoming
        self._place = place
        self._arrived = arrived
        self._outgoing: Iterator[Frame] | None = outgoing
        self._urgent: deque[Frame] = deque()
        self._pending: deque[memoryview] = deque()
        self._pending_bytes = 0
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._tag = memoryview(bytearray(self._tags_in.size_bytes))
        self._payload: memoryview | None = None  # of the current frame, while it comes or its tag does
        self._wanted_tag: bytes | None = None  # once the payload is complete
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
        """Whether we wait for partial sums of this peer, which it could send without anybody's help."""
        arriving = self._current is not None and self._current.node is not None
        return not self.paused and (arriving or bool(self.partials))

    def push(self, frame: Frame) -> None:
        """Queue a frame of the results. They go before partial sums: somebody's step may wait for nothing else."""
        self._urgent.append(frame)
        self._refill()

    def send(self) -> int:
        """Hand bytes to the kernel, as many as it takes at once. Raises OSError if the connection is lost."""
        try:
            sent = self.sock.sendmsg(tuple(islice(self._pending, _PARTS * _FRAMES_PER_SEND)), (), SEND_FLAGS)
        except BlockingIOError:
            return 0
        drop_sent(self._pending, sent)
        self._pending_bytes -= sent
        self._refill()
        return sent

    def receive(self) -> int:
        """Take bytes from the kernel, up to the end of a payload. Raises OSError if the connection is lost."""
        if self.paused:
            raise ConnectionResetError("closed the connection")  # nothing else is watched for while paused
        taken = 0
        while self._rest.nbytes:
            try:
                count = self.sock.recv_into(self._rest)
            except BlockingIOError:
                return taken
            if count == 0:
                raise ConnectionResetError("closed the connection")
            taken += count
            self._rest = self._rest[count:]
            if self._rest.nbytes:
                continue
            if self._wanted_tag is not None:
                self._complete()
                return taken
            if self._payload is not None:
                self._wanted_tag = self._tags_in.tag(self._header, self._payload)
                self._rest = self._tag
                continue
            self._current = self._match()
            self.resume()
        return taken

    def resume(self) -> None:
        """Ask again for room for the payload that comes next, if it has none yet."""
        if self._current is None or self._rest.nbytes:
            return
        room = self._place(self._current)
        self.paused = room is None
        if room is not None:
            self._rest = self._payload = room

    def _match(self) -> Planned:
        received = bytes(self._header)
        expected = [queue for queue in (self.results, self.partials) if queue]
        for queue in expected:
            if queue[0].header == received:
                return queue.popleft()
        raise ConnectionError(
            f"sent a frame that does not belong here: {difference(received, [q[0].header for q in expected])}"
        )

    def _complete(self) -> None:
        done = self._current
        assert done is not None
        assert self._wanted_tag is not None
        if not is_tag(self._tag, self._wanted_tag):
            raise ConnectionError(
                "sent a part of the sum that was damaged or changed on its way: its tag is another"
            )
        self._current = self._payload = self._wanted_tag = None
        self._rest = self._header if self.receiving else self._header[:0]
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
