"""The data plane's listener: one listening socket per process, with admission control.

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

Limits. Connections without a request for this process (`_MAX_UNKNOWN`) and those with one that still owe a proof
(`_MAX_CHALLENGED`) are counted separately from those that were accepted. Each kind evicts its own: the oldest of the
busiest address. A request for this process names its incarnation, 63 random bits that only the coordinator and the
job's groups know. So a program that just connects, or speaks another protocol, cannot take what peers need, and a
peer that is evicted dials again at once (`_handshake.py`). When the process runs out of file descriptors, connections
without a request go first. The limit on accepted connections leaves room for a job of thousands of groups.

A quorum's connections are kept under (quorum, group, incarnation, lane, strand), because a peer may learn of a quorum
before this process does. `forget` drops those of quorums that are over, and refuses later ones.

Errors. An error caused by a connection ends that connection. An error of the listener itself ends the listener: it is
logged, and `check`, which runs before each step and before a quorum's connections are made, raises it on the training
thread.

Left out: encryption. Frames carry MACs (`_seals.py`) if the job has a key; an attacker on the path can still read
them.
"""

import contextlib
import errno
import functools
import logging
import select
import socket
import threading
import time
from collections.abc import Callable

from jaxft_protocol import credentials
from jaxft_protocol.credentials import NONCE_BYTES, DataKey
from jaxft_protocol.host.admission import RateLimitFilter, allow_all_descriptors, crowded_out

from jaxft._base._room import once_there_is_room, start_thread
from jaxft._errors import JaxftError
from jaxft._transport._half_open import HalfOpen, bind_one_of
from jaxft._transport._handshake import (
    BadRequest,
    ConnectionRequest,
    accepted,
    busy,
    challenge,
    check_name,
    decode,
    dial,
    refused,
)
from jaxft._transport._pending import PendingConnections
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import SEND_FLAGS, Abort, close_in_children, recv_exactly, send_all, tune

__all__ = ["Abort", "Connection", "ConnectionRequest", "Listener", "dial", "recv_exactly", "send_all"]

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
# Each has a thread that serves one joiner. A spare's connection stays open for as long as it follows the job.
_MAX_HEALING = 1024
# Each kind may take at most this fraction (1/n) of the process's file descriptors.
_CHALLENGED_PART, _HEALING_PART, _PENDING_PART = 8, 4, 2
# Accept at most this many connections before reading the open ones again.
_MAX_ACCEPTED_IN_A_ROW = 64
# Out of descriptors, with no unauthenticated connection to drop: try to accept again after this.
_OUT_OF_DESCRIPTORS_PAUSE_S = 0.05
# Descriptors needed besides connections: files of data and checkpoints, devices, other libraries' sockets.
_OWN_DESCRIPTORS = 500
# Ranks of one group. Its hosts have some 8 each.
_MAX_RANKS = 4096


class Listener:
    """Accepts the connections of one job's data plane, from construction until `close`."""

    def __init__(
        self,
        *,
        host: str = "",
        ports: range = range(1),
        job: str,
        group: str,
        incarnation: int,
        on_heal: Callable[[Connection, ConnectionRequest], None] | None,
        key: DataKey | None = None,
        rank: int = 0,
    ) -> None:
        """Listen, and start the thread that accepts. Raises the limit on file descriptors to the hard limit.

        Args:
            host: the address to bind; empty for all.
            ports: the ports to try in turn; 0 for any that is free (see the attribute `port`).
            job: connections for any other job are refused.
            group: connections for any other group are refused.
            incarnation: connections for any other incarnation of the group are refused.
            on_heal: called with each connection for healing, on its own thread. The connection is closed when the
                call returns, and `close` shuts it down during the call. None: such connections are refused.
            key: the key of the job's data plane, which a dialler must prove to know; None: no proof is needed.
            rank: this process's rank in its group; connections for any other are refused.
        """
        check_name(job, what="job")
        check_name(group, what="group")
        self.key = key
        self.rank = rank
        self._job = job
        self._me = (group, incarnation)
        self._on_heal = on_heal
        self._descriptors = allow_all_descriptors()
        self._warned_of_descriptors = False
        self._failure: Exception | None = None
        self._sock = once_there_is_room(functools.partial(bind_one_of, host, ports))
        close_in_children(self._sock)
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self._half_open: dict[int, HalfOpen] = {}  # by descriptor, oldest first
        self._poller = select.poll()
        self._paused_until_s: float | None = None  # set while it does not accept
        self._pending = PendingConnections(self._descriptors // _PENDING_PART)
        self._ranks = PendingConnections(_MAX_RANKS, of="rank")
        self._healing: set[socket.socket] = set()
        self._healing_lock = threading.Lock()
        self._closed = Abort()
        self._thread = start_thread(self._run, name="jaxft-listener")

    def take(
        self,
        *,
        quorum_id: int,
        group: str,
        incarnation: int,
        deadline_s: float,
        abort: Abort | None,
        lane: int = 0,
        strand: int = 0,
    ) -> Connection:
        """Wait for a peer's connection for one strand of the exchange of a quorum, from some lane on, and return it.

        Raises:
            TimeoutError: the deadline passed.
            ConnectionError: the quorum was forgotten, the listener closed, or the abort flag set.
        """
        key = (quorum_id, group, incarnation, lane, strand)
        return self._pending.take(key, deadline_s=deadline_s, abort=abort)

    def take_rank(self, rank: int, number: int = 0, *, deadline_s: float) -> Connection:
        """Wait for the first or second connection of another rank of this group, and return it. For rank 0.

        Raises:
            TimeoutError: the deadline passed.
            ConnectionError: the listener closed.
        """
        return self._ranks.take((rank, *self._me, number, 0), deadline_s=deadline_s, abort=None)

    def forget(self, quorum_id: int) -> None:
        """Close the connections for this quorum and older ones, and refuse later ones."""
        self._pending.forget(quorum_id)

    def check(self, peers: int, strands: int = 1) -> None:
        """Raise the error that ended this listener, if one did; warn if a quorum of this size needs more descriptors.

        Args:
            peers: how many other members of the quorum are connected to this one.
            strands: how many connections there may be to each of them.

        Raises:
            JaxftError: the listener's thread ended with an error.
        """
        if self._failure is not None:
            raise JaxftError(
                f"The listener of group {self._me[0]!r} on port {self.port} failed with {self._failure!r}, so no "
                "other group can reach this one. Restart the group; its log has the traceback."
            ) from self._failure
        # For the current quorum, and for the next one while its connections are made.
        needed = 2 * peers * strands + _OWN_DESCRIPTORS
        if needed > self._descriptors and not self._warned_of_descriptors:
            self._warned_of_descriptors = True
            _log.warning(
                "Connections to %d other groups may need %d file descriptors, but this process may open only %d: "
                "raise the hard limit (`ulimit -Hn`, LimitNOFILE= of systemd), or lower `exchange_threads`.",
                *(peers, needed, self._descriptors),
            )

    def close(self) -> None:
        """Stop listening and close every connection that was not taken. Idempotent."""
        self._closed.set("closed")
        self._thread.join()
        self._sock.close()
        self._pending.close()
        self._ranks.close()
        with self._healing_lock:
            for sock in self._healing:
                with contextlib.suppress(OSError):  # the peer closed it first
                    sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self._poller.register(self._sock, select.POLLIN)
            self._poller.register(self._closed, select.POLLIN)
            while not self._closed.is_set:
                self._turn()
        except Exception as error:
            _log.exception("The listener on port %d failed; no group can reach this one any more.", self.port)
            self._failure = error
            self._sock.close()  # refuse diallers at once
            self._pending.close()  # and wake the threads that wait for a peer
            self._ranks.close()
        finally:
            for half in list(self._half_open.values()):
                self._drop(half, "the listener is closing")

    def _turn(self) -> None:
        now_s = time.monotonic()
        if self._paused_until_s is not None and now_s >= self._paused_until_s:
            self._paused_until_s = None
            self._poller.register(self._sock, select.POLLIN)
        oldest = next(iter(self._half_open.values()), None)
        until_s = [half.deadline_s for half in (oldest,) if half is not None]
        until_s += [] if self._paused_until_s is None else [self._paused_until_s]
        ready = [
            fd for fd, _ in self._poller.poll(1000 * max(0.0, min(until_s) - now_s) if until_s else None)
        ]
        # Read first: a connection whose request is here no longer counts as unknown.
        for fd in ready:
            if (half := self._half_open.get(fd)) is not None:
                self._read(half)
        if self._sock.fileno() in ready:
            self._accept_some()
        now_s = time.monotonic()
        for half in [half for half in self._half_open.values() if half.deadline_s <= now_s]:
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
        _unauthenticated_log.warning("Cannot accept connections on port %d: %s.", self.port, error.strerror)
        unknown = [half for half in self._half_open.values() if not half.owes_proof]
        for half in unknown:
            self._drop(half, "the process is out of descriptors")
        if not unknown:
            self._poller.unregister(self._sock)
            self._paused_until_s = time.monotonic() + _OUT_OF_DESCRIPTORS_PAUSE_S

    def _take_in(self, sock: socket.socket, name: str) -> None:
        # The program may have called `socket.setdefaulttimeout`, for its downloads: Python then waits in each call.
        sock.setblocking(True)
        close_in_children(sock)
        half = HalfOpen(sock, name=name, deadline_s=time.monotonic() + _HELLO_TIMEOUT_S)
        self._half_open[sock.fileno()] = half
        self._poller.register(sock, select.POLLIN)
        self._read(half)  # a peer's request came with the connection, or is about to
        self._crowd_out(owes_proof=False, most=_MAX_UNKNOWN)

    def _crowd_out(self, *, owes_proof: bool, most: int) -> None:
        if len(self._half_open) <= most:
            return
        known = [(fd, half.name) for fd, half in self._half_open.items() if half.owes_proof == owes_proof]
        if len(known) > most:
            for fd in crowded_out(known, most):
                half = self._half_open[fd]
                self._read(half)  # its next bytes may have arrived since
                if self._half_open.get(fd) is half and half.owes_proof == owes_proof:
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
                self._refuse(half, f"The request cannot be read: {error}.")
            else:
                self._drop(half, str(error))
        except Exception:  # an error caused by a connection ends only that connection
            _unauthenticated_log.exception("A connection from %s to port %d failed.", half.name, self.port)
            if half.sock.fileno() in self._half_open:
                self._drop(half, "an unexpected error")

    def _answer(self, half: HalfOpen) -> None:
        if half.request is not None:
            self._check_response(half, half.request)
        elif self.key is not None:
            self._challenge(half)
        else:
            request = decode(half.received)
            self._admit(half, request, b"", Connection.plain(half.sock, request.group))

    def _challenge(self, half: HalfOpen) -> None:
        half.request = decode(half.received)
        half.request_bytes = bytes(half.received)
        half.nonce = credentials.new_nonce()
        half.received.clear()
        half.sock.send(challenge(half.nonce), SEND_FLAGS)
        half.owes_proof = not self._wrong_end(half.request)
        self._crowd_out(owes_proof=True, most=min(_MAX_CHALLENGED, self._descriptors // _CHALLENGED_PART))

    def _check_response(self, half: HalfOpen, request: ConnectionRequest) -> None:
        assert self.key is not None
        nonce, given = bytes(half.received[:NONCE_BYTES]), bytes(half.received[NONCE_BYTES:])
        nonces = {"listener_nonce": half.nonce, "dialler_nonce": nonce}
        if not credentials.is_proof(given, credentials.dialler_proof(self.key, half.request_bytes, **nonces)):
            self._refuse(
                half,
                f"The dialler did not prove that it knows the key of job {request.job!r}: start all groups of a job "
                "with the same token.",
            )
            return
        proof = credentials.listener_proof(self.key, half.request_bytes, **nonces)
        outgoing, incoming = credentials.connection_keys(self.key, half.request_bytes, **nonces)
        sealed = Connection.sealed(half.sock, outgoing=outgoing, incoming=incoming, peer=request.group)
        self._admit(half, request, proof, sealed)

    def _admit(
        self, half: HalfOpen, request: ConnectionRequest, proof: bytes, connection: Connection
    ) -> None:
        if wrong := self._wrong_end(request):
            self._refuse(half, wrong)
        elif request.kind == "exchange":
            self._admit_exchange(half, request, proof, connection)
        elif request.kind == "rank":
            self._accept_request(half, proof)
            self._ranks.add((request.number, request.group, request.incarnation, request.lane, 0), connection)
        else:
            self._admit_heal(half, request, proof, connection)

    def _wrong_end(self, request: ConnectionRequest) -> str:
        """Why a connection request is not for this process; "" if it is for it."""
        if request.job != self._job:
            return f"The request is for job {request.job!r}; this process belongs to job {self._job!r}."
        if (request.to_group, request.to_incarnation) != self._me:
            return (
                f"The request is for incarnation {request.to_incarnation} of group {request.to_group!r}; this "
                f"process is incarnation {self._me[1]} of group {self._me[0]!r}."
            )
        if request.rank != self.rank:
            return (
                f"The request is for rank {request.rank} of group {request.to_group!r}; this process is rank "
                f"{self.rank}."
            )
        if request.kind == "rank" and (request.group, request.incarnation) != self._me:
            return (
                f"Only a rank of group {self._me[0]!r} may ask for orders here, not group {request.group!r}."
            )
        return ""

    def _admit_exchange(
        self, half: HalfOpen, request: ConnectionRequest, proof: bytes, connection: Connection
    ) -> None:
        refusal = self._pending.refusal(request.number)
        if refusal is not None:
            self._refuse(half, refusal)
            return
        # Answer first: once it is pending, another thread may take it and send frames.
        self._accept_request(half, proof)
        key = (request.number, request.group, request.incarnation, request.lane, request.strand)
        self._pending.add(key, connection)

    def _admit_heal(
        self, half: HalfOpen, request: ConnectionRequest, proof: bytes, connection: Connection
    ) -> None:
        if self._on_heal is None:
            self._refuse(half, "This process does not heal other groups.")
            return
        with self._healing_lock:
            most = min(_MAX_HEALING, self._descriptors // _HEALING_PART)
            if len(self._healing) >= most:
                self._send_away(
                    half,
                    busy(f"This process is already healing {most} groups, its limit: ask another donor."),
                )
                return
            self._accept_request(half, proof)
            self._healing.add(half.sock)
        name = f"jaxft-heal-{request.group}"
        try:
            threading.Thread(target=self._heal, args=(connection, request), name=name, daemon=True).start()
        except RuntimeError as error:  # cannot start a thread: the joiner must not wait for one
            _log.warning("Group %r has to ask again to be healed: %s.", request.group, error)
            self._end_healing(connection)

    def _heal(self, connection: Connection, request: ConnectionRequest) -> None:
        assert self._on_heal is not None
        try:
            self._on_heal(connection, request)
        except Exception:  # a failed heal ends that connection, not the donor's training
            _log.exception("Healing group %r failed.", request.group)
        finally:
            self._end_healing(connection)

    def _end_healing(self, connection: Connection) -> None:
        with self._healing_lock:
            self._healing.discard(connection.sock)
        connection.close()

    def _accept_request(self, half: HalfOpen, proof: bytes) -> None:
        half.sock.send(accepted(proof), SEND_FLAGS)
        tune(half.sock)
        self._release(half)

    def _refuse(self, half: HalfOpen, why: str) -> None:
        _unauthenticated_log.warning("Refused a connection from %s: %s", half.name, why)
        self._send_away(half, refused(why))

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
        del self._half_open[half.sock.fileno()]
        self._poller.unregister(half.sock)
