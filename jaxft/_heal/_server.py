"""The donor's end of a heal connection: answers one request after another, in a thread of its own.

A joiner that stops reading holds this thread until the send deadline, and nothing else: the training thread never
waits for a server thread.
"""

import logging
import select
import socket
import time

from jaxft._dataplane import Hello, recv_exactly, send_all
from jaxft._heal._blob import Spoiled, checksum
from jaxft._heal._frames import REQUEST_BYTES, BadFrame, Kind, Reply, Request, Status
from jaxft._heal._manifest import manifest
from jaxft._heal._store import Gone, NotYet, StateStore

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

    def serve(self, sock: socket.socket, hello: Hello) -> None:
        """Answer until the joiner goes, or breaks the protocol."""
        data = bytearray(REQUEST_BYTES)
        idle = select.poll()  # select() itself knows no descriptor over 1023
        idle.register(sock, select.POLLIN)
        try:
            # Between two requests the joiner works: a silence that nobody needs to hear of.
            while idle.poll(1000 * IDLE_TIMEOUT_S):
                deadline_s = time.monotonic() + TRANSFER_TIMEOUT_S
                recv_exactly(sock, memoryview(data), deadline_s=deadline_s, what="a joiner's request")
                self._answer(sock, Request.decode(data))
        except BadFrame as error:
            _log.warning("heal connection of group %r ended: %s", hello.group, error)
        except (ConnectionError, TimeoutError) as error:
            _log.debug("heal connection of group %r ended: %s", hello.group, error)

    def _answer(self, sock: socket.socket, request: Request) -> None:
        try:
            match request.kind:
                case Kind.MANIFEST:
                    self._send_manifest(sock, request)
                case Kind.HOLDS:
                    self._store.holds(request.heal_id, request.step)
                case Kind.STATE | Kind.MEANS:
                    self._send_chunks(sock, request)
        except NotYet as error:
            _send_text(sock, Status.NOT_YET, str(error))
        except (Gone, Spoiled) as error:
            _send_text(sock, Status.GONE, str(error))

    def _send_manifest(self, sock: socket.socket, request: Request) -> None:
        step, blob = self._store.state(request.heal_id, deadline_s=time.monotonic() + LONG_POLL_S)
        _send_text(sock, Status.OK, manifest(step, blob.layout.leaves))

    def _send_chunks(self, sock: socket.socket, request: Request) -> None:
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
            _send_text(sock, Status.BAD, f"{asked}, of {blob.layout.chunks}")
            return
        for chunk in range(request.first, stop):
            pieces, digest = blob.read(chunk)
            _send(sock, Status.OK, chunk, pieces, digest)


def _send_text(sock: socket.socket, status: Status, text: str) -> None:
    pieces = [memoryview(text.encode())]
    _send(sock, status, 0, pieces, checksum(pieces))


def _send(sock: socket.socket, status: Status, index: int, pieces: list[memoryview], digest: int) -> None:
    length = sum(piece.nbytes for piece in pieces)
    send_all(
        sock,
        [Reply(status, index, length, digest).encode(), *pieces],
        deadline_s=time.monotonic() + TRANSFER_TIMEOUT_S,
        what="a joiner to take its chunks",
    )
