"""`jaxft doctor`: its findings on a machine, and between a machine and its coordinator."""

import asyncio
import ctypes
import socket
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from jaxft_coordinator.shell._server import Server
from jaxft_protocol.coordinator.job import Options
from jaxft_protocol.host.tls import read_pem

from jaxft._exchange import _compiled
from jaxft._exchange._compiled import Library
from jaxft._session._credentials import Credentials
from jaxft_launch.check import _machine_checks, _network_checks
from jaxft_launch.check._doctor import DoctorOptions, run_doctor
from tests.coordinator.test_server import NEVER_S, run

DAY_S = 86400.0


@pytest.mark.parametrize(
    ("found", "text", "advice"),
    [
        (
            {"jaxft-protocol": "0.0.1"},
            "jaxft-protocol is 0.0.1, but jaxft is",
            "pip install jaxft-protocol==",
        ),
        ({"jax": "0.10.2", "jaxlib": "0.10.1"}, "jaxlib is 0.10.1, but jax is 0.10.2", "jaxlib==0.10.2"),
        (
            {"jax": "0.12.0", "jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"},
            "jax-cuda13-plugin is 0.10.2, made for another jax than 0.12.0",
            "pip install jax-cuda13-plugin==0.12.0",
        ),
    ],
)
def test_versions_that_do_not_fit(found: dict[str, str], text: str, advice: str) -> None:
    wrong = [each for each in _machine_checks.versions(found) if each.level == "fail"]
    assert any(text in each.text and advice in each.advice for each in wrong)
    fits = {"jax": "0.12.0", "jaxlib": "0.12.0", "jax-rocm7-plugin": "0.12.0.1", "jax-rocm7-pjrt": "0.12.0.1"}
    assert [each.level for each in _machine_checks.versions(fits)] == ["ok"]


@pytest.mark.parametrize(
    ("library", "level", "text"),
    [
        (None, "warn", "exchanges run in Python, without and with a token"),
        (Library(ctypes.CDLL(None), "avx2", None), "ok", "in C (avx2); with a token, Python makes the MACs"),
        (Library(ctypes.CDLL(None), "avx2", "pclmul"), "ok", "in C (avx2), with a token too (MACs: pclmul)"),
    ],
)
def test_what_carries_out_exchanges(
    library: Library | None, level: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compiled, "library", lambda: library)
    finding = _machine_checks.lane()
    assert (finding.level, text in finding.text) == (level, True)
    assert ("C compiler" in finding.advice) == (level == "warn")


def test_a_gpu_without_deterministic_kernels_is_a_warning() -> None:
    _, warned = _machine_checks.devices_of("gpu", 8, "--xla_foo=1")
    assert (warned.level, "bits from run to run" in warned.text) == ("warn", True)
    assert warned.advice.startswith("set XLA_FLAGS=--xla_gpu_deterministic_ops=true")
    deterministic = _machine_checks.devices_of("gpu", 8, "--xla_gpu_deterministic_ops=true")
    assert [each.level for each in deterministic] == ["ok"]


def test_memory_for_one_more_state(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   8000000 kB\n")
    levels = [next(iter(_machine_checks.memory(size, meminfo, tmp_path))).level for size in (0.0, 8.0, 8.5)]
    assert levels == ["ok", "ok", "fail"]


def test_without_a_coordinator_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nothing = f"localhost:{free.getsockname()[1]}"
        monkeypatch.setenv("JAXFT_COORDINATOR", nothing)
        monkeypatch.setattr(_machine_checks, "findings", lambda **_: ())
        assert run_doctor(DoctorOptions()) == 1
    text = capsys.readouterr().out
    assert f"FAIL  the coordinator {nothing} does not answer: UNAVAILABLE" in text
    assert "FAIL  no coordinator leads\n      -> start one; " in text
    assert "ok    this machine reaches itself at 127.0.0.1, " in text


def issued(folder: Path, days: int) -> tuple[Path, Path]:
    """A certificate for localhost that expires after `days`, and its key."""
    made = trustme.CA().issue_cert("localhost", not_after=datetime.now(UTC) + timedelta(days=days))
    cert, key = folder / "cert.pem", folder / "key.pem"
    made.cert_chain_pems[0].write_to_path(str(cert))
    made.private_key_pem.write_to_path(str(key))
    return cert, key


def test_a_certificate_that_expires(tmp_path: Path) -> None:
    cert, key = issued(tmp_path, 30)
    proven = Credentials(pem=read_pem(ca=None, cert=cert, key=key))
    levels = [
        next(_network_checks.certificate(proven, time.time() + days * DAY_S)).level for days in (0, 20, 31)
    ]
    assert levels == ["ok", "warn", "fail"]
    assert not list(_network_checks.certificate(Credentials(), 0.0))


def test_a_certificate_without_its_key_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would abort the process."""
    cert, key = issued(tmp_path, 30)
    for name, file in (("JAXFT_TLS_CERT", cert), ("JAXFT_TLS_KEY", key)):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(file))
            (finding,) = _network_checks.findings("localhost:1")
        assert (finding.level, "cannot be used" in finding.text) == ("fail", True), finding


def test_a_coordinator_that_is_reached_over_tls_and_one_that_is_not_trusted(tmp_path: Path) -> None:
    async def scenario() -> None:
        cert, key = issued(tmp_path, 30)
        server = Server(
            "localhost:0", Options(heartbeat_timeout_s=NEVER_S), tls=read_pem(ca=None, cert=cert, key=key)
        )
        await server.start()
        (tmp_path / "other").mkdir()
        other, _ = issued(tmp_path / "other", 30)
        try:
            for ca, text in ((other, "is not from an authority in `tls.ca`"), (None, "does it ask for TLS?")):
                proven = Credentials(pem=None if ca is None else read_pem(ca=ca, cert=None, key=None))
                found = await asyncio.to_thread(
                    lambda proven=proven: list(
                        _network_checks.coordinators(f"localhost:{server.port}", proven)
                    )
                )
                assert text in found[0].text, found
        finally:
            await server.stop(grace_s=0.0)

    run(scenario)
