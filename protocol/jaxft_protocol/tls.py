"""Certificates, read and checked at startup: gRPC itself would only fail at the first connection."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from jaxft_protocol.credentials import CredentialsError


@dataclass(frozen=True, slots=True)
class Pem:
    """The contents of certificate files; None for a file that was not given.

    Attributes:
        ca: the authorities to trust.
        cert: our certificate, with any intermediate authorities.
        key: the private key of `cert`.
    """

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)  # a traceback or a log must not show it


def read_pem(*, ca: Path | None, cert: Path | None, key: Path | None) -> Pem:
    """Read certificates in PEM, and check that the private key belongs to its certificate.

    Raises:
        CredentialsError: a file cannot be read or is not valid, or only one of cert and key is given.
    """
    if (cert is None) != (key is None):
        given, missing = ("certificate", "private key") if key is None else ("private key", "certificate")
        raise CredentialsError(f"a TLS {given} was given without its {missing}: give both or neither")
    pem = Pem(
        _read(ca, "the TLS certificate authority"),
        _read(cert, "the TLS certificate"),
        _read(key, "the TLS private key"),
    )
    if ca is not None:
        _check_authority(ca)
    if cert is not None and key is not None:
        _check_pair(cert, key)
    return pem


def _read(path: Path | None, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"cannot read {what} {str(path)!r}: {error.strerror}") from error


def _check_authority(ca: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
    except (ssl.SSLError, OSError) as error:
        raise CredentialsError(
            f"{str(ca)!r} holds no certificate of an authority in PEM form ({_why(error)}): it must contain a "
            "section that begins with -----BEGIN CERTIFICATE-----"
        ) from error


def _check_pair(cert: Path, key: Path) -> None:
    def no_password() -> str:
        raise CredentialsError(
            f"the TLS private key {str(key)!r} is encrypted, and its password cannot be entered here: use a key "
            "without a password, in a file that only its owner can read"
        )

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password=no_password)
    except (ssl.SSLError, OSError) as error:
        raise CredentialsError(
            f"the TLS certificate {str(cert)!r} and the private key {str(key)!r} do not make a pair "
            f"({_why(error)}): both must be in PEM form, and the key must belong to the certificate"
        ) from error


def _why(error: OSError) -> str:
    reason = getattr(error, "reason", None) or error.strerror
    return str(reason or error).lower().replace("_", " ")
