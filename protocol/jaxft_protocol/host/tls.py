"""Certificates, read and checked at startup: gRPC itself would only fail at the first connection."""

import contextlib
import logging
import math
import re
import ssl
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxft_protocol.credentials import CredentialsError

_log = logging.getLogger("jaxft_protocol.host.tls")

EXPIRES_SOON_S = 14 * 24 * 3600.0
# OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which has no name in Python: to read the dates of an expired certificate, too.
_WHATEVER_THE_TIME = 0x200000
# More than a handshake needs.
_ROUNDS = 4
_CERTIFICATE = re.compile(
    rb"-----BEGIN (?:X509 )?CERTIFICATE-----.*?-----END (?:X509 )?CERTIFICATE-----", re.DOTALL
)


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

    One that is not valid now is used all the same, because the clock may be wrong, and the log says so.

    Raises:
        CredentialsError: a file cannot be read or is not valid, or only one of cert and key is given.
    """
    if (cert is None) != (key is None):
        given, missing = ("certificate", "private key") if key is None else ("private key", "certificate")
        raise CredentialsError(f"a TLS {given} was given without its {missing}: give both or neither")
    pem = Pem(
        _read_authorities(ca),
        _read(cert, "the TLS certificate"),
        _read(key, "the TLS private key"),
    )
    if cert is not None and key is not None:
        _check_pair(cert, key)
        if problem := problem_of_dates(cert, key):
            _log.warning("the TLS certificate '%s' %s", cert, problem)
        return replace(pem, until_s=_until_s(cert, key))
    return pem


def problem_of_dates(cert: Path, key: Path, now_s: float | None = None) -> str:
    """Say when a certificate expires or has expired, or from when on it is valid; "" if it is valid for a while.

    Args:
        cert: a certificate; those above it in its chain are not looked at. Of one of a rare kind, nothing is said.
        key: its private key.
        now_s: the time in Unix seconds; by default that of this machine.
    """
    found = _read_back(cert, key)
    if not found:
        return ""
    now_s = time.time() if now_s is None else now_s
    since, until = found["notBefore"], found["notAfter"]
    if ssl.cert_time_to_seconds(since) > now_s:
        return f"is valid from {since} on: the other side refuses it before. Check this machine's clock"
    left_s = ssl.cert_time_to_seconds(until) - now_s
    if left_s <= 0:
        return f"expired on {until}: the other side refuses it. Renew it"
    if left_s < EXPIRES_SOON_S:
        return f"expires on {until}. Renew it in time, and restart this process, which reads it only when it starts"
    return ""


def _until_s(cert: Path, key: Path) -> float:
    found = _read_back(cert, key)
    return ssl.cert_time_to_seconds(found["notAfter"]) if found else math.inf


def _read_back(cert: Path, key: Path) -> dict[str, str]:
    return _shown(cert, key, by_server=True) or _shown(cert, key, by_server=False)


def _shown(cert: Path, key: Path, *, by_server: bool) -> dict[str, str]:
    """Return what one side reads in the other's certificate in a handshake in memory; nothing if it refuses it."""
    try:
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        for each, verifies in ((server, not by_server), (client, by_server)):
            each.load_cert_chain(cert, key)
            each.load_verify_locations(cert)
            each.verify_mode = ssl.CERT_REQUIRED if verifies else ssl.CERT_NONE
            each.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _WHATEVER_THE_TIME
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        at_client = client.wrap_bio(to_client, to_server)
        at_server = server.wrap_bio(to_server, to_client, server_side=True)
        for side in (at_client, at_server) * _ROUNDS:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
        return (at_client if by_server else at_server).getpeercert() or {}  # pyright: ignore[reportReturnType]
    except (OSError, ValueError):  # only what is said of the dates is lost
        return {}


def _read(path: Path | None, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"cannot read {what} {str(path)!r}: {error.strerror}") from error


def _read_authorities(path: Path | None) -> bytes | None:
    """Return the authorities in a file, those that are valid for longest first.

    Of several with one name, such as one that was renewed with its key and its former certificate, gRPC takes the
    first, and refuses all that it has signed if that has expired.
    """
    content = _read(path, "the TLS certificate authority")
    if content is None:
        return None
    found = [section.group() + b"\n" for section in _CERTIFICATE.finditer(content)]
    if not found:
        raise CredentialsError(
            f"{str(path)!r} holds no certificate of an authority in PEM form: it must contain a section that begins "
            "with -----BEGIN CERTIFICATE-----"
        )
    until_s: list[tuple[float, bytes]] = []
    for number, each in enumerate(found, 1):
        try:
            until_s.append((_expires_s(each), each))
        except (ssl.SSLError, ValueError) as error:
            raise CredentialsError(
                f"certificate {number} of {len(found)} in {str(path)!r} cannot be read: take it out, or write the "
                "file again"
            ) from error
    return b"".join(each for _, each in sorted(until_s, reverse=True))


def _expires_s(authority: bytes) -> float:
    """When it expires, in Unix time; 0 for a certificate that is no authority's. Raises ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.decode("ascii"))
    shown = context.get_ca_certs()
    return ssl.cert_time_to_seconds(str(shown[0]["notAfter"])) if shown else 0.0


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
