"""The commands against a coordinator whose HTTP port has a certificate of a private authority."""

import asyncio
import http.server
import socket
import threading
from pathlib import Path

import pytest
import trustme
from jaxft_protocol import credentials
from jaxft_protocol.messages import Drained

from jaxft_launch.client._drain import DrainOptions, run_drain
from jaxft_launch.client._port import PortError, act, ask
from tests.coordinator.test_server import Client, run
from tests.operate.test_http import SECRET, serving

TOKEN = credentials.job_key(SECRET, "job").hex()


class Certificates:
    """Files of a private authority, and of a certificate for localhost."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert("localhost")
        self.ca, self.cert, self.key = (folder / f"{name}.pem" for name in ("ca", "cert", "key"))
        authority.cert_pem.write_to_path(str(self.ca))
        issued.cert_chain_pems[0].write_to_path(str(self.cert))
        issued.private_key_pem.write_to_path(str(self.key))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def test_the_port_is_asked_with_its_authority_and_a_group_is_drained(
    files: Certificates, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with (
            serving(secret=SECRET, cert=files.cert, key=files.key) as (server, _, _, web),
            Client(server.port, "a", "job") as client,
        ):
            await client.hello()
            assert (await asyncio.to_thread(ask, web.url, "coordinator"))["actions"] is True
            drain = asyncio.create_task(
                asyncio.to_thread(run_drain, DrainOptions("a", job="job", http=web.url))
            )
            assert await client.hear_until(Drained) == Drained()
            assert await drain == 0

    monkeypatch.setenv("JAXFT_TLS_CA", str(files.ca))
    monkeypatch.setenv("JAXFT_TOKEN", TOKEN)
    run(scenario)
    assert capsys.readouterr().out.startswith("group 'a' is drained: it finishes its step")


def test_what_goes_wrong_with_a_certificate_says_what_to_do(
    files: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    (tmp_path / "text").write_text("no certificate")

    async def scenario() -> None:
        async with (
            serving(cert=files.cert, key=files.key) as (_, _, _, secure),
            serving() as (server, _, _, plain),
        ):
            private = "If a private authority has signed .* name it in .* JAXFT_TLS_CA"
            for url, ca, why in (
                (secure.url, None, f"certificate verify failed.*{private}"),
                (secure.url, other, f"certificate verify failed.*{private}"),
                (
                    secure.url.replace("localhost", "127.0.0.1"),
                    files.ca,
                    "the certificate must name the address",
                ),
                (
                    secure.url.replace("https", "http"),
                    None,
                    "started with --tls-cert, its address begins with https:",
                ),
                (
                    f"http://localhost:{server.port}",
                    None,
                    "the port that groups connect to, 29510 by default: commands ask the port of --http",
                ),
                (
                    plain.url.replace("http", "https"),
                    files.ca,
                    "started without --tls-cert, .* begins with http:",
                ),
                (
                    secure.url,
                    tmp_path / "none",
                    "authority '.*none' cannot be used: .* file in PEM form in .* JAXFT_TLS_CA",
                ),
                (secure.url, tmp_path / "text", "authority '.*text' cannot be used"),
            ):
                monkeypatch.setenv("JAXFT_TLS_CA", str(ca or ""))
                with pytest.raises(PortError, match=f"(?s){why}"):
                    await asyncio.to_thread(ask, url, "jobs")

    run(scenario)


def test_a_token_does_not_cross_a_network_unencrypted() -> None:
    for url in ("http://coordinator:29511", "http://10.0.0.1:29511"):
        with pytest.raises(
            PortError, match=r"would cross the network to .* unencrypted\. .* begins with https://"
        ):
            act(url, "jobs/job/pause", token=TOKEN, reason="")


class Answering(http.server.BaseHTTPRequestHandler):
    """Gives every request the same answer."""

    def do_POST(self) -> None:
        body = b'{"text": "asked"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_token_for_this_machine_goes_through_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `no_proxy`, urllib would ask a proxy for localhost, too."""
    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as port, socket.create_server(("", 0)) as proxy:
        proxy.settimeout(0.0)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        threading.Thread(target=port.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{port.server_port}"
        assert act(url, "jobs/job/pause", token=TOKEN, reason="") == "asked"
        with pytest.raises(BlockingIOError):
            proxy.accept()
