"""The least that a decision takes: as many sockets as groups, a vote's bytes one way, a decision's bytes the other.

One process answers all connections once all have sent a message; the other sends for all groups. Nothing is framed,
decoded, decided or stored.
"""

import socket
import struct
import threading
import time

from jaxft_protocol.host.admission import allow_all_descriptors

from benchmarks._worker import serve

# A vote and a commit in gRPC's frames: nine bytes of HTTP/2, five of gRPC, and the message.
_MESSAGE = bytes(9 + 5 + 8)
_TIMEOUT = struct.pack("ll", 30, 0)  # seconds and microseconds


class _Sockets:
    """Connections that are used together."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        for sock in sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def limit(self) -> None:
        """From now on, let `receive` fail if nothing comes for 30 s."""
        for sock in self._sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEOUT)

    def send(self) -> None:
        for sock in self._sockets:
            sock.send(_MESSAGE)

    def receive(self) -> None:
        """Wait until one message has come from each. Raises ConnectionError once one has ended."""
        for sock in self._sockets:
            if len(data := sock.recv(len(_MESSAGE), socket.MSG_WAITALL)) != len(_MESSAGE):
                raise ConnectionError(f"{len(data)} bytes of {len(_MESSAGE)}")


class _Bare:
    def __init__(self) -> None:
        self._sockets = _Sockets([])

    def listen(self, groups: int) -> int:
        listening = socket.create_server(("127.0.0.1", 0), backlog=groups)
        threading.Thread(target=_answer, args=(listening, groups), daemon=True).start()
        return listening.getsockname()[1]

    def join(self, address: int, groups: int) -> None:
        self._sockets = _Sockets([socket.create_connection(("127.0.0.1", address)) for _ in range(groups)])
        self._sockets.limit()

    def rounds(self, count: int) -> list[float]:
        return [self._round() for _ in range(count)]

    def _round(self) -> float:
        began_s = time.perf_counter()
        self._sockets.send()
        self._sockets.receive()
        return time.perf_counter() - began_s


def _answer(listening: socket.socket, groups: int) -> None:
    with listening:
        sockets = _Sockets([listening.accept()[0] for _ in range(groups)])
    while True:
        try:
            sockets.receive()  # without a limit: the other ways of the benchmark take their turns meanwhile
            sockets.send()
        except OSError:
            return  # the groups are gone


def main() -> None:
    allow_all_descriptors()
    serve(_Bare())


if __name__ == "__main__":
    main()
