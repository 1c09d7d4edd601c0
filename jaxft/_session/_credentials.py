"""How a group and the coordinator authenticate each other: the job's key, and certificates."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from jaxft_protocol import credentials, wire
from jaxft_protocol import messages as m
from jaxft_protocol.credentials import CredentialsError, DataKey, JobKey
from jaxft_protocol.host.tls import Pem, read_pem
from jaxft_protocol.proto import coordinator_pb2 as pb
from jaxft_protocol.seals import Body, Broken, Seal

from jaxft._errors import ConfigurationError

TOKEN_VARIABLE = "JAXFT_TOKEN"
CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE = "JAXFT_TLS_CA", "JAXFT_TLS_CERT", "JAXFT_TLS_KEY"


@dataclass(frozen=True, slots=True)
class TLS:
    """Certificates for the stream to the coordinator, as files in PEM form. See docs/security.md.

    Args:
        ca: the authority to trust; by default the public authorities that gRPC knows.
        cert: this group's own certificate, if the coordinator asks for one.
        key: the private key of `cert`.
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None


class Unproven(Exception):
    """The coordinator has not proved that it knows the job's key. The message completes a log line."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials for every stream of a group's session; empty if the coordinator needs none."""

    key: JobKey | None = field(default=None, repr=False)  # must not appear in tracebacks and logs
    pem: Pem | None = None

    @staticmethod
    def read(token: str | None, tls: TLS | None) -> "Credentials":
        """Take the token, and read the certificates; by default from the environment.

        Raises:
            ConfigurationError: the token or a certificate is not usable. Nothing has been opened yet.
        """
        source = "token" if token is not None else f"the environment variable {TOKEN_VARIABLE}"
        # In a shell, an empty variable means that there is none. An empty argument is a mistake.
        text = (os.environ.get(TOKEN_VARIABLE) or None) if token is None else token
        try:
            key = None if text is None else credentials.key_from_text(text)
        except CredentialsError as error:
            raise ConfigurationError(f"{source} cannot be used: {error}") from error
        source = "tls"
        if tls is None:
            tls, source = _tls_of_environment()
        if tls is None:
            return Credentials(key)
        ca, cert, private = (None if path is None else Path(path) for path in (tls.ca, tls.cert, tls.key))
        try:
            return Credentials(key, read_pem(ca=ca, cert=cert, key=private))
        except CredentialsError as error:
            raise ConfigurationError(f"{source} cannot be used: {error}") from error

    @property
    def data_key(self) -> DataKey | None:
        """The key for connections to other groups of the job."""
        return None if self.key is None else credentials.data_key(self.key)

    def channel(self, target: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        if self.pem is None:
            return grpc.aio.insecure_channel(target, options=options)
        proven = grpc.ssl_channel_credentials(self.pem.ca, self.pem.key, self.pem.cert)
        return grpc.aio.secure_channel(target, proven, options=options)

    def explained(self, why: str) -> str:
        """gRPC's error for a stream that never started, with a hint if TLS may be the cause."""
        if "Socket closed" in why and self.pem is not None and self.pem.until_s < time.time():
            until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.pem.until_s))
            return f"{why}; the certificate of this group expired on {until}: renew `tls.cert`, and restart the group"
        for sign, pem_needed, meaning in (
            ("WRONG_VERSION_NUMBER", True, "it does not speak TLS: was it started with --tls-cert?"),
            ("certificate is not yet valid", True, "or this machine's clock is behind"),
            (
                "certificate has expired",
                True,
                "renew it, and restart the coordinator, or set this machine's clock, if that is ahead. Or an "
                "authority in `tls.ca` has expired",
            ),
            (
                "unsupported certificate purpose",
                True,
                "its certificate is for clients only (its extended key usage)",
            ),
            ("CERTIFICATE_VERIFY_FAILED", True, "its certificate is not from an authority in `tls.ca`"),
            ("Hostname Verification", True, "its certificate is for another host name than the address"),
            ("Socket closed", False, f"does it ask for TLS? Then pass `tls=`, or set {CA_VARIABLE}"),
            ("Socket closed", True, "does it ask for a certificate, and trust the authority of `tls.cert`?"),
        ):
            if sign in why and pem_needed == (self.pem is not None):
                return f"{why}; {meaning}"
        return why


def _tls_of_environment() -> tuple[TLS | None, str]:
    """The certificates that the environment names, None if there are none; and which variables do, for an error."""
    found = [os.environ.get(name) or None for name in (CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE)]
    named = zip((CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE), found, strict=True)
    given = " ".join(f"{name}={path}" for name, path in named if path is not None)
    return (TLS(*found) if given else None), f"TLS of the environment ({given})"


class Greeting:
    """Encodes one stream: the coordinator's challenge, our proof in Hello, and then a MAC on every message.

    The MAC of its first message, a Welcome, proves that the coordinator knows the key. Without a key there are no
    proofs.

    Args:
        key: the job's key.
        known: a coordinator has proved on an earlier stream that it knows the key. Then a refusal without a proof
            comes from an impostor, or a coordinator that lost its secret, and does not end training.
    """

    def __init__(self, key: JobKey | None, *, known: bool) -> None:
        self._key = key
        self._known = known
        self._challenge = b""
        self._carried: m.NewQuorum | None = (
            None  # the last quorum: the next one is sent as a difference to it
        )
        self._seals: tuple[Seal, Seal] | None = None  # for received and for sent messages
        self.begun = False
        self.proved = False

    def challenged(self, received: bytes) -> None:
        """Read the stream's first message. Raises Unproven if it is not a challenge."""
        nonce = wire.coordinator_message(received).challenge.nonce
        if len(nonce) != credentials.NONCE_BYTES:
            raise Unproven(
                "it did not send a challenge, so it is no jaxft coordinator, or has another version"
            )
        self._challenge = nonce
        self.begun = True

    def encode(self, message: m.GroupMessage | m.Sample) -> bytes:
        """Encode a message: a Hello with the proof, any other with its MAC."""
        encoded = wire.group_to_proto(message)
        if self._key is not None and isinstance(message, m.Hello):
            nonces = {"coordinator_nonce": self._challenge, "group_nonce": credentials.new_nonce()}
            encoded.hello.nonce = nonces["group_nonce"]
            encoded.hello.proof = credentials.group_proof(self._key, message, **nonces)
            to_group, to_coordinator = credentials.stream_keys(self._key, message, **nonces)
            self._seals = Seal(to_group), Seal(to_coordinator)
            return encoded.SerializeToString()
        body = Body(encoded)
        return body.data if self._seals is None else self._seals[1].close(body)

    def decode(self, received: bytes) -> m.CoordinatorMessage:
        """Decode the coordinator's next message. Raises Unproven if its origin is not proved, and WireError."""
        message = self._decoded(received)
        self._carried = wire.quorum_of(message) or self._carried
        return message

    def _decoded(self, received: bytes) -> m.CoordinatorMessage:
        if self._key is None:
            return wire.coordinator_from_proto(wire.coordinator_message(received), self._carried)
        if self._seals is None:  # before our Hello, there can be no proof
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
        """A first message without a valid MAC: only accept a refusal, and only at the start."""
        match message.WhichOneof("kind"):
            case "welcome":
                raise Unproven(
                    "it does not prove that it knows the job's key: it is another coordinator, or was started "
                    "without its token file, or with another one"
                )
            case "refused" if not self._known:
                # The worst that it can do is to keep this group from starting.
                return wire.coordinator_from_proto(message)
            case "refused":
                raise Unproven(
                    f"it refuses this group, without a proof of the job's key: {message.refused.reason}"
                )
            case kind:
                raise Unproven(f"its first message is {kind!r}, without a proof of the job's key")
