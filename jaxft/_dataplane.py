"""The data plane's front door: one listening socket for each process, and the way to reach another's.

Theory of operation. Bulk data between processes (exchanges of contributions, healing) goes over plain TCP
connections. Whoever dials says first who it is and what for, in a `Hello`; the listener answers, and only then
is there a connection. So a dialler never takes a backlog for a living process: a kernel completes handshakes
on behalf of a stopped one, but does not answer hellos.

    dialler                         listener
      | -- hello (version, kind, job, group, incarnation, quorum) --> |  half open, for 2 s at most
      | <-- challenge (nonce) --------------------------------------- |  only where the job has a key,
      | -- nonce, proof --------------------------------------------> |  within the same 2 s
      | <-- accepted (with a proof), or refused with the reason ------ |
      |                                            exchange: parked until `take` asks for it
      |                                            heal:     handed to `on_heal`, in a thread of its own

One thread accepts and reads hellos, for all connections at once and without ever blocking on one, so a
stranger that connects and stays silent, or sends garbage, costs a descriptor for 2 s and nothing else.
Everything is bounded: half-open and parked connections, healing threads, the length of names and of answers. Where
the job has a key, nobody is parked or healed, or learns anything, who has not proved that it knows it.

A quorum's connections are parked under (quorum, group, incarnation), because a peer may hear of a quorum
before we do. `forget` drops those of quorums that are over, and lets in no more of them.

Left out: encryption. A connection is proved to be one of the job's when it begins; what then flows over it could
be read and changed by whoever sits on the path (docs/security.md).
"""

import contextlib
import errno
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxft_coordinator import credentials
from jaxft_coordinator.credentials import NONCE_BYTES, DataKey
from jaxft_coordinator.limits import crowded_out
from jaxft_coordinator.sparse import Sparse

from jaxft._hello import (
    RESPONSE_BYTES,
    BadHello,
    Hello,
    accepted,
    challenge,
    check_name,
    decode,
    dial,
    missing_bytes,
    refused,
)
from jaxft._parking import Parking
from jaxft._wire import SEND_FLAGS, Abort, recv_exactly, send_all, tune

__all__ = ["Abort", "Hello", "Listener", "dial", "recv_exactly", "send_all"]

_log = logging.getLogger("jaxft")
# What strangers bring about; it must not fill the disk.
_strangers_log = logging.getLogger("jaxft.strangers")
_strangers_log.addFilter(Sparse())

# A hello has 30 bytes and two names; a peer that needs longer than this to send it is not one of ours.
_HELLO_TIMEOUT_S = 2.0
_MAX_HALF_OPEN = 128
# Each serves one joiner; more of them at once are better served by other donors.
_MAX_HEALING = 32
_BACKLOG = 256
# When the process is out of descriptors, accepting is tried again after this.
_OUT_OF_DESCRIPTORS_PAUSE_S = 0.05


@dataclass(slots=True)
class _HalfOpen:
    sock: socket.socket
    name: str
    deadline_s: float
    received: bytearray = field(default_factory=bytearray)
    # Once it has been challenged: what it had said, and what it must answer to.
    hello: Hello | None = None
    said: bytes = b""
    nonce: bytes = b""

    @property
    def missing_bytes(self) -> int:
        """How many bytes it still has to send before the next move is ours. Raises BadHello."""
        if self.hello is not None:
            return RESPONSE_BYTES - len(self.received)
        return missing_bytes(self.received)


class Listener:
    """Accepts the connections of one job's data plane, from construction until `close`."""

    def __init__(
        self,
        *,
        host: str = "",
        port: int = 0,
        job: str,
        on_heal: Callable[[socket.socket, Hello], None] | None,
        key: DataKey | None = None,
    ) -> None:
        """Listen, and start the thread that accepts.

        Args:
            host: the address to bind; empty for all.
            port: the port to bind; 0 for any that is free (see the attribute `port`).
            job: connections for any other job are refused.
            on_heal: called with each connection for healing, in a thread of its own. The connection is closed
                when it returns, and shut down under it by `close`. None: such connections are refused.
            key: the key of the job's data plane, which whoever dials must prove to know; None: nobody has to.
        """
        check_name(job, what="job")
        self.key = key
        self._job = job
        self._on_heal = on_heal
        self._sock = _bind(host, port)
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self._half_open: dict[int, _HalfOpen] = {}  # by descriptor, oldest first
        self._poller = select.poll()
        self._parking = Parking()
        self._healing: set[socket.socket] = set()
        self._healing_lock = threading.Lock()
        self._closed = Abort()
        self._thread = threading.Thread(target=self._run, name="jaxft-listener", daemon=True)
        self._thread.start()

    def take(
        self, *, quorum_id: int, group: str, incarnation: int, deadline_s: float, abort: Abort | None
    ) -> socket.socket:
        """Wait for a peer's connection for the exchange of a quorum, and hand it over.

        Raises:
            TimeoutError: the deadline passed.
            ConnectionError: the quorum was forgotten, the listener closed, or the abort flag set.
        """
        return self._parking.take((quorum_id, group, incarnation), deadline_s=deadline_s, abort=abort)

    def forget(self, quorum_id: int) -> None:
        """Close what is parked for this quorum and older ones, and refuse what still comes for them."""
        self._parking.forget(quorum_id)

    def close(self) -> None:
        """Stop listening and close every connection that was not taken. Idempotent."""
        self._closed.set("closed")
        self._thread.join()
        self._sock.close()
        self._parking.close()
        with self._healing_lock:
            for sock in self._healing:
                with contextlib.suppress(OSError):  # its peer was quicker
                    sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        self._poller.register(self._sock, select.POLLIN)
        self._poller.register(self._closed, select.POLLIN)
        while not self._closed.is_set:
            try:
                self._turn()
            except Exception:  # the front door stays open, whatever comes through it
                _log.exception("The listener on port %d goes on after an error.", self.port)
        for half in list(self._half_open.values()):
            self._drop(half, "the listener closes")

    def _turn(self) -> None:
        oldest = next(iter(self._half_open.values()), None)
        timeout_ms = None if oldest is None else 1000 * max(0.0, oldest.deadline_s - time.monotonic())
        for fd, _ in self._poller.poll(timeout_ms):
            if fd == self._sock.fileno():
                self._accept()
            elif (half := self._half_open.get(fd)) is not None:
                self._read(half)
        now_s = time.monotonic()
        for half in [half for half in self._half_open.values() if half.deadline_s <= now_s]:
            self._drop(half, "no hello came in time")

    def _accept(self) -> None:
        try:
            sock, address = self._sock.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                _log.warning("Cannot accept connections on port %d: %s.", self.port, error.strerror)
                time.sleep(_OUT_OF_DESCRIPTORS_PAUSE_S)
            return
        if len(self._half_open) >= _MAX_HALF_OPEN:
            addresses = ((fd, half.name) for fd, half in self._half_open.items())
            (fd,) = crowded_out(addresses, len(self._half_open) - 1)
            self._drop(self._half_open[fd], "too many have not said hello")
        deadline_s = time.monotonic() + _HELLO_TIMEOUT_S
        self._half_open[sock.fileno()] = _HalfOpen(sock, name=str(address[0]), deadline_s=deadline_s)
        self._poller.register(sock, select.POLLIN)

    def _read(self, half: _HalfOpen) -> None:
        try:
            received = half.sock.recv(half.missing_bytes, socket.MSG_DONTWAIT)
            half.received += received
            if not received:
                self._drop(half, "it closed the connection")
            elif half.missing_bytes == 0:
                self._answer(half)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(half, str(error))
        except BadHello as error:
            if error.answerable:
                self._refuse(half, f"Its hello cannot be read: {error}.")
            else:
                self._drop(half, str(error))

    def _answer(self, half: _HalfOpen) -> None:
        if half.hello is not None:
            self._check_response(half, half.hello)
        elif self.key is not None:
            self._challenge(half)
        else:
            self._admit(half, decode(half.received), b"")

    def _challenge(self, half: _HalfOpen) -> None:
        half.hello = decode(half.received)
        half.said = bytes(half.received)
        half.nonce = credentials.new_nonce()
        half.received.clear()
        half.sock.send(challenge(half.nonce), SEND_FLAGS)

    def _check_response(self, half: _HalfOpen, hello: Hello) -> None:
        assert self.key is not None
        nonce, given = bytes(half.received[:NONCE_BYTES]), bytes(half.received[NONCE_BYTES:])
        nonces = {"listener_nonce": half.nonce, "dialler_nonce": nonce}
        if not credentials.is_proof(given, credentials.dialler_proof(self.key, half.said, **nonces)):
            self._refuse(half, f"It does not prove that it knows the key of job {hello.job!r}: wrong token.")
            return
        self._admit(half, hello, credentials.listener_proof(self.key, half.said, **nonces))

    def _admit(self, half: _HalfOpen, hello: Hello, proof: bytes) -> None:
        if hello.job != self._job:
            self._refuse(half, f"It is for job {hello.job!r}; this process belongs to job {self._job!r}.")
        elif hello.kind == "exchange":
            self._admit_exchange(half, hello, proof)
        else:
            self._admit_heal(half, hello, proof)

    def _admit_exchange(self, half: _HalfOpen, hello: Hello, proof: bytes) -> None:
        refusal = self._parking.refusal(hello.quorum_id)
        if refusal is not None:
            self._refuse(half, refusal)
            return
        # Answer first: once it is parked, whoever takes it may send frames.
        self._accept_hello(half, proof)
        self._parking.park((hello.quorum_id, hello.group, hello.incarnation), half.sock)

    def _admit_heal(self, half: _HalfOpen, hello: Hello, proof: bytes) -> None:
        if self._on_heal is None:
            self._refuse(half, "This process heals nobody.")
            return
        with self._healing_lock:
            if len(self._healing) >= _MAX_HEALING:
                self._refuse(
                    half, f"This process is healing {_MAX_HEALING} others already; ask another donor."
                )
                return
            self._accept_hello(half, proof)
            self._healing.add(half.sock)
        name = f"jaxft-heal-{hello.group}"
        threading.Thread(target=self._heal, args=(half.sock, hello), name=name, daemon=True).start()

    def _heal(self, sock: socket.socket, hello: Hello) -> None:
        assert self._on_heal is not None
        try:
            self._on_heal(sock, hello)
        except Exception as error:  # one joiner's trouble is not the donor's
            _log.warning("Healing group %r from here broke off: %s", hello.group, error, exc_info=True)
        finally:
            with self._healing_lock:
                self._healing.discard(sock)
            sock.close()

    def _accept_hello(self, half: _HalfOpen, proof: bytes) -> None:
        half.sock.send(accepted(proof), SEND_FLAGS)
        tune(half.sock)
        self._release(half)

    def _refuse(self, half: _HalfOpen, why: str) -> None:
        _strangers_log.warning("Refused a connection from %s: %s", half.name, why)
        with contextlib.suppress(OSError):  # it is gone already
            half.sock.send(refused(why), SEND_FLAGS)
        self._release(half)
        half.sock.close()

    def _drop(self, half: _HalfOpen, why: str) -> None:
        _log.debug("Dropped a connection from %s that said no hello: %s.", half.name, why)
        self._release(half)
        half.sock.close()

    def _release(self, half: _HalfOpen) -> None:
        del self._half_open[half.sock.fileno()]
        self._poller.unregister(half.sock)


def _bind(host: str, port: int) -> socket.socket:
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 is compiled in but switched off
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=_BACKLOG)
