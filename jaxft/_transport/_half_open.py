"""A listening socket, and a connection that has not completed the handshake. See `_listener.py`."""

import errno
import socket
from dataclasses import dataclass, field

from jaxft._base._room import is_shortage
from jaxft._errors import ConfigurationError
from jaxft._transport._handshake import RESPONSE_BYTES, ConnectionRequest, missing_bytes


@dataclass(slots=True)
class HalfOpen:
    sock: socket.socket
    name: str
    deadline_s: float
    received: bytearray = field(default_factory=bytearray)
    owes_proof: bool = False  # its request was for this process
    # Set once it has been challenged: its request, decoded and raw, and our nonce.
    request: ConnectionRequest | None = None
    request_bytes: bytes = b""
    nonce: bytes = b""

    @property
    def missing_bytes(self) -> int:
        """How many more bytes we need before we can answer. Raises BadRequest."""
        if self.request is not None:
            return RESPONSE_BYTES - len(self.received)
        return missing_bytes(self.received)


def bind_one_of(host: str, ports: range) -> socket.socket:
    """Listen on the first port of a range that is free, as `bind`. Raises ConfigurationError if none is."""
    for port in ports:
        try:
            return bind(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    which = f"port {ports[0]}" if len(ports) == 1 else f"no port of {ports[0]} to {ports[-1]}"
    raise ConfigurationError(
        f"{which} is {'taken' if len(ports) == 1 else 'free'}: another process listens there. `port=` and JAXFT_PORT "
        "need a port for each process of this machine: give a range, or leave them out."
    )


def bind(host: str, port: int) -> socket.socket:
    """Listen on a port; without a host, on all IPv4 and IPv6 addresses."""
    backlog = socket.SOMAXCONN
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=backlog)
    try:
        return _bind_both(port, backlog)
    except OSError as error:  # there is no IPv6 here
        if is_shortage(error):
            raise
    return socket.create_server(("", port), backlog=backlog)


def _bind_both(port: int, backlog: int) -> socket.socket:
    """Listen on all addresses of IPv6 and IPv4.

    `socket.create_server` takes a moment without a descriptor for a host without IPv6.
    """
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", port))
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock
