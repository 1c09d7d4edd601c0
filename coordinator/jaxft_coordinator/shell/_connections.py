"""Ends connections of unauthenticated peers that stay too long, or are too many.

gRPC does not show which connections it holds, and offers no way to end one: a peer that opens a stream and reads
nothing from it would keep the connection, and its memory, forever. So this looks at the process's own sockets. Every
connection to the port that is not an admitted group's counts as unauthenticated.

It also sees whether gRPC accepts connections. After some errors of accept(2), such as ENFILE or ENOBUFS, gRPC never
accepts again, and only its log shows that. The kernel still completes TCP handshakes, so groups would wait for a
coordinator that looks alive.
"""

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Set
from urllib.parse import unquote

from jaxft_protocol.host.admission import crowded_out

from jaxft_coordinator.shell.limits import MAX_UNAUTHENTICATED

# Since a connection was first seen: a group is admitted within milliseconds, and a health check is answered by then.
UNAUTHENTICATED_TIMEOUT_S = 15.0

# Looks in a row that see connections wait, and none accepted. gRPC accepts within milliseconds.
_MOST_IDLE_LOOKS = 10
# The same while the queue is full: a flood of connections fills it again as soon as some are accepted.
_MOST_FULL_LOOKS = 60
# In `struct tcp_info` of a listening socket: how many connections wait to be accepted, and beyond how many none more
# may.
_WAITING = struct.Struct("=24xII")

Peer = tuple[str, int]
_Key = tuple[int, int, int]


class Connections:
    """The connections to one port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._unauthenticated: dict[Peer, float] = {}  # when each was first seen, oldest first
        self._ended: Set[Peer] = set()  # gRPC may not have noticed yet
        # The sockets of admitted groups at the last sweep, by descriptor and inode: a new socket has another inode.
        self._groups: dict[_Key, Peer] = {}
        # At the last sweep: the connections, and how many waited to be accepted.
        self._seen: Set[Peer] = set()
        self._waiting = 0
        self._is_full = False
        self._idle_looks = 0

    @property
    def accepts(self) -> bool:
        """False once connections have waited for long, and none was accepted."""
        return self._idle_looks < (_MOST_FULL_LOOKS if self._is_full else _MOST_IDLE_LOOKS)

    def sweep(self, groups: Set[Peer], now_s: float) -> int:
        """End unauthenticated connections that are too old or too many; return how many were ended."""
        found = self._strangers(groups)
        here = found.keys() - self._ended
        waiting = {peer: since_s for peer, since_s in self._unauthenticated.items() if peer in here}
        waiting |= {peer: now_s for peer in found if peer in here and peer not in waiting}
        ended = {peer for peer, since_s in waiting.items() if now_s - since_s > UNAUTHENTICATED_TIMEOUT_S}
        young = ((peer, peer[0]) for peer in waiting if peer not in ended)
        ended |= set(crowded_out(young, MAX_UNAUTHENTICATED))
        self._unauthenticated = {peer: since_s for peer, since_s in waiting.items() if peer not in ended}
        self._ended = (self._ended & found.keys()) | ended
        return sum(_end(found[peer], peer) for peer in ended)

    def _strangers(self, groups: Set[Peer]) -> dict[Peer, int]:
        """The descriptors of all connections to the port that are not an admitted group's."""
        found: dict[Peer, int] = {}
        admitted: dict[_Key, Peer] = {}
        waiting, self._is_full = 0, False
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                status = os.fstat(fd)  # a tenth of the time of os.readlink
            except OSError:  # closed in the meantime
                continue
            key = (fd, status.st_dev, status.st_ino)
            peer = self._groups.get(key) or _peer(fd, self._port)
            if peer is None:
                here, most = _waiting_at(fd, self._port)
                waiting += here
                self._is_full |= here > most
            elif peer in groups:
                admitted[key] = peer
            else:
                found[peer] = fd
        self._groups = admitted
        self._count_idle_looks(waiting, {*found, *admitted.values()})
        return found

    def _count_idle_looks(self, waiting: int, here: Set[Peer]) -> None:
        # What nothing accepts stays in the kernel's queue, also once its peer has closed it.
        is_idle = waiting >= max(1, self._waiting) and here <= self._seen
        self._idle_looks = self._idle_looks + 1 if is_idle else 0
        self._seen, self._waiting = here, waiting


def peer_of(name: str) -> Peer | None:
    """Parse an address as gRPC writes it, such as "ipv4:127.0.0.1:4711" or "ipv6:%5B::1%5D:4711"."""
    family, _, address = unquote(name).partition(":")
    host, _, port = address.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _plain(host.strip("[]")), int(port)


def _peer(fd: int, port: int) -> Peer | None:
    """The other end of a connection to a port; None if the descriptor is not, or no longer, such a connection."""
    with contextlib.suppress(OSError), _borrowed(fd) as sock:
        if _is_at(sock, port):
            host, peer_port = sock.getpeername()[:2]
            return _plain(host), peer_port
    return None


def _waiting_at(fd: int, port: int) -> tuple[int, int]:
    """How many connections to a port wait to be accepted, and beyond how many its queue is full.

    0 of 0 if the descriptor is not its listener.
    """
    with contextlib.suppress(OSError), _borrowed(fd) as sock:
        if _is_at(sock, port) and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return _WAITING.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WAITING.size))
    return 0, 0


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket by its descriptor, which gRPC owns. Raises OSError for any other descriptor."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def _is_at(sock: socket.socket, port: int) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == port


def _end(fd: int, peer: Peer) -> bool:
    """Shut a connection down; gRPC notices and frees it. False if it is gone already."""
    with contextlib.suppress(OSError), socket.fromfd(fd, socket.AF_INET6, socket.SOCK_STREAM) as sock:
        host, port = sock.getpeername()[:2]
        if (_plain(host), port) == peer:  # the descriptor may have been reused
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _plain(host: str) -> str:
    """Normalise an address: an IPv4-mapped IPv6 address becomes the IPv4 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
