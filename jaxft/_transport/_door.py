"""The listening side of the handshake: accepts connections, and admits requests for this process.

Theory of operation. Bulk data between processes (exchanges of contributions, healing) goes over plain TCP
connections. The dialler first sends a `ConnectionRequest`: who it is, whom it wants to reach, and for what. Only once
the listener has answered does the connection count. So a stopped process is never taken for a live one: the kernel
completes its TCP handshakes, but does not answer requests.

    dialler                         listener
      | -- request (version, kind, job, both ends, quorum or heal) -> |  unauthenticated, for 2 s at most
      | <-- challenge (nonce) --------------------------------------- |  only if the job has a key,
      | -- nonce, proof --------------------------------------------> |  within the same 2 s
      | <-- accepted (with a proof), refused with the reason, or busy  |
      |                                            exchange: pending until `take` asks for it
      |                                            heal:     passed to `on_heal`, on its own thread

One thread accepts connections and reads requests, for all connections at once, and never blocks on one.

Limits. Connections without a request for this process (`_MAX_UNKNOWN`), connections with such a request that still
owe a proof (`_MAX_CHALLENGED`), and accepted connections are counted separately. Each kind evicts its own: the oldest
of the busiest address. A request for this process names its incarnation, 63 random bits that only the coordinator and
the job's groups know. So a program that just connects, or speaks another protocol, cannot take what peers need, and a
peer that is evicted dials again at once (`_handshake.py`). When the process runs out of file descriptors, connections
without a request go first. The limit on accepted connections leaves room for a job of thousands of groups.
"""

import contextlib
import errno
import logging
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxft_protocol import credentials
from jaxft_protocol.credentials import NONCE_BYTES, DataKey
from jaxft_protocol.host.admission import RateLimitFilter, crowded_out

from jaxft._base._room import is_shortage
from jaxft._errors import ConfigurationError
from jaxft._transport._handshake import (
    RESPONSE_BYTES,
    BadRequest,
    ConnectionRequest,
    accepted,
    busy,
    challenge,
    decode,
    missing_bytes,
    refused,
)
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import SEND_FLAGS, Abort, close_in_children, tune

_log = logging.getLogger("jaxft")
# What unauthenticated peers cause is logged at a limited rate, so that they cannot fill the disk.
_unauthenticated_log = logging.getLogger("jaxft.unauthenticated")
_unauthenticated_log.addFilter(RateLimitFilter())

# A connection request has 45 bytes and three names; a peer that takes longer than this to send it is not jaxft.
_HELLO_TIMEOUT_S = 2.0
# A peer's request arrives within a round trip of its connection.
_MAX_UNKNOWN = 256
# All members of a quorum may dial at once, and each owes its proof for one round trip.
_MAX_CHALLENGED = 2048
# They may take at most this fraction (1/n) of the process's file descriptors.
_CHALLENGED_PART = 8
# Accept at most this many connections before reading the open ones again.
_MAX_ACCEPTED_IN_A_ROW = 64
# Out of descriptors, with no unauthenticated connection to drop: try to accept again after this.
_OUT_OF_DESCRIPTORS_PAUSE_S = 0.05


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
    proof: bytes = b""  # ours

    @property
    def missing_bytes(self) -> int:
        """How many more bytes we need before we can answer. Raises BadRequest."""
        if self.request is not None:
            return RESPONSE_BYTES - len(self.received)
        return missing_bytes(self.received)


class Door:
    """A listening socket, and the connections whose handshakes are under way. For one thread, but for `close`."""

    def __init__(
        self,
        sock: socket.socket,
        key: DataKey | None,
        descriptors: int,
        wrong_end: Callable[[ConnectionRequest], str],
        admit: "Callable[[HalfOpen, ConnectionRequest, Connection], None]",
    ) -> None:
        self.half_open: dict[int, HalfOpen] = {}  # by descriptor, oldest first
        self._sock = sock
        self._key = key
        self._descriptors = descriptors
        self._wrong_end = wrong_end
        self._on_request = admit
        self._port: int = sock.getsockname()[1]
        self._poller = select.poll()
        self._paused_until_s: float | None = None  # set while it does not accept

    def serve(self, closed: Abort) -> None:
        """Accept connections until the flag is set. Raises errors of the listening socket itself."""
        try:
            self._poller.register(self._sock, select.POLLIN)
            self._poller.register(closed, select.POLLIN)
            while not closed.is_set:
                self._turn()
        finally:
            for half in list(self.half_open.values()):
                self._drop(half, "the listener is closing")

    def _turn(self) -> None:
        now_s = time.monotonic()
        if self._paused_until_s is not None and now_s >= self._paused_until_s:
            self._paused_until_s = None
            self._poller.register(self._sock, select.POLLIN)
        oldest = next(iter(self.half_open.values()), None)
        until_s = [half.deadline_s for half in (oldest,) if half is not None]
        until_s += [] if self._paused_until_s is None else [self._paused_until_s]
        ready = [
            fd for fd, _ in self._poller.poll(1000 * max(0.0, min(until_s) - now_s) if until_s else None)
        ]
        # Read first: a connection whose request is here no longer counts as unknown.
        for fd in ready:
            if (half := self.half_open.get(fd)) is not None:
                self._read(half)
        if self._sock.fileno() in ready:
            self._accept_some()
        now_s = time.monotonic()
        for half in [half for half in self.half_open.values() if half.deadline_s <= now_s]:
            self._drop(half, "it did not complete the handshake in time")

    def _accept_some(self) -> None:
        for _ in range(_MAX_ACCEPTED_IN_A_ROW):
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._make_room(error)
                elif error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    raise  # our own socket is broken, not a connection
                return
            self._take_in(sock, str(address[0]))

    def _make_room(self, error: OSError) -> None:
        """Out of descriptors: drop the connections without a request, or else stop accepting for a moment."""
        _unauthenticated_log.warning("Cannot accept connections on port %d: %s.", self._port, error.strerror)
        unknown = [half for half in self.half_open.values() if not half.owes_proof]
        for half in unknown:
            self._drop(half, "the process is out of descriptors")
        if not unknown:
            self._poller.unregister(self._sock)
            self._paused_until_s = time.monotonic() + _OUT_OF_DESCRIPTORS_PAUSE_S

    def _take_in(self, sock: socket.socket, name: str) -> None:
        # The program may have called `socket.setdefaulttimeout`, for its downloads: Python then waits in each call.
        sock.settimeout(None)
        close_in_children(sock)
        half = HalfOpen(sock, name=name, deadline_s=time.monotonic() + _HELLO_TIMEOUT_S)
        self.half_open[sock.fileno()] = half
        self._poller.register(sock, select.POLLIN)
        self._read(half)  # a peer's request came with the connection, or is about to
        self._crowd_out(owes_proof=False, most=_MAX_UNKNOWN)

    def _crowd_out(self, *, owes_proof: bool, most: int) -> None:
        if len(self.half_open) <= most:
            return
        known = [(fd, half.name) for fd, half in self.half_open.items() if half.owes_proof == owes_proof]
        if len(known) > most:
            for fd in crowded_out(known, most):
                half = self.half_open[fd]
                self._read(half)  # its next bytes may have arrived since
                if self.half_open.get(fd) is half and half.owes_proof == owes_proof:
                    self._drop(half, "too many connections are in the handshake")

    def _read(self, half: HalfOpen) -> None:
        try:
            # The names' lengths are in the fixed part, so `missing_bytes` grows once that is here.
            while (missing := half.missing_bytes) > 0:
                received = half.sock.recv(missing, socket.MSG_DONTWAIT)
                if not received:
                    self._drop(half, "the peer closed the connection")
                    return
                half.received += received
            self._answer(half)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(half, str(error))
        except BadRequest as error:
            if error.answerable:
                self.refuse(half, f"The request cannot be read: {error}.")
            else:
                self._drop(half, str(error))
        except Exception:  # an error caused by a connection ends only that connection
            _unauthenticated_log.exception("A connection from %s to port %d failed.", half.name, self._port)
            if half.sock.fileno() in self.half_open:
                self._drop(half, "an unexpected error")

    def _answer(self, half: HalfOpen) -> None:
        if half.request is not None:
            self._check_response(half, half.request)
        elif self._key is not None:
            self._challenge(half)
        else:
            request = decode(half.received)
            self._admit(half, request, Connection.plain(half.sock, request.group))

    def _challenge(self, half: HalfOpen) -> None:
        half.request = decode(half.received)
        half.request_bytes = bytes(half.received)
        half.nonce = credentials.new_nonce()
        half.received.clear()
        half.sock.send(challenge(half.nonce), SEND_FLAGS)
        half.owes_proof = not self._wrong_end(half.request)
        self._crowd_out(owes_proof=True, most=min(_MAX_CHALLENGED, self._descriptors // _CHALLENGED_PART))

    def _check_response(self, half: HalfOpen, request: ConnectionRequest) -> None:
        assert self._key is not None
        nonce, given = bytes(half.received[:NONCE_BYTES]), bytes(half.received[NONCE_BYTES:])
        nonces = {"listener_nonce": half.nonce, "dialler_nonce": nonce}
        if not credentials.is_proof(
            given, credentials.dialler_proof(self._key, half.request_bytes, **nonces)
        ):
            self.refuse(
                half,
                f"The dialler did not prove that it knows the key of job {request.job!r}: start all groups of a job "
                "with the same token.",
            )
            return
        half.proof = credentials.listener_proof(self._key, half.request_bytes, **nonces)
        outgoing, incoming = credentials.connection_keys(self._key, half.request_bytes, **nonces)
        sealed = Connection.sealed(half.sock, outgoing=outgoing, incoming=incoming, peer=request.group)
        self._admit(half, request, sealed)

    def _admit(self, half: HalfOpen, request: ConnectionRequest, connection: Connection) -> None:
        if wrong := self._wrong_end(request):
            self.refuse(half, wrong)
        else:
            self._on_request(half, request, connection)

    def accept(self, half: HalfOpen) -> None:
        half.sock.send(accepted(half.proof), SEND_FLAGS)
        tune(half.sock)
        self._release(half)

    def refuse(self, half: HalfOpen, why: str) -> None:
        _unauthenticated_log.warning("Refused a connection from %s: %s", half.name, why)
        self._send_away(half, refused(why))

    def put_off(self, half: HalfOpen, why: str) -> None:
        """Have the dialler try again later."""
        self._send_away(half, busy(why))

    def _send_away(self, half: HalfOpen, answer: bytes) -> None:
        with contextlib.suppress(OSError):  # the peer is gone already
            half.sock.send(answer, SEND_FLAGS)
        self._release(half)
        half.sock.close()

    def _drop(self, half: HalfOpen, why: str) -> None:
        _log.debug("Dropped a connection from %s in the handshake: %s.", half.name, why)
        self._release(half)
        half.sock.close()

    def _release(self, half: HalfOpen) -> None:
        del self.half_open[half.sock.fileno()]
        self._poller.unregister(half.sock)


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
        f"{which} is {'taken' if len(ports) == 1 else 'free'}: another process listens there. Each process of this "
        "machine needs a port: give `port=` a range, or leave it out."
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
