"""Ends connections of strangers that stay, or that are too many.

gRPC tells nobody which connections it holds, and offers no way to end one: a stranger that opens a stream and takes
nothing from it would keep it, and its memory, for ever. So this looks at the process's own sockets. Whatever came in
through the port and is not the connection of a group that has been let in is a stranger's.
"""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Set
from urllib.parse import unquote

from jaxft_protocol.admission import crowded_out

from jaxft_coordinator.limits import MAX_STRANGERS

# From the first look at a connection: a group is let in within milliseconds, and a health check has had its answer.
STRANGER_TIMEOUT_S = 15.0
# Event loop, standard streams, listening sockets, a log file: with so few descriptors there is nobody to look for.
_FEW_DESCRIPTORS = 12

Peer = tuple[str, int]


class Connections:
    """The connections that came in through one port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._strangers: dict[Peer, float] = {}  # since when they are known as such, longest first
        self._ended: Set[Peer] = set()  # gRPC may not have noticed it yet

    def sweep(self, groups: Set[Peer], now_s: float) -> int:
        """End what strangers have kept for too long, or have too many of; return how many that were.

        Args:
            groups: the connections that are to be left alone.
            now_s: the time, on any clock that only goes forward.
        """
        if len(os.listdir("/proc/self/fd")) <= len(groups) + _FEW_DESCRIPTORS:
            self._strangers.clear()
            return 0
        found = _connections(self._port)
        here = found.keys() - groups - self._ended
        strangers = {peer: since_s for peer, since_s in self._strangers.items() if peer in here}
        strangers |= {peer: now_s for peer in found if peer in here and peer not in strangers}
        ended = {peer for peer, since_s in strangers.items() if now_s - since_s > STRANGER_TIMEOUT_S}
        ended |= set(crowded_out(((peer, peer[0]) for peer in strangers if peer not in ended), MAX_STRANGERS))
        self._strangers = {peer: since_s for peer, since_s in strangers.items() if peer not in ended}
        self._ended = (self._ended & found.keys()) | ended
        return sum(_end(found[peer], peer) for peer in ended)


def peer_of(name: str) -> Peer | None:
    """Read an address as gRPC writes it, such as "ipv4:127.0.0.1:4711" or "ipv6:%5B::1%5D:4711"."""
    family, _, address = unquote(name).partition(":")
    host, _, port = address.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _plain(host.strip("[]")), int(port)


def _connections(port: int) -> dict[Peer, int]:
    """The descriptors of all connections to a port of this process."""
    found: dict[Peer, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, not connected, or gone
            if (peer := _peer(int(name), port)) is not None:
                found[peer] = int(name)
    return found


def _peer(fd: int, port: int) -> Peer | None:
    sock = socket.socket(fileno=fd)
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != port:
            return None
        host, peer_port = sock.getpeername()[:2]
        return _plain(host), peer_port
    finally:
        sock.detach()  # it is gRPC's


def _end(fd: int, peer: Peer) -> bool:
    """Shut a connection down; gRPC sees its end and frees it. False if it has gone meanwhile."""
    with contextlib.suppress(OSError), socket.fromfd(fd, socket.AF_INET6, socket.SOCK_STREAM) as sock:
        host, port = sock.getpeername()[:2]
        if (_plain(host), port) == peer:  # the descriptor may be another's by now
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _plain(host: str) -> str:
    """One way to write an address: an IPv4 address in IPv6's clothes is an IPv4 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
