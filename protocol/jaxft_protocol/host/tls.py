"""Certificates, read and checked at startup: gRPC itself would only fail at the first connection."""

import logging
import math
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jaxft_protocol.credentials import CredentialsError

if TYPE_CHECKING:
    from cryptography import x509

_log = logging.getLogger("jaxft_protocol.host.tls")

EXPIRES_SOON_S = 14 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Pem:
    """The contents of certificate files; None for a file that was not given.

    Attributes:
        ca: the authorities to trust.
        cert: our certificate, with any intermediate authorities.
        key: the private key of `cert`.
        until_s: when `cert` expires, in Unix time, as far as is known.
    """

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)  # a traceback or a log must not show it
    until_s: float = math.inf


def read_pem(*, ca: Path | None, cert: Path | None, key: Path | None) -> Pem:
    """Read certificates in PEM, and check that the private key belongs to its certificate.

    A certificate that is not valid now is used all the same, with a warning, because the clock may be wrong.

    Raises:
        CredentialsError: a file cannot be read or is not valid, or cert or key is given alone.
    """
    if (cert is None) != (key is None):
        given, missing = ("certificate", "private key") if key is None else ("private key", "certificate")
        raise CredentialsError(f"a TLS {given} was given without its {missing}: give both or neither")
    from cryptography import x509  # only here: it takes as long to import as all of this package

    content = _read(cert, "the TLS certificate")
    private = _read(key, "the TLS private key")
    until_s = math.inf
    if cert is not None and key is not None:
        assert content is not None
        _check_pair(cert, key)
        ours = x509.load_pem_x509_certificates(content)[0]  # those above it in its chain are not looked at
        until_s = ours.not_valid_after_utc.timestamp()
        if problem := problem_of_dates(ours, time.time()):
            _log.warning("the TLS certificate '%s' %s", cert, problem)
    return Pem(_read_authorities(ca), content, private, until_s)


def problem_of_dates(cert: "x509.Certificate", now_s: float) -> str:
    """Say when a certificate expires or has expired, or from when on it is valid; "" if it is valid for a while."""
    since, until = cert.not_valid_before_utc, cert.not_valid_after_utc
    if since.timestamp() > now_s:
        return f"is valid from {since} on: the other side refuses it before. Check this machine's clock"
    left_s = until.timestamp() - now_s
    if left_s <= 0:
        return f"expired on {until}: the other side refuses it. Renew it"
    if left_s < EXPIRES_SOON_S:
        return f"expires on {until}. Renew it in time, and restart this process, which reads it only when it starts"
    return ""


def _read(path: Path | None, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"cannot read {what} {str(path)!r}: {error.strerror}") from error


def _read_authorities(path: Path | None) -> bytes | None:
    """Return the authorities in a file, the authority that is valid for longest first.

    Of several with one name, such as an authority that was renewed with its key and its former certificate, gRPC
    takes the first, and refuses all that it has signed if that has expired.
    """
    content = _read(path, "the TLS certificate authority")
    if content is None:
        return None
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        found = x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise CredentialsError(
            f"{str(path)!r} holds no certificates of authorities in PEM form ({error}): write the file again"
        ) from error
    found.sort(key=lambda each: each.not_valid_after_utc, reverse=True)
    return b"".join(each.public_bytes(Encoding.PEM) for each in found)


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
