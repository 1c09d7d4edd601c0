"""The donor's end of a heal connection: answers one request after another, on its own thread.

A joiner that stops reading blocks only this thread, until the send deadline: the training thread never waits for a
server thread.
"""

import logging
import select
import time
from collections.abc import Callable
from functools import partial

from jaxft._heal._blob import NotKept, Spoiled
from jaxft._heal._frames import REQUEST_BYTES, BadFrame, Kind, Manifest, Reply, Request, Status
from jaxft._heal._store import Gone, NotYet, StateStore
from jaxft._transport._listener import Connection, ConnectionRequest, recv_exactly, send_all
from jaxft._transport._seals import is_tag

_log = logging.getLogger("jaxft")

# Between two requests a joiner replays a step; it has compiled before. If it needs longer, it finds its connection
# closed, and dials again.
IDLE_TIMEOUT_S = 300.0
# For a request, or for a chunk.
TRANSFER_TIMEOUT_S = 30.0
# How long a request waits for a state or means to come; then the joiner has to ask again.
LONG_POLL_S = 1.0


class HealServer:
    def __init__(self, store: StateStore) -> None:
        self._store = store

    def serve(self, connection: Connection, request: ConnectionRequest) -> None:
        """Answer until the joiner disconnects or violates the protocol."""
        sock = connection.sock
        idle = select.poll()  # select() cannot handle descriptors over 1023
        idle.register(sock, select.POLLIN)
        try:
            # Not `wait`, which would log: a silence between two requests is normal, since the joiner works.
            while idle.poll(1000 * IDLE_TIMEOUT_S):
                self._answer(connection, _request(connection))
        except BadFrame as error:
            _log.warning("The heal connection of group %r violated the protocol: %s", request.group, error)
        except (ConnectionError, TimeoutError) as error:
            _log.debug("The heal connection of group %r ended: %s", request.group, error)

    def _answer(self, connection: Connection, request: Request) -> None:
        try:
            match request.kind:
                case Kind.MANIFEST:
                    self._send_manifest(connection, request)
                case Kind.HOLDS:
                    self._store.holds(request.heal_id, request.step, request.span)
                case Kind.STATE | Kind.MEANS | Kind.EDITS:
                    self._send_chunks(connection, request)
        except NotYet as error:
            _send_text(connection, Status.NOT_YET, str(error))
        except NotKept as error:
            _send_text(connection, Status.NOT_KEPT, str(error))
        except (Gone, Spoiled) as error:
            _send_text(connection, Status.GONE, str(error))

    def _send_manifest(self, connection: Connection, request: Request) -> None:
        deadline_s = time.monotonic() + LONG_POLL_S
        step, blob = self._store.state(request.heal_id, request.span, deadline_s=deadline_s)
        stripe, live = self._store.keeps(request.heal_id, request.span, deadline_s=deadline_s)
        made = Manifest(step, list(blob.layout.leaves), stripe, live)
        _send_text(connection, Status.OK, made.encode())

    def _send_chunks(self, connection: Connection, request: Request) -> None:
        deadline_s = time.monotonic() + LONG_POLL_S
        if request.kind is Kind.MEANS:
            blob = self._store.means(request.heal_id, request.step, request.span, deadline_s=deadline_s)
        elif request.kind is Kind.EDITS:
            blob = self._store.edits(request.heal_id, request.step, request.span, deadline_s=deadline_s)
        else:
            step, blob = self._store.state(request.heal_id, request.span, deadline_s=deadline_s)
            if step != request.step:
                raise Gone(f"state {step} is kept for heal {request.heal_id}, not state {request.step}")
        if not request.count and request.kind is not Kind.STATE:
            _send_text(connection, Status.OK, "")  # the joiner only asks whether the means or edits are here
            return
        stop = request.first + request.count
        if not request.first < stop <= blob.layout.chunks:
            asked = f"the request is for {request.count} chunks from chunk {request.first} on"
            _send_text(connection, Status.BAD, f"{asked}, and there are {blob.layout.chunks}")
            return
        for chunk in range(request.first, stop):
            # The tag is computed first; then `verify` checks that no write has changed the bytes meanwhile.
            intact = partial(blob.check_intact, chunk)
            _send(connection, Status.OK, chunk, blob.read(chunk), verify=intact)


def _request(connection: Connection) -> Request:
    received = memoryview(bytearray(REQUEST_BYTES + connection.incoming.size_bytes))
    deadline_s = time.monotonic() + TRANSFER_TIMEOUT_S
    recv_exactly(connection.sock, received, deadline_s=deadline_s, what=f"joiner {connection.peer}'s request")
    data, tag = received[:REQUEST_BYTES], received[REQUEST_BYTES:]
    request = Request.decode(data)
    if not is_tag(tag, connection.incoming.tag(data)):
        raise BadFrame("a request was damaged or changed on the way: its tag does not match")
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
        what=f"joiner {connection.peer} to take its chunks",
    )
