"""How a coordinator is opened to other machines: with a secret, with certificates, or on purpose to any client."""

from pathlib import Path

import pytest
from jaxft_coordinator._arguments import Arguments, exposure_of
from jaxft_coordinator._version import __version__
from jaxft_protocol import credentials

from tests.coordinator.test_cli import run_here

SECRET = b"a secret of enough bytes"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(SECRET + b"\n")
    return path


def test_it_does_not_open_itself_to_other_machines_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, sent = run_here(monkeypatch, capsys)
    assert status == 1
    assert sent.startswith("jaxft-coordinator: does not listen on [::]:29510, which other machines can reach")
    for way in ("--token-file FILE", "--tls-client-ca FILE", "--insecure", "--bind localhost:29510"):
        assert way in sent


@pytest.mark.parametrize(
    "bind", ["[::]:0", "0.0.0.0:0", "10.0.0.1:0", "host.example:29510", ":29510", "[::ffff:10.0.0.1]:0"]
)
def test_what_others_can_reach_needs_one_of_three(bind: str) -> None:
    closed = Arguments(bind=bind)
    assert "which other machines can reach" in exposure_of(closed)
    some = Path("some")
    assert "which other machines" in exposure_of(Arguments(bind=bind, tls_cert=some, tls_key=some))
    for opened in (
        Arguments(bind=bind, token_file=some),
        Arguments(bind=bind, tls_cert=some, tls_key=some, tls_client_ca=some),
        Arguments(bind=bind, insecure=True),
    ):
        assert exposure_of(opened) == ""


@pytest.mark.parametrize("bind", ["localhost:29510", "127.0.0.1:0", "127.8.9.1:0", "[::1]:0"])
def test_this_machine_alone_needs_nothing(bind: str) -> None:
    assert exposure_of(Arguments(bind=bind)) == ""


def test_a_token_is_printed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], secret: Path
) -> None:
    status, sent = run_here(monkeypatch, capsys, "token", "--token-file", str(secret), "my-run")
    assert status == 0
    assert sent == credentials.job_key(SECRET, "my-run").hex() + "\n"
    assert run_here(monkeypatch, capsys, "token", "my-run", "--token-file", str(secret)) == (0, sent)


@pytest.mark.parametrize("command", [["token", "job"], []])
def test_a_secret_that_others_can_read_is_not_used(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], secret: Path
) -> None:
    secret.chmod(0o644)
    status, sent = run_here(monkeypatch, capsys, *command, "--token-file", str(secret))
    assert status == 1
    assert "is accessible to users other than its owner (mode 0644): make it private with `chmod 600" in sent
    assert SECRET.decode() not in sent


def test_it_says_its_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(monkeypatch, capsys, "--version") == (0, f"jaxft-coordinator {__version__}\n")
