"""A certificate whose dates do not fit is named when it is read: its clients would only say that they refuse it."""

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
from jaxft_protocol import tls

import jaxft

DAY_S = 24 * 3600.0


def issued(folder: Path, *, since: int, until: int, key: trustme.KeyType, chain: bool) -> tuple[Path, Path]:
    """A certificate that is valid between two days from now, and its key."""
    now = datetime.now(UTC)
    authority = trustme.CA(key_type=key)
    if chain:
        authority = authority.create_child_ca()
    made = authority.issue_cert(
        "localhost",
        not_before=now + timedelta(days=since),
        not_after=now + timedelta(days=until),
        key_type=key,
    )
    cert, private = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
    made.private_key_pem.write_to_path(str(private))
    return cert, private


@pytest.mark.parametrize("key", list(trustme.KeyType))
@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize(
    ("since", "until", "said"),
    [
        (-1, 30, ""),
        (-1, 13, "expires on .* in time, and restart this process"),
        (-9, -1, "expired on .*: the other side refuses it"),
        (1, 30, "is valid from .* on: the other side refuses it before. Check this machine's clock"),
    ],
)
def test_dates_that_do_not_fit_are_in_the_log_when_it_is_read(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    since: int,
    until: int,
    said: str,
    key: trustme.KeyType,
    chain: bool,
) -> None:
    cert, private = issued(tmp_path, since=since, until=until, key=key, chain=chain)
    with caplog.at_level(logging.WARNING):
        assert tls.read_pem(ca=None, cert=cert, key=private).cert == cert.read_bytes()
    if not said:
        assert not caplog.messages
        return
    (message,) = caplog.messages
    assert message.startswith(f"the TLS certificate '{cert}' ")
    assert re.search(said, message), message


def test_it_is_judged_by_the_time_that_is_given(tmp_path: Path) -> None:
    cert, key = issued(tmp_path, since=-1, until=30, key=trustme.KeyType.ECDSA, chain=False)
    now_s = datetime.now(UTC).timestamp()
    said = [tls.problem_of_dates(cert, key, now_s + days * DAY_S) for days in (-2, 0, 20, 31)]
    assert [text.split(" ")[0] for text in said] == ["is", "", "expires", "expired"]


@pytest.mark.parametrize(
    ("since", "until", "trusted", "said"),
    [
        (1, 30, True, "certificate is not yet valid.*; or this machine's clock is behind"),
        (
            -9,
            -1,
            True,
            "certificate has expired.*; renew it, and restart the coordinator, or set this machine's clock",
        ),
        (-1, 30, False, "its certificate is not from an authority in `tls.ca`"),
    ],
)
def test_a_group_says_why_it_does_not_trust_the_coordinators_certificate(
    tmp_path: Path, since: int, until: int, trusted: bool, said: str
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
    manager = jaxft.Manager(f"localhost:{port}", group="a", tls=tls_files, failure_timeout_s=1)
    try:
        with pytest.raises(jaxft.CoordinatorUnreachable, match=said) as raised:
            manager.__enter__()
    finally:
        server.stop(None)
    assert ("authority" in str(raised.value)) != trusted
