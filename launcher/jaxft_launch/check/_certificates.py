"""What `jaxft doctor` says of certificates: of those in files, and of those that a server really serves."""

import socket
import ssl
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from jaxft_launch.check._findings import Finding, fail, ok, warn

TIMEOUT_S = 5.0
EXPIRES_SOON = timedelta(days=14)


def in_files(paths: Iterable[Path], now: datetime | None = None) -> Iterator[Finding]:
    """Check that certificates can be read and are valid for a while."""
    for path in paths:
        try:
            found = x509.load_pem_x509_certificates(path.read_bytes())
        except (OSError, ValueError) as error:
            yield fail(f"the certificate {path} cannot be read: {error}", "name a file in PEM form")
            continue
        yield _judged(f"the certificate {path}", found, "renew it", now)


def served_by(what: str, host: str, port: int, now: datetime | None = None) -> Finding:
    """Check the certificate that a server shows in its handshake, which may be older than its file.

    Args:
        what: the server, in words.
        host: where it listens.
        port: on which port.
        now: the time to judge by; by default that of this machine.
    """
    try:
        found = served(host, port)
    except OSError as error:
        return fail(
            f"{what} shows no certificate: {error}", "check that it runs, and was started with --tls-cert"
        )
    remedy = "renew it, and restart the coordinator, which reads its certificate only when it starts"
    return _judged(f"the certificate that {what} serves", [found], remedy, now)


def served(host: str, port: int) -> x509.Certificate:
    """Return the certificate that a server shows, trusted or not, expired or not: nothing is sent to it.

    Raises:
        OSError: nothing answers there, or what answers does not speak TLS.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # gRPC's servers end a handshake without it; those of HTTP choose the second.
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection((host, port), TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        shown = secure.getpeercert(binary_form=True)
    if shown is None:
        raise ssl.SSLError("the handshake ended without a certificate")
    return x509.load_der_x509_certificate(shown)


def _judged(name: str, found: Iterable[x509.Certificate], remedy: str, now: datetime | None) -> Finding:
    chain = tuple(found)
    now = now or datetime.now(UTC)
    until = min(each.not_valid_after_utc for each in chain)
    since = max(each.not_valid_before_utc for each in chain)
    if until <= now:
        return fail(f"{name} expired on {until:%Y-%m-%d %H:%M} UTC", remedy)
    if since > now:
        return fail(f"{name} is valid from {since:%Y-%m-%d %H:%M} UTC on", "check this machine's clock")
    if until - now < EXPIRES_SOON:
        return warn(
            f"{name} expires on {until:%Y-%m-%d %H:%M} UTC",
            f"{remedy}, in time: running streams stay, but a group that reconnects after that is refused",
        )
    return ok(f"{name} is valid until {until:%Y-%m-%d}")
