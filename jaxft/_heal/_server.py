"""The donor's end of a heal connection: answers one request after another, in a thread of its own.

A joiner that stops reading holds this thread until the send deadline, and nothing else: the training thread never
waits for a server thread.
"""

import logging
import select
import time
from collections.abc import Callable
from functools import partial

from jaxft._heal._blob import Spoiled
from jaxft._heal._frames import REQUEST_BYTES, BadFrame, Kind, Reply, Request, Status, manifest
from jaxft._heal._store import Gone, NotYet, StateStore
from jaxft._transport._listener import Connection, Hello, recv_exactly, send_all
from jaxft._transport._seals import is_tag

_log = logging.getLogger("jaxft")

# A joiner between two requests replays a step; compiling has been done before it came. If it needed longer, it
# would find its connection closed, and dial again.
IDLE_TIMEOUT_S = 300.0
# For a request, or for a chunk.
TRANSFER_TIMEOUT_S = 30.0
# How long a request waits for what is expected; then the joiner is told to ask again.
LONG_POLL_S = 1.0


class HealServer:
    def __init__(self, store: StateStore) -> None:
        self._store = store

    def serve(self, connection: Connection, hello: Hello) -> None:
        """Answer until the joiner goes, or breaks the protocol."""
        sock = connection.sock
        idle = select.poll()  # select() itself knows no descriptor over 1023
        idle.register(sock, select.POLLIN)
        try:
            # Between two requests the joiner works: a silence that nobody needs to hear of.
            while idle.poll(1000 * IDLE_TIMEOUT_S):
                self._answer(connection, _request(connection))
        except BadFrame as error:
            _log.warning("heal connection of group %r ended: %s", hello.group, error)
        except (ConnectionError, TimeoutError) as error:
            _log.debug("heal connection of group %r ended: %s", hello.group, error)

    def _answer(self, connection: Connection, request: Request) -> None:
        try:
            match request.kind:
                case Kind.MANIFEST:
                    self._send_manifest(connection, request)
                case Kind.HOLDS:
                    self._store.holds(request.heal_id, request.step)
                case Kind.STATE | Kind.MEANS:
                    self._send_chunks(connection, request)
        except NotYet as error:
            _send_text(connection, Status.NOT_YET, str(error))
        except (Gone, Spoiled) as error:
            _send_text(connection, Status.GONE, str(error))

    def _send_manifest(self, connection: Connection, request: Request) -> None:
        step, blob = self._store.state(request.heal_id, deadline_s=time.monotonic() + LONG_POLL_S)
        _send_text(connection, Status.OK, manifest(step, blob.layout.leaves))

    def _send_chunks(self, connection: Connection, request: Request) -> None:
        deadline_s = time.monotonic() + LONG_POLL_S
        if request.kind is Kind.MEANS:
            blob = self._store.means(request.heal_id, request.step, deadline_s=deadline_s)
        else:
            step, blob = self._store.state(request.heal_id, deadline_s=deadline_s)
            if step != request.step:
                raise Gone(f"state {step} is kept for heal {request.heal_id}, not {request.step}")
        stop = request.first + request.count
        if not request.first < stop <= blob.layout.chunks:
            asked = f"{request.count} chunks from {request.first} on were asked for"
            _send_text(connection, Status.BAD, f"{asked}, of {blob.layout.chunks}")
            return
        for chunk in range(request.first, stop):
            # The tag is of what is there now; then it must turn out that nobody wrote to it meanwhile.
            intact = partial(blob.check_intact, chunk)
            _send(connection, Status.OK, chunk, blob.read(chunk), verify=intact)


def _request(connection: Connection) -> Request:
    received = memoryview(bytearray(REQUEST_BYTES + connection.incoming.size_bytes))
    deadline_s = time.monotonic() + TRANSFER_TIMEOUT_S
    recv_exactly(connection.sock, received, deadline_s=deadline_s, what="a joiner's request")
    data, tag = received[:REQUEST_BYTES], received[REQUEST_BYTES:]
    request = Request.decode(data)
    if not is_tag(tag, connection.incoming.tag(data)):
        raise BadFrame("a request arrived damaged or changed: its tag is another")
    return request


def _send_text(connection: Connection, status: Status, text: str) -> None:
    _send(connection, status, 0, [memoryview(text.encode())])


def _send(
    connection: Connection,
    status: Status,
    index: int,
    pieces: list[memoryview],
    *,
    verify: Callable[[], None] | None = None,
) -> None:
    header = Reply(status, index, sum(piece.nbytes for piece in pieces)).encode()
    tag = connection.outgoing.tag(header, *pieces, verify=verify)
    send_all(
        connection.sock,
        [header, *pieces, tag],
        deadline_s=time.monotonic() + TRANSFER_TIMEOUT_S,
        what="a joiner to take its chunks",
    )
