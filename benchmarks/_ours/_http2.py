"""As much of HTTP/2 as a benchmark needs to call a gRPC server without a gRPC library: a few microseconds a message.

Requests travel with headers that no table remembers; the headers of answers are skipped. Windows are opened as wide
as they go at the start; those of the server are taken to be wide enough, for what is sent here is small and is read
at once.
"""

import socket
import struct
from collections.abc import Sequence

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_INITIAL_WINDOW_SIZE = 4
_WIDEST, _USUAL = (1 << 31) - 1, (1 << 16) - 1
_HEADER_BYTES = 9
_RECEIVE_BYTES = 1 << 18


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def grpc_frame(stream: int, message: bytes, flags: int = 0) -> bytes:
    """One message of a call."""
    return frame(DATA, flags, stream, struct.pack(">BI", 0, len(message)) + message)


def request_frame(stream: int, path: str, authority: str) -> bytes:
    """The headers of a call."""
    fields = (
        b"\x83\x86",  # POST, http
        b"\x04" + _text(path),
        b"\x01" + _text(authority),
        *(
            b"\x00" + _text(name) + _text(value)
            for name, value in (("content-type", "application/grpc"), ("te", "trailers"))
        ),
    )
    return frame(HEADERS, END_HEADERS, stream, b"".join(fields))


def _text(value: str) -> bytes:
    assert len(value) < 127
    return bytes([len(value)]) + value.encode()


class Connection:
    """One connection; `take` gives what has come."""

    def __init__(self, host: str, port: int) -> None:
        self.sock = socket.create_connection((host, port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WIDEST)
        window = struct.pack(">I", _WIDEST - _USUAL)
        self.send(_PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, window))

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def take(self) -> Sequence[tuple[int, int, bytes]]:
        """Wait for bytes, and return the frames of calls that are whole: kind, flags, payload.

        Raises:
            ConnectionError: the server has ended a call, or the connection.
        """
        data = self.sock.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the server has closed the connection")
        data, place = self._rest + data, 0
        frames: list[tuple[int, int, bytes]] = []
        while len(data) - place >= _HEADER_BYTES:
            length = int.from_bytes(data[place : place + 3])
            end = place + _HEADER_BYTES + length
            if len(data) < end:
                break
            kind, flags, payload = data[place + 3], data[place + 4], data[place + _HEADER_BYTES : end]
            place = end
            if kind in (DATA, HEADERS):
                frames.append((kind, flags, payload))
            elif kind in (SETTINGS, PING) and not flags & ACK:
                self.send(frame(kind, ACK, 0, payload if kind == PING else b""))
            elif kind in (RST_STREAM, GOAWAY):
                raise ConnectionError(f"the server has ended the call: {payload!r}")
        self._rest = data[place:]
        return frames
