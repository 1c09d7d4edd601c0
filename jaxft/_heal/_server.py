"""The donor's end of a heal connection: answers one request after another, in a thread of its own.

A joiner that stops reading holds this thread until the send deadline, and nothing else: the training thread never
waits for a server thread.
"""

import json
import logging
import select
import socket
import time
from collections.abc import Sequence

import numpy as np

from jaxft._dataplane import Hello, recv_exactly, send_all
from jaxft._heal._blob import Blob, BlobLayout, LeafType, checksum
from jaxft._heal._frames import REQUEST_BYTES, BadFrame, Kind, Reply, Request, Status
from jaxft._heal._store import Gone, NotYet, StateStore

_log = logging.getLogger("jaxft")

# A joiner between two requests replays a step; compiling has been done before it came.
IDLE_TIMEOUT_S = 300.0
SEND_TIMEOUT_S = 30.0
# How long a request waits for what is expected; then the joiner is told to ask again.
LONG_POLL_S = 1.0


class HealServer:
    def __init__(self, store: StateStore) -> None:
        self._store = store

    def serve(self, sock: socket.socket, hello: Hello) -> None:
        """Answer until the joiner goes, or breaks the protocol."""
        data = bytearray(REQUEST_BYTES)
        try:
            while True:
                # Between two requests the joiner works: a silence that nobody needs to hear of.
                if not select.select([sock], [], [], IDLE_TIMEOUT_S)[0]:
                    return
                deadline_s = time.monotonic() + SEND_TIMEOUT_S
                recv_exactly(sock, memoryview(data), deadline_s=deadline_s, what="a joiner's request")
                self._answer(sock, Request.decode(data))
        except BadFrame as error:
            _log.warning("heal connection of group %r ended: %s", hello.group, error)
        except (ConnectionError, TimeoutError) as error:
            _log.debug("heal connection of group %r ended: %s", hello.group, error)

    def _answer(self, sock: socket.socket, request: Request) -> None:
        try:
            if request.kind is Kind.MANIFEST:
                self._send_manifest(sock, request)
            else:
                self._send_chunks(sock, request)
        except NotYet as error:
            _send(sock, Status.NOT_YET, 0, [memoryview(str(error).encode())])
        except Gone as error:
            _send(sock, Status.GONE, 0, [memoryview(str(error).encode())])

    def _send_manifest(self, sock: socket.socket, request: Request) -> None:
        step, blob = self._store.state(request.heal_id, deadline_s=time.monotonic() + LONG_POLL_S)
        leaves = [[list(leaf.shape), leaf.dtype] for leaf in blob.layout.leaves]
        text = json.dumps({"step": step, "leaves": leaves})
        _send(sock, Status.OK, 0, [memoryview(text.encode())])

    def _send_chunks(self, sock: socket.socket, request: Request) -> None:
        blob = self._blob(request)
        stop = request.first + request.count
        if stop > blob.layout.chunks:
            text = f"chunks {request.first} to {stop} of {blob.layout.chunks} were asked for"
            _send(sock, Status.BAD, 0, [memoryview(text.encode())])
            return
        for chunk in range(request.first, stop):
            _send(sock, Status.OK, chunk, blob.pieces(chunk))

    def _blob(self, request: Request) -> Blob:
        deadline_s = time.monotonic() + LONG_POLL_S
        if request.kind is Kind.STATE:
            return self._store.state(request.heal_id, deadline_s=deadline_s)[1]
        return means_blob(self._store.means(request.heal_id, request.step, deadline_s=deadline_s))


class _Array:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def host(self) -> np.ndarray:
        return np.ascontiguousarray(self._array)


def means_blob(means: Sequence[np.ndarray]) -> Blob:
    layout = BlobLayout.of([LeafType(tuple(mean.shape), mean.dtype.name) for mean in means])
    return Blob(layout, [_Array(np.asarray(mean)) for mean in means])


def _send(sock: socket.socket, status: Status, index: int, pieces: list[memoryview]) -> None:
    length = sum(piece.nbytes for piece in pieces)
    header = Reply(status, index, length, checksum(pieces)).encode()
    send_all(
        sock,
        [header, *pieces],
        deadline_s=time.monotonic() + SEND_TIMEOUT_S,
        what="a joiner to take its chunks",
    )
