"""A listening socket, and a connection that has not completed the handshake. See `_listener.py`."""

import contextlib
import socket
from dataclasses import dataclass, field

from jaxft._transport._handshake import RESPONSE_BYTES, ConnectionRequest, missing_bytes


@dataclass(slots=True)
class HalfOpen:
    sock: socket.socket
    name: str
    deadline_s: float
    received: bytearray = field(default_factory=bytearray)
    owes_proof: bool = False  # its hello was for this process
    # Set once it has been challenged: its hello, decoded and raw, and our nonce.
    request: ConnectionRequest | None = None
    hello_bytes: bytes = b""
    nonce: bytes = b""

    @property
    def missing_bytes(self) -> int:
        """How many more bytes we need before we can answer. Raises BadHello."""
        if self.request is not None:
            return RESPONSE_BYTES - len(self.received)
        return missing_bytes(self.received)


def bind(host: str, port: int) -> socket.socket:
    """Listen on a port; without a host, on all IPv4 and IPv6 addresses."""
    backlog = socket.SOMAXCONN
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is compiled in but switched off
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=backlog)
