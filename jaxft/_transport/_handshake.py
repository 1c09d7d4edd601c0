"""The handshake of a data-plane connection: a connection request, and the answer to it. See `_listener.py`.

A connection request names both ends, the dialler and the listener. A process refuses a request that is for another
group, or for another incarnation of this group. If the job has a key, the first answer is a challenge, and each side
proves to the other that it knows the key. The proofs, and one key per direction, are derived from the request and
from a nonce of each side (`jaxft_protocol.credentials`). So a proof is useless between any other two ends, and an
attacker who relays the handshake does not get the keys for the frames that follow.
"""

import functools
import math
import os
import select
import socket
import struct
import time
from dataclasses import dataclass

from jaxft_protocol import credentials
from jaxft_protocol.credentials import NONCE_BYTES, PROOF_BYTES, DataKey

from jaxft._base._room import once_there_is_room
from jaxft._errors import ConfigurationError
from jaxft._transport._addresses import Target, in_digits, targets_of
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import (
    SEND_FLAGS,
    Abort,
    backoff_s,
    close_in_children,
    pause,
    tune,
    wait,
)

MAX_NAME_BYTES = 255
MAX_REASON_BYTES = 512

# Of the handshake and of all that follows it. Groups of a job compare theirs when they join.
DATA_PLANE_VERSION = 5
_KINDS = ("exchange", "heal", "rank")
# magic, version, kind, rank, lane, strand, id of the quorum or heal, the dialler's incarnation, the listener's
# incarnation, and the length of each name: the job's, the dialler's and the listener's
_HELLO = struct.Struct("<8sBBHLHQQQBBB")
_HELLO_MAGIC = b"jaxft-hi"
# magic, version, status, length of what follows: a reason, a nonce or a proof
_ANSWER = struct.Struct("<8sBBH")
_ANSWER_MAGIC = b"jaxft-re"
_ACCEPTED, _REFUSED, _CHALLENGE, _BUSY = 0, 1, 2, 3
# The dialler's answer to a challenge: its own nonce, and its proof.
RESPONSE_BYTES = NONCE_BYTES + PROOF_BYTES
# A listener with too many connections in the handshake drops some without an answer, and the dialler dials again at
# once. This does not delay the discovery of a dead process, which refuses the connection. When all groups of a large
# job dial one process in the same moment, it accepts a few hundred per round.
_MAX_REDIALS = 20
# Pauses between attempts while the listener is busy.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class BadRequest(Exception):
    """The bytes received are no connection request, or none that this process understands.

    Attributes:
        answerable: the bytes began like a connection request of jaxft, so the sender understands a refusal.
    """

    def __init__(self, message: str, *, answerable: bool = True) -> None:
        super().__init__(message)
        self.answerable = answerable


@dataclass(frozen=True, slots=True)
class ConnectionRequest:
    """Who dials whom, and for what."""

    kind: str
    job: str
    group: str
    incarnation: int
    to_group: str
    to_incarnation: int
    number: int
    rank: int = 0
    lane: int = 0
    strand: int = 0


class Dialling:
    """A connection during the handshake: connect, send the request, be accepted. For one thread.

    Blocks only for a moment, if there is no descriptor.

    Poll `sock` for `events`, then call `advance`, until it returns a connection. Each call may change both.
    """

    def __init__(
        self,
        address: str,
        request: ConnectionRequest,
        key: DataKey | None = None,
    ) -> None:
        """Start to connect.

        Raises:
            ConnectionError: nothing can be reached there.
            OSError: this process has no descriptor, or no memory, for a connection.
        """
        self._address = address
        self._request = request
        self._key = key
        self._nonces: dict[str, bytes] = {}  # set once the listener has challenged us
        self._all_targets = _targets(address)
        self._targets = list(self._all_targets)
        self._received = bytearray()
        self._redials = 0
        self.events = select.POLLOUT
        self.sock = self._connect(None)

    def advance(self) -> Connection | None:
        """Go as far as possible without blocking; return the connection once it is accepted.

        Raises:
            ConnectionError: the handshake failed; the socket is closed.
        """
        try:
            if self.events == select.POLLOUT:
                self._say_request()
                return None
            return self._read_answer()
        except BlockingIOError:
            return None
        except _Unanswered:
            self.sock.close()
            raise
        except OSError as error:
            self.sock.close()
            if self._redials == _MAX_REDIALS:
                raise ConnectionError(
                    f"{self._address} closed the connection {1 + self._redials} times before it answered: "
                    f"{error.strerror or error}. Another program may be listening there, or too many processes "
                    "connect to it at once: check the address, or try again."
                ) from error
        self._redial()
        return None

    def _redial(self) -> None:
        self._redials += 1
        self._targets = list(self._all_targets)
        self._nonces.clear()
        self._received.clear()
        self.events = select.POLLOUT
        self.sock = self._connect(None)

    def _connect(self, last: OSError | None) -> socket.socket:
        while self._targets:
            family, target = self._targets.pop(0)
            sock = once_there_is_room(functools.partial(socket.socket, family, socket.SOCK_STREAM))
            close_in_children(sock)
            sock.settimeout(0.0)
            try:
                sock.connect(target)
            except BlockingIOError:
                return sock
            except OSError as error:
                sock.close()
                last = error
            else:
                return sock
        why = last.strerror if last is not None else "the name resolves to no address"
        raise _Unanswered(f"Cannot connect to {self._address}: {why}.") from last

    def _say_request(self) -> None:
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code != 0:
            self.sock.close()
            self.sock = self._connect(OSError(code, os.strerror(code)))
            return
        tune(self.sock)
        self.sock.send(encode(self._request), SEND_FLAGS)  # fits into a fresh socket's buffer as a whole
        self.events = select.POLLIN

    def _read_answer(self) -> Connection | None:
        while (missing := _missing_answer_bytes(self._received, self._address)) > 0:
            piece = self.sock.recv(missing, socket.MSG_DONTWAIT)
            if not piece:
                raise ConnectionResetError("the listener closed the connection")
            self._received += piece
        _, _, status, _ = _ANSWER.unpack_from(self._received)
        rest = bytes(self._received[_ANSWER.size :])
        self._received.clear()
        if status == _CHALLENGE:
            self._respond(rest)
            return None
        if status != _ACCEPTED:
            reason = rest.decode(errors="replace")
            kind, group = self._request.kind, self._request.group
            text = f"{self._address} refused the {kind} connection of group {group!r}. {reason}"
            raise Busy(text) if status == _BUSY else _Unanswered(text)
        self._check_listener(rest)
        self.sock.settimeout(None)
        peer = self._request.to_group
        if self._key is None:
            return Connection.plain(self.sock, peer)
        incoming, outgoing = credentials.connection_keys(self._key, encode(self._request), **self._nonces)
        return Connection.sealed(self.sock, outgoing=outgoing, incoming=incoming, peer=peer)

    def _respond(self, nonce: bytes) -> None:
        if self._key is None:
            raise _Unanswered(
                f"{self._address} asks for a proof of the job's key, but group {self._request.group!r} has no key: "
                "start all groups of a job with the same token."
            )
        if self._nonces or len(nonce) != NONCE_BYTES:
            raise _Unanswered(
                f"{self._address} sent an invalid challenge. It may run another version of jaxft: use the same "
                "version in all groups."
            )
        self._nonces = {"listener_nonce": nonce, "dialler_nonce": credentials.new_nonce()}
        ours = credentials.dialler_proof(self._key, encode(self._request), **self._nonces)
        self.sock.send(self._nonces["dialler_nonce"] + ours, SEND_FLAGS)

    def _check_listener(self, proof: bytes) -> None:
        if self._key is None:
            return
        if self._nonces:
            wanted = credentials.listener_proof(self._key, encode(self._request), **self._nonces)
            if credentials.is_proof(proof, wanted):
                return
        raise _Unanswered(
            f"{self._address} did not prove that it knows the key of job {self._request.job!r}: it is not a group of "
            "this job, or was started without the job's token. Start all groups of a job with the same token."
        )


class _Unanswered(ConnectionError):
    """A ConnectionError with a complete message, and that dialling again would not fix."""


class Busy(_Unanswered):
    """The listener is at its limit, and may accept this connection later."""


def dial(
    address: str,
    request: ConnectionRequest,
    *,
    deadline_s: float,
    abort: Abort | None = None,
    key: DataKey | None = None,
) -> Connection:
    """Connect to another process's listener and complete the handshake. Retries while the listener is busy.

    Raises:
        ConnectionError: nothing listens there, or not jaxft, or it refused us, or it does not know the key; the
            message names the reason.
        TimeoutError: the deadline passed.
    """
    for pause_s in backoff_s(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
        try:
            return _dial(address, request, deadline_s=deadline_s, abort=abort, key=key)
        except Busy:
            if time.monotonic() + pause_s >= deadline_s:
                raise
        pause(pause_s, abort=abort)
    raise AssertionError("an endless iterator has ended")


def _dial(
    address: str, request: ConnectionRequest, *, deadline_s: float, abort: Abort | None, key: DataKey | None
) -> Connection:
    dialling = Dialling(address, request, key)
    what = f"{address} to accept a connection for {request.kind}"
    try:
        while True:
            wait(dialling.sock, dialling.events, deadline_s=deadline_s, what=what, abort=abort)
            if (connection := dialling.advance()) is not None:
                return connection
    except BaseException:
        dialling.sock.close()
        raise


def missing_bytes(received: bytes | bytearray) -> int:
    """How many bytes the request still lacks, as far as is known yet; 0 if it is complete. Raises BadRequest."""
    if received[:8] != _HELLO_MAGIC[: len(received)]:
        raise BadRequest(
            f"it begins with {bytes(received[:8])!r}, not with a connection request", answerable=False
        )
    if len(received) > len(_HELLO_MAGIC) and (version := received[len(_HELLO_MAGIC)]) != DATA_PLANE_VERSION:
        raise BadRequest(
            f"it has version {version} of the data plane; this process has version {DATA_PLANE_VERSION}"
        )
    if len(received) < _HELLO.size:
        return _HELLO.size - len(received)
    _, _, kind, _, _, _, _, _, _, *lengths = _HELLO.unpack_from(received)
    if kind >= len(_KINDS):
        raise BadRequest(f"it asks for a connection of unknown kind {kind}")
    return _HELLO.size + sum(lengths) - len(received)


def decode(received: bytes | bytearray) -> ConnectionRequest:
    """Decode a complete request. Raises BadRequest."""
    assert missing_bytes(received) == 0
    _, _, kind, rank, lane, strand, number, incarnation, to_incarnation, *lengths = _HELLO.unpack_from(
        received
    )
    names = bytes(received[_HELLO.size :])
    group_at, to_at = lengths[0], lengths[0] + lengths[1]
    try:
        job, group, to_group = (
            names[:group_at].decode(),
            names[group_at:to_at].decode(),
            names[to_at:].decode(),
        )
    except UnicodeDecodeError as error:
        raise BadRequest(f"a name in it is not UTF-8: {names!r}") from error
    ends = (group, incarnation, to_group, to_incarnation)
    return ConnectionRequest(_KINDS[kind], job, *ends, number, rank, lane, strand)


def accepted(proof: bytes = b"") -> bytes:
    """Encode the answer that accepts a dialler, with the listener's proof if the job has a key."""
    return _answer(_ACCEPTED, proof)


def refused(why: str) -> bytes:
    """Encode the answer that refuses a dialler."""
    return _answer(_REFUSED, why.encode()[:MAX_REASON_BYTES])


def busy(why: str) -> bytes:
    """Encode the answer that asks a dialler to try again later."""
    return _answer(_BUSY, why.encode()[:MAX_REASON_BYTES])


def challenge(nonce: bytes) -> bytes:
    """Encode the answer that asks a dialler to prove that it knows the key."""
    return _answer(_CHALLENGE, nonce)


def _answer(status: int, content: bytes) -> bytes:
    return _ANSWER.pack(_ANSWER_MAGIC, DATA_PLANE_VERSION, status, len(content)) + content


def check_name(name: str, *, what: str) -> bytes:
    """Encode a job's or group's name. Raises ConfigurationError if it is empty or too long."""
    encoded = name.encode()
    if not 0 < len(encoded) <= MAX_NAME_BYTES:
        raise ConfigurationError(
            f"The {what}'s name {name!r} has {len(encoded)} bytes; it must have 1 to {MAX_NAME_BYTES}."
        )
    return encoded


def encode(request: ConnectionRequest) -> bytes:
    """Encode a connection request. Each name goes with its length, so no two requests encode alike."""
    job, group = check_name(request.job, what="job"), check_name(request.group, what="group")
    to_group = check_name(request.to_group, what="group")
    head = _HELLO.pack(
        _HELLO_MAGIC,
        DATA_PLANE_VERSION,
        _KINDS.index(request.kind),
        request.rank,
        request.lane,
        request.strand,
        request.number,
        request.incarnation,
        request.to_incarnation,
        *(len(name) for name in (job, group, to_group)),
    )
    return head + job + group + to_group


def _targets(address: str) -> list[Target]:
    if not in_digits(address):
        raise _Unanswered(
            f"{address!r} names a host, but groups tell each other addresses in digits. It may run another version "
            "of jaxft: use the same version in all groups."
        )
    try:
        return targets_of(address, math.inf)
    except ConnectionError:
        raise  # it is not an address
    except OSError as error:
        raise _Unanswered(f"Cannot connect to {address!r}: {error}.") from error


def _missing_answer_bytes(received: bytearray, address: str) -> int:
    if len(received) < _ANSWER.size:
        return _ANSWER.size - len(received)
    magic, version, _, reason_bytes = _ANSWER.unpack_from(received)
    if magic != _ANSWER_MAGIC or version != DATA_PLANE_VERSION or reason_bytes > MAX_REASON_BYTES:
        raise _Unanswered(
            f"{address} answered our request with {bytes(received[: _ANSWER.size])!r}. Another program, or another "
            "version of jaxft, listens there: check the address and the versions."
        )
    return _ANSWER.size + reason_bytes - len(received)
