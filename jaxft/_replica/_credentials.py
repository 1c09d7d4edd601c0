"""What a group shows the coordinator, and asks of it: the job's key, and certificates."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from jaxft_protocol import credentials, wire
from jaxft_protocol import messages as m
from jaxft_protocol.credentials import CredentialsError, DataKey, JobKey
from jaxft_protocol.proto import coordinator_pb2 as pb
from jaxft_protocol.seals import Broken, Said, Seal
from jaxft_protocol.tls import Pem, read_pem

from jaxft._errors import ConfigurationError

TOKEN_VARIABLE = "JAXFT_TOKEN"


@dataclass(frozen=True, slots=True)
class TLS:
    """Certificates for the stream to the coordinator, as files in PEM form. See docs/security.md.

    Args:
        ca: whose certificates to believe; by default those of the public authorities that gRPC knows.
        cert: this group's own certificate, where the coordinator asks for one.
        key: the private key of `cert`.
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None


class Unproven(Exception):
    """The coordinator has not proved that it knows the job's key. The text says so, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a group's session needs for every stream; with nothing set, for a coordinator that asks for nothing."""

    key: JobKey | None = field(default=None, repr=False)  # a traceback or a log must not show it
    pem: Pem | None = None

    @staticmethod
    def read(token: str | None, tls: TLS | None) -> "Credentials":
        """Take the token, or else that of the environment, and read the certificates.

        Raises:
            ConfigurationError: one of them cannot be used; nothing has been opened yet.
        """
        source = "token" if token is not None else f"the environment variable {TOKEN_VARIABLE}"
        # An empty variable is how a shell says that there is none; an empty argument is a mistake.
        text = (os.environ.get(TOKEN_VARIABLE) or None) if token is None else token
        try:
            key = None if text is None else credentials.key_from_text(text)
        except CredentialsError as error:
            raise ConfigurationError(f"{source} cannot be used: {error}") from error
        if tls is None:
            return Credentials(key)
        ca, cert, private = (None if path is None else Path(path) for path in (tls.ca, tls.cert, tls.key))
        try:
            return Credentials(key, read_pem(ca=ca, cert=cert, key=private))
        except CredentialsError as error:
            raise ConfigurationError(f"tls cannot be used: {error}") from error

    @property
    def data_key(self) -> DataKey | None:
        """The key for connections to the job's other groups."""
        return None if self.key is None else credentials.data_key(self.key)

    def channel(self, address: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        if self.pem is None:
            return grpc.aio.insecure_channel(address, options=options)
        proven = grpc.ssl_channel_credentials(self.pem.ca, self.pem.key, self.pem.cert)
        return grpc.aio.secure_channel(address, proven, options=options)

    def explained(self, why: str) -> str:
        """What gRPC says of a stream that never began, with what it may mean where that is TLS."""
        for sign, pem_needed, meaning in (
            ("WRONG_VERSION_NUMBER", True, "it does not speak TLS: was it started with --tls-cert?"),
            (
                "CERTIFICATE_VERIFY_FAILED",
                True,
                "its certificate is of no authority in `tls.ca`, or out of date",
            ),
            ("Hostname Verification", True, "its certificate is for another host than the address names"),
            ("Socket closed", False, "does it ask for TLS? Then pass `tls=`"),
            ("Socket closed", True, "does it ask for a certificate, and trust the authority of `tls.cert`?"),
        ):
            if sign in why and pem_needed == (self.pem is not None):
                return f"{why}; {meaning}"
        return why


class Greeting:
    """One stream, as bytes: the coordinator's challenge, our proof in Hello, and then a MAC on every message.

    The MAC of its first message, a Welcome, proves that the coordinator knows the key. Without a key nothing is
    proved, and nothing asked for.

    Args:
        key: the job's key.
        known: this coordinator's word has been proved before, on an earlier stream. Then a refusal without a proof
            is an impostor's, or that of a coordinator that has lost its secret, and no reason to end training.
    """

    def __init__(self, key: JobKey | None, *, known: bool) -> None:
        self._key = key
        self._known = known
        self._challenge = b""
        self._carried: m.NewQuorum | None = None  # the last quorum: the next is told as the difference to it
        self._seals: tuple[Seal, Seal] | None = None  # for what the coordinator says, and for what we say
        self.begun = False
        self.proved = False

    def challenged(self, received: bytes) -> None:
        """Take the stream's first message. Raises Unproven if it is no challenge."""
        nonce = wire.coordinator_message(received).challenge.nonce
        if len(nonce) != credentials.NONCE_BYTES:
            raise Unproven("it does not begin with a challenge: no coordinator, or one of another version")
        self._challenge = nonce
        self.begun = True

    def encode(self, message: m.GroupMessage) -> bytes:
        """Put a message into bytes: a Hello with the proof, any other with its MAC."""
        encoded = wire.group_to_proto(message)
        if self._key is not None and isinstance(message, m.Hello):
            nonces = {"coordinator_nonce": self._challenge, "group_nonce": credentials.new_nonce()}
            encoded.hello.nonce = nonces["group_nonce"]
            encoded.hello.proof = credentials.group_proof(self._key, message, **nonces)
            to_group, to_coordinator = credentials.stream_keys(self._key, message, **nonces)
            self._seals = Seal(to_group), Seal(to_coordinator)
            return encoded.SerializeToString()
        said = Said(encoded)
        return said.data if self._seals is None else self._seals[1].close(said)

    def decode(self, received: bytes) -> m.CoordinatorMessage:
        """Read the coordinator's next message. Raises Unproven if it may come from another, and WireError."""
        message = self._decoded(received)
        self._carried = wire.quorum_of(message) or self._carried
        return message

    def _decoded(self, received: bytes) -> m.CoordinatorMessage:
        if self._key is None:
            return wire.coordinator_from_proto(wire.coordinator_message(received), self._carried)
        if self._seals is None:  # we have not said Hello yet, so nobody can have proved anything
            return self._unproved(wire.coordinator_message(received))
        try:
            data = self._seals[0].open(received)
        except Broken as error:
            if self.proved:
                raise Unproven(str(error)) from error
            return self._unproved(wire.coordinator_message(received))
        self.proved = True
        return wire.coordinator_from_proto(wire.coordinator_message(data), self._carried)

    def _unproved(self, message: pb.CoordinatorMessage) -> m.CoordinatorMessage:
        """A first message without the right MAC: only a refusal at the start is taken."""
        match message.WhichOneof("kind"):
            case "welcome":
                raise Unproven(
                    "it does not prove that it knows the job's key: it is another coordinator, or was started "
                    "without its token file, or with another one"
                )
            case "refused" if not self._known:
                # All that it can bring about is that this group does not start.
                return wire.coordinator_from_proto(message)
            case "refused":
                raise Unproven(
                    f"it refuses this group, without a proof of the job's key: {message.refused.reason}"
                )
            case kind:
                raise Unproven(f"its first message is {kind!r}, without a proof of the job's key")
