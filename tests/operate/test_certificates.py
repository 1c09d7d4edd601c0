"""The certificates that `jaxft doctor` judges: of files, and of what a coordinator really serves."""

import asyncio
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from jaxft_coordinator.shell._server import Server
from jaxft_protocol.coordinator.job import Options
from jaxft_protocol.host.tls import read_pem

from jaxft_launch.check import _certificates, _network_checks
from jaxft_launch.check._findings import Finding
from tests.coordinator.test_server import NEVER_S, run


def issued(folder: Path, days: int) -> tuple[Path, Path]:
    """A certificate for localhost that expires in so many days, and its key."""
    made = trustme.CA().issue_cert("localhost", not_after=datetime.now(UTC) + timedelta(days=days))
    cert, key = folder / "cert.pem", folder / "key.pem"
    made.cert_chain_pems[0].write_to_path(str(cert))
    made.private_key_pem.write_to_path(str(key))
    return cert, key


def test_a_certificate_in_a_file_that_expires(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    file, _ = issued(tmp_path, 30)
    levels = {
        days: next(_certificates.in_files([file], now + timedelta(days=days))).level for days in (0, 20, 31)
    }
    assert levels == {0: "ok", 20: "warn", 31: "fail"}
    early = next(_certificates.in_files([file], datetime(1990, 1, 1, tzinfo=UTC)))
    assert (early.level, early.advice) == ("fail", "check this machine's clock")
    missing = next(_certificates.in_files([tmp_path / "none.pem"]))
    assert (missing.level, "cannot be read: " in missing.text) == ("fail", True)


@pytest.mark.parametrize("asks_clients", [False, True])
def test_what_a_coordinator_serves_is_judged_and_not_its_file(tmp_path: Path, asks_clients: bool) -> None:
    """The certificate was renewed in its file, and the coordinator not restarted."""
    found: dict[int, Finding] = {}

    async def scenario() -> None:
        cert, key = issued(tmp_path, 30)
        pem = read_pem(cert=cert, key=key, ca=cert if asks_clients else None)
        server = Server("localhost:0", Options(heartbeat_timeout_s=NEVER_S), tls=pem)
        await server.start()
        issued(tmp_path, 300)
        assert next(_certificates.in_files([cert])).level == "ok"
        try:
            for days in (0, 20, 31):
                later = datetime.now(UTC) + timedelta(days=days)
                where = ("the coordinator", "localhost", server.port, later)
                found[days] = await asyncio.to_thread(_certificates.served_by, *where)
        finally:
            await server.stop(grace_s=0.0)

    run(scenario)
    assert {days: finding.level for days, finding in found.items()} == {0: "ok", 20: "warn", 31: "fail"}
    assert found[31].text.startswith("the certificate that the coordinator serves expired on ")
    assert "restart the coordinator, which reads its certificate only when it starts" in found[31].advice
    assert "a group that reconnects after that is refused" in found[20].advice


def test_an_expired_certificate_that_is_served_is_read_all_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        cert, key = issued(tmp_path, -1)
        server = Server("localhost:0", Options(), tls=read_pem(ca=None, cert=cert, key=key))
        await server.start()
        try:
            served = await asyncio.to_thread(_certificates.served_by, "it", "localhost", server.port)
        finally:
            await server.stop(grace_s=0.0)
        assert (served.level, "the certificate that it serves expired on" in served.text) == ("fail", True)

    run(scenario)


def test_a_coordinator_whose_certificate_is_not_trusted_is_no_program_to_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        cert, key = issued(tmp_path, 30)
        server = Server("localhost:0", Options(), tls=read_pem(ca=None, cert=cert, key=key))
        await server.start()
        (tmp_path / "other").mkdir()
        other, _ = issued(tmp_path / "other", 30)
        try:
            for ca in (other, None):
                found = await asyncio.to_thread(
                    lambda ca=ca: list(_network_checks.coordinators(f"localhost:{server.port}", ca=ca))
                )
                assert "does not answer" in " ".join(each.text for each in found)
                assert [each for each in found if "holds localhost" in each.text] == []
        finally:
            await server.stop(grace_s=0.0)

    run(scenario)


def test_a_server_without_tls_shows_no_certificate() -> None:
    async def scenario() -> None:
        server = Server("localhost:0", Options())
        await server.start()
        try:
            plain = await asyncio.to_thread(_certificates.served_by, "it", "localhost", server.port)
        finally:
            await server.stop(grace_s=0.0)
        assert (plain.level, plain.text.startswith("it shows no certificate: ")) == ("fail", True)
        assert "--tls-cert" in plain.advice

    run(scenario)


def test_where_nothing_listens_there_is_no_certificate() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        finding = _certificates.served_by("it", "127.0.0.1", free.getsockname()[1])
    assert (finding.level, "Connection refused" in finding.text) == ("fail", True)
