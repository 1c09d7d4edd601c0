"""How a connection of the data plane begins: a hello, and the answer to it. See `_dataplane.py`.

Where the job has a key, the first answer is a challenge, and each side proves to the other that it knows the key
before it takes the other for one of the job's groups (`jaxft_coordinator.credentials`).
"""

import os
import select
import socket
import struct
from dataclasses import dataclass
from typing import Any

from jaxft_coordinator import credentials
from jaxft_coordinator.credentials import NONCE_BYTES, PROOF_BYTES, DataKey

from jaxft._errors import ConfigurationError
from jaxft._wire import SEND_FLAGS, Abort, split_address, tune, wait

MAX_NAME_BYTES = 255
MAX_REASON_BYTES = 512

_VERSION = 1
_KINDS = ("exchange", "heal")
# magic, version, kind, reserved, quorum, incarnation, bytes of the job's name, bytes of the group's name
_HELLO = struct.Struct("<8sBBHQQBB")
_HELLO_MAGIC = b"jaxft-hi"
# magic, version, status, bytes of what follows: a reason, a nonce or a proof
_ANSWER = struct.Struct("<8sBBH")
_ANSWER_MAGIC = b"jaxft-re"
_ACCEPTED, _REFUSED, _CHALLENGE = 0, 1, 2
# What the dialler answers a challenge with: its own nonce, and its proof.
RESPONSE_BYTES = NONCE_BYTES + PROOF_BYTES


class BadHello(Exception):
    """What was received is no hello, or none that this process understands.

    Attributes:
        answerable: it began like one of ours, so whoever sent it understands a refusal.
    """

    def __init__(self, message: str, *, answerable: bool = True) -> None:
        super().__init__(message)
        self.answerable = answerable


@dataclass(frozen=True, slots=True)
class Hello:
    """Who dials, and what for. `kind` is "exchange" or "heal"; a heal belongs to no quorum (0)."""

    kind: str
    job: str
    group: str
    incarnation: int
    quorum_id: int


class Dialling:
    """A connection on its way: connect, say hello, be accepted. Never blocks; for one thread.

    Poll `sock` for `events`, then call `advance`, until that returns True. Both may change with each call.
    """

    def __init__(self, address: str, hello: Hello, key: DataKey | None = None) -> None:
        """Begin to connect. Raises ConnectionError. Resolving a host name is the one thing that blocks.

        With a key, only a listener that has proved that it knows the key as well counts as one that has accepted.
        """
        self._address = address
        self._hello = hello
        self._key = key
        self._proof = b""  # what the listener must accept with, once it has been answered
        self._targets = _resolve(address)
        self._received = bytearray()
        self.events = select.POLLOUT
        self.sock = self._connect(None)

    def advance(self) -> bool:
        """Go as far as it gets; True once accepted. Raises ConnectionError, with the socket closed."""
        try:
            if self.events == select.POLLOUT:
                return self._say_hello()
            return self._read_answer()
        except BlockingIOError:
            return False
        except OSError as error:
            self.sock.close()
            if isinstance(error, _Unanswered):
                raise
            raise ConnectionError(
                f"{self._address} broke the connection: {error.strerror or error}."
            ) from error

    def _connect(self, last: OSError | None) -> socket.socket:
        while self._targets:
            family, target = self._targets.pop(0)
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                sock.connect(target)
            except BlockingIOError:
                return sock
            except OSError as error:
                sock.close()
                last = error
            else:
                return sock
        why = last.strerror if last is not None else "it has no address"
        raise _Unanswered(f"Could not connect to {self._address}: {why}.") from last

    def _say_hello(self) -> bool:
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code != 0:
            self.sock.close()
            self.sock = self._connect(OSError(code, os.strerror(code)))
            return False
        tune(self.sock)
        self.sock.send(_encode(self._hello), SEND_FLAGS)  # a fresh socket takes some hundred bytes whole
        self.events = select.POLLIN
        return False

    def _read_answer(self) -> bool:
        while (missing := _missing_answer_bytes(self._received, self._address)) > 0:
            piece = self.sock.recv(missing, socket.MSG_DONTWAIT)
            if not piece:
                raise _Unanswered(f"{self._address} closed the connection without an answer to our hello.")
            self._received += piece
        _, _, status, _ = _ANSWER.unpack_from(self._received)
        said = bytes(self._received[_ANSWER.size :])
        self._received.clear()
        if status == _CHALLENGE:
            self._respond(said)
            return False
        if status != _ACCEPTED:
            reason = said.decode(errors="replace")
            kind, group = self._hello.kind, self._hello.group
            raise _Unanswered(f"{self._address} refused the {kind} connection of group {group!r}. {reason}")
        self._check_listener(said)
        self.sock.setblocking(True)
        return True

    def _respond(self, nonce: bytes) -> None:
        if self._key is None:
            raise _Unanswered(
                f"{self._address} asks for a proof of the job's key, and group {self._hello.group!r} has none: start "
                "all groups of a job with the same token."
            )
        if self._proof or len(nonce) != NONCE_BYTES:
            raise _Unanswered(
                f"{self._address} sent a challenge that makes no sense: another version of jaxft?"
            )
        nonces = {"listener_nonce": nonce, "dialler_nonce": credentials.new_nonce()}
        hello = _encode(self._hello)
        self._proof = credentials.listener_proof(self._key, hello, **nonces)
        ours = credentials.dialler_proof(self._key, hello, **nonces)
        self.sock.send(nonces["dialler_nonce"] + ours, SEND_FLAGS)

    def _check_listener(self, proof: bytes) -> None:
        if self._key is not None and not (self._proof and credentials.is_proof(proof, self._proof)):
            raise _Unanswered(
                f"{self._address} does not prove that it knows the key of job {self._hello.job!r}: it is no group of "
                "this job, or was started without the job's token."
            )


class _Unanswered(ConnectionError):
    """A ConnectionError whose text is complete."""


def dial(
    address: str,
    hello: Hello,
    *,
    deadline_s: float,
    abort: Abort | None = None,
    key: DataKey | None = None,
) -> socket.socket:
    """Connect to another process's listener and be accepted. Tries once.

    Args:
        address: "host:port" or "[v6 address]:port".
        hello: who we are, and what for.
        deadline_s: when to give up, on the clock of `time.monotonic()`. Resolving a name is not covered.
        abort: a flag that ends the wait.
        key: the key of the job's data plane, if it has one; the listener must know it too.

    Raises:
        ConnectionError: nobody listens there, or no jaxft process, or it refused us, or does not know the key; the
            text says which.
        TimeoutError: the deadline passed.
    """
    dialling = Dialling(address, hello, key)
    what = f"{address} to accept a connection for {hello.kind}"
    try:
        while True:
            wait(dialling.sock, dialling.events, deadline_s=deadline_s, what=what, abort=abort)
            if dialling.advance():
                return dialling.sock
    except BaseException:
        dialling.sock.close()
        raise


def missing_bytes(received: bytes | bytearray) -> int:
    """How many bytes a hello lacks, as far as is known; 0 if it is whole. Raises BadHello."""
    if received[:8] != _HELLO_MAGIC[: len(received)]:
        raise BadHello(f"it began with {bytes(received[:8])!r}", answerable=False)
    if len(received) < _HELLO.size:
        return _HELLO.size - len(received)
    _, version, kind, _, _, _, job_bytes, group_bytes = _HELLO.unpack_from(received)
    if version != _VERSION:
        raise BadHello(f"it speaks version {version} of the data plane, this process version {_VERSION}")
    if kind >= len(_KINDS):
        raise BadHello(f"it wants a connection of the unknown kind {kind}")
    return _HELLO.size + job_bytes + group_bytes - len(received)


def decode(received: bytes | bytearray) -> Hello:
    """Decode a whole hello. Raises BadHello."""
    assert missing_bytes(received) == 0
    _, _, kind, _, quorum_id, incarnation, job_bytes, _ = _HELLO.unpack_from(received)
    names = bytes(received[_HELLO.size :])
    try:
        job, group = names[:job_bytes].decode(), names[job_bytes:].decode()
    except UnicodeDecodeError as error:
        raise BadHello(f"a name in it is not UTF-8: {names!r}") from error
    return Hello(kind=_KINDS[kind], job=job, group=group, incarnation=incarnation, quorum_id=quorum_id)


def accepted(proof: bytes = b"") -> bytes:
    """Encode the answer that lets a dialler in; with the listener's proof where it had to prove itself."""
    return _answer(_ACCEPTED, proof)


def refused(why: str) -> bytes:
    """Encode the answer that turns a dialler away."""
    return _answer(_REFUSED, why.encode()[:MAX_REASON_BYTES])


def challenge(nonce: bytes) -> bytes:
    """Encode the answer that asks a dialler to prove itself."""
    return _answer(_CHALLENGE, nonce)


def _answer(status: int, said: bytes) -> bytes:
    return _ANSWER.pack(_ANSWER_MAGIC, _VERSION, status, len(said)) + said


def check_name(name: str, *, what: str) -> bytes:
    """Encode a job's or group's name. Raises ConfigurationError if it does not fit into a hello."""
    encoded = name.encode()
    if not 0 < len(encoded) <= MAX_NAME_BYTES:
        raise ConfigurationError(
            f"The {what}'s name {name!r} has {len(encoded)} bytes; it must have 1 to {MAX_NAME_BYTES}."
        )
    return encoded


def _encode(hello: Hello) -> bytes:
    job, group = check_name(hello.job, what="job"), check_name(hello.group, what="group")
    kind = _KINDS.index(hello.kind)
    lengths = len(job), len(group)
    head = _HELLO.pack(_HELLO_MAGIC, _VERSION, kind, 0, hello.quorum_id, hello.incarnation, *lengths)
    return head + job + group


def _resolve(address: str) -> list[tuple[int, tuple[Any, ...]]]:
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _Unanswered(f"The host of {address} is unknown: {error.strerror}.") from error
    return [(family, target) for family, _, _, _, target in found]


def _missing_answer_bytes(received: bytearray, address: str) -> int:
    if len(received) < _ANSWER.size:
        return _ANSWER.size - len(received)
    magic, version, _, reason_bytes = _ANSWER.unpack_from(received)
    if magic != _ANSWER_MAGIC or version != _VERSION or reason_bytes > MAX_REASON_BYTES:
        raise _Unanswered(
            f"{address} answered our hello with {bytes(received[: _ANSWER.size])!r}: another program, or "
            "another version of jaxft, listens there."
        )
    return _ANSWER.size + reason_bytes - len(received)
