"""A certificate whose dates do not fit is named when it is read: its clients would only say that they refuse it."""

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from jaxft_protocol.credentials import CredentialsError
from jaxft_protocol.host import tls

import jaxft
from jaxft._session._credentials import Credentials
from tests.security.groups import serving_beside

DAY_S = 24 * 3600.0


def issued(folder: Path, since: int, until: int) -> tuple[Path, Path]:
    """A certificate that is valid between two days from now, and its key."""
    now = datetime.now(UTC)
    made = (
        trustme.CA()
        .create_child_ca()
        .issue_cert(
            "localhost", not_before=now + timedelta(days=since), not_after=now + timedelta(days=until)
        )
    )
    cert, private = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(b"".join(each.bytes() for each in made.cert_chain_pems))
    made.private_key_pem.write_to_path(str(private))
    return cert, private


@pytest.mark.parametrize(
    ("since", "until", "sent"),
    [
        (-1, 30, ""),
        (-1, 13, "expires on .* in time, and restart this process"),
        (-9, -1, "expired on .*: the other side refuses it"),
        (1, 30, "is valid from .* on: the other side refuses it before. Check this machine's clock"),
    ],
)
def test_dates_that_do_not_fit_are_in_the_log_when_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, since: int, until: int, sent: str
) -> None:
    cert, private = issued(tmp_path, since, until)
    with caplog.at_level(logging.WARNING):
        assert tls.read_pem(ca=None, cert=cert, key=private).cert == cert.read_bytes()
    if not sent:
        assert not caplog.messages
        return
    (message,) = caplog.messages
    assert message.startswith(f"the TLS certificate '{cert}' ")
    assert re.search(sent, message), message


def test_it_is_judged_by_the_time_that_is_given(tmp_path: Path) -> None:
    cert, _ = issued(tmp_path, -1, 30)
    now_s = datetime.now(UTC).timestamp()
    found, *_ = x509.load_pem_x509_certificates(cert.read_bytes())
    sent = [tls.problem_of_dates(found, now_s + days * DAY_S) for days in (-2, 0, 20, 31)]
    assert [text.split(" ")[0] for text in sent] == ["is", "", "expires", "expired"]


def renewed_authority() -> tuple[list[bytes], bytes, bytes]:
    """An authority that has expired, the same renewed with its key, and a certificate for localhost with its key."""
    now, name = datetime.now(UTC), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
    signs, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM

    def made(days: tuple[int, int], of: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> bytes:
        since, until = (now + timedelta(days=each) for each in days)
        subject = name if is_authority else x509.Name([])
        to_come = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(name).public_key(of.public_key())
        )
        to_come = to_come.serial_number(x509.random_serial_number())
        to_come = to_come.not_valid_before(since).not_valid_after(until)
        to_come = to_come.add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
        return to_come.add_extension(names, critical=True).sign(signs, hashes.SHA256()).public_bytes(pem)

    authorities = [made(days, signs, is_authority=True) for days in ((-400, -1), (-10, 300))]
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return authorities, made((-1, 30), key, is_authority=False), private


@pytest.mark.parametrize("order", [1, -1])
def test_an_authority_that_was_renewed_may_stay_in_the_file_beside_the_new_one(
    tmp_path: Path, order: int
) -> None:
    """Of several with one name, gRPC takes the first, and refuses all if that has expired."""
    authorities, cert, key = renewed_authority()
    ca = tmp_path / "ca.pem"
    ca.write_bytes(b"# old and new\n" + b"the next one\n".join(authorities[::order]))
    for name, content in (("cert", cert), ("key", key)):
        (tmp_path / name).write_bytes(content)
    server_side = tls.read_pem(ca=ca, cert=tmp_path / "cert", key=tmp_path / "key")
    with serving_beside(tls=server_side) as port:
        files = jaxft.TLS(ca=ca, cert=tmp_path / "cert", key=tmp_path / "key")
        with jaxft.Manager(f"localhost:{port}", group="a", network=jaxft.Network(tls=files)):
            pass


def test_a_broken_certificate_among_good_ones_is_an_error(tmp_path: Path) -> None:
    broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    ca = tmp_path / "ca.pem"
    ca.write_bytes(trustme.CA().cert_pem.bytes() + broken)
    with pytest.raises(CredentialsError, match=r"ca.pem' holds no certificates of authorities in PEM form"):
        tls.read_pem(ca=ca, cert=None, key=None)


@pytest.mark.parametrize(
    ("since", "until", "trusted", "sent"),
    [
        (1, 30, True, "certificate is not yet valid.*; or this machine's clock is behind"),
        (
            -9,
            -1,
            True,
            "certificate has expired.*; renew it, and restart the coordinator, or set this machine's clock, if that "
            "is ahead. Or an authority in `tls.ca` has expired",
        ),
        (-1, 30, False, "its certificate is not from an authority in `tls.ca`"),
    ],
)
def test_a_group_says_why_it_does_not_trust_the_coordinators_certificate(
    tmp_path: Path, *, since: int, until: int, trusted: bool, sent: str
) -> None:
    """A date may be the fault of this clock; and where a date is at fault, the authority is not."""
    now, authority = datetime.now(UTC), trustme.CA()
    made = authority.issue_cert(
        "localhost", not_before=now + timedelta(days=since), not_after=now + timedelta(days=until)
    )
    (authority if trusted else trustme.CA()).cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    pair = (made.private_key_pem.bytes(), made.cert_chain_pems[0].bytes())
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    tls_files = jaxft.TLS(ca=tmp_path / "ca.pem")
    manager = jaxft.Manager(
        f"localhost:{port}", group="a", network=jaxft.Network(tls=tls_files), failure_timeout_s=1
    )
    try:
        with pytest.raises(jaxft.CoordinatorUnreachable, match=sent) as raised:
            manager.__enter__()
    finally:
        server.stop(None)
    assert ("not from an authority" in str(raised.value)) != trusted


def test_a_certificate_for_clients_alone_is_not_taken_for_one_of_another_authority() -> None:
    """gRPC's words about a coordinator whose certificate has the extended key usage clientAuth."""
    why = "SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: unsupported certificate purpose: OK"
    sent = Credentials(pem=tls.Pem()).explained(why)
    assert sent == f"{why}; its certificate is for clients only (its extended key usage)"


def test_a_certificate_that_has_expired_since_it_was_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator closes the connection without a word, as for an unknown authority."""
    cert, key = issued(tmp_path, -1, 30)
    held = Credentials(pem=tls.read_pem(ca=None, cert=cert, key=key))
    why = "UNAVAILABLE: ipv4:127.0.0.1:29510: Socket closed"
    assert (
        held.explained(why) == f"{why}; does it ask for a certificate, and trust the authority of `tls.cert`?"
    )
    now_s = datetime.now(UTC).timestamp()
    monkeypatch.setattr("time.time", lambda: now_s + 31 * DAY_S)
    sent = held.explained(why)
    assert re.fullmatch(
        r".* Socket closed; the certificate of this group expired on \d{4}-\d\d-\d\d \d\d:\d\d UTC: "
        r"renew `tls.cert`, and restart the group",
        sent,
    ), sent
