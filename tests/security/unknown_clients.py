"""What unknown clients send to a port, written by hand."""

import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests import patience


def raw_request(  # noqa: PLR0913 - one argument for each field
    version: int = 5,
    kind: int = 0,
    job: bytes = b"job",
    group: bytes = b"group-1",
    quorum_id: int = 5,
    to: bytes = b"me",
    to_incarnation: int = 9,
) -> bytes:
    """A connection request of the data plane, of incarnation 3."""
    numbers = (quorum_id, 3, to_incarnation)
    lengths = (len(job), len(group), len(to))
    return (
        struct.pack("<8sBBHLHQQQBBB", b"jaxft-hi", version, kind, 0, 0, 0, *numbers, *lengths)
        + job
        + group
        + to
    )


def assert_ended(sock: socket.socket) -> None:
    """The other side closes, and sends nothing more."""
    try:
        assert sock.recv(1) == b""
    except ConnectionResetError:
        return


def read_all(sock: socket.socket) -> bytes:
    """What comes until the other side closes, or resets because it does not want the rest."""
    received = b""
    try:
        while piece := sock.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


@contextmanager
def crowd(port: int, size: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that stay open and say nothing more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with ExitStack() as stack:
        socks: list[socket.socket] = []
        for _ in range(size):
            socks.append(
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=patience.FAR_S))
            )
            try:
                socks[-1].sendall(sent)
            except OSError:
                continue  # it is shown the door already
        yield socks


# ---- HTTP/2, as far as it takes to be a nuisance ----

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _HEADERS, _DATA = 4, 1, 0
_END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4


def streams(count: int, *, path: str, window_bytes: int, body: bytes = b"") -> bytes:
    """A connection's first bytes: calls of a gRPC method, by a client that accepts only this many bytes of each."""
    sent = _PREFACE + _frame(_SETTINGS, 0, 0, struct.pack("!HI", _INITIAL_WINDOW_SIZE, window_bytes))
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers.items())
    for number in range(count):
        sent += _frame(_HEADERS, _END_HEADERS, 1 + 2 * number, block)
        if body:
            sent += _frame(_DATA, 0, 1 + 2 * number, body)
    return sent


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + bytes((kind, flags)) + struct.pack("!I", stream) + payload


def _literal(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()
