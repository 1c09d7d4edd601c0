"""The errors of commands for another program's port, for a broken answer, and for odd arguments."""

import contextlib
import http.server
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import cast

import pytest

from jaxft_launch.client import _port
from jaxft_launch.client._port import PortError, act, ask


class Answers(http.server.HTTPServer):
    status, output, claimed_bytes = 200, b"", 0
    token = ""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = cast(Answers, self.server)
        server.token = self.headers["Authorization"] or ""
        self.send_response(server.status)
        self.send_header("Content-Length", str(server.claimed_bytes or len(server.output)))
        self.end_headers()
        self.wfile.write(server.output)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Answers]:
    with Answers(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(server: socketserver.TCPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.mark.parametrize("path", ["jobs", "jobs/toy", "coordinator"])
@pytest.mark.parametrize("output", [b"[]", b"null", b'"x"', b'{"status": "ok"}'])
def test_the_json_of_another_service_is_no_answer(server: Answers, output: bytes, path: str) -> None:
    server.output = output
    with pytest.raises(PortError, match="is that the HTTP port of a jaxft coordinator"):
        ask(url_of(server), path)


def test_an_action_of_which_nothing_is_told_is_an_error(server: Answers) -> None:
    server.output = b"{}"
    with pytest.raises(PortError, match="answers without 'text'"):
        act(url_of(server), "jobs/toy/groups/group-0/drain", token="", reason="")


def test_an_error_that_is_broken_off_is_told_with_its_status(server: Answers) -> None:
    server.status, server.output, server.claimed_bytes = 503, b"ab", 100
    with pytest.raises(PortError, match="answers with status 503"):
        ask(url_of(server), "jobs")


def test_what_a_strange_server_says_cannot_steer_the_terminal(server: Answers) -> None:
    server.status, server.output = 404, b'{"text": "\\u001b[2J\\n' + b"x" * 99 + b'"}'
    with pytest.raises(PortError) as found:
        ask(url_of(server), "jobs")
    assert str(found.value) == "\\x1b[2J " + "x" * 99
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        # As gRPC begins, or any other protocol: no line of HTTP.
        talking = threading.Thread(target=_says, args=(other, b"\x00\x00\x18\x1b[2J" + b"\x04" * 999))
        talking.start()
        with pytest.raises(PortError, match="If this is the port that groups connect to") as found:
            ask(f"http://127.0.0.1:{other.getsockname()[1]}", "jobs")
        talking.join()
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 600


def _says(listening: socket.socket, data: bytes) -> None:
    with listening.accept()[0] as connection:
        connection.recv(65536)
        connection.sendall(data)


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(PortError, match=r"cannot be 'http://\[::1'"):
        ask("http://[::1", "jobs")


def test_a_token_may_have_the_end_of_its_line_and_is_not_told(server: Answers) -> None:
    server.output = b'{"text": "it leaves"}'
    assert act(url_of(server), "x", token="00ff\n", reason="") == "it leaves"
    assert server.token == "Bearer 00ff"
    with pytest.raises(PortError, match="not printable ASCII") as raised:
        act(url_of(server), "x", token="00ff\u20ac", reason="")
    assert "00ff" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_coordinator_that_is_stopped_may_be_what_does_not_answer(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel still takes its connections."""
    monkeypatch.setattr(_port, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        url = f"{scheme}://127.0.0.1:{stopped.getsockname()[1]}"
        for asks in (lambda: ask(url, "jobs"), lambda: act(url, "jobs/toy/pause", token="x", reason="")):
            with pytest.raises(PortError, match=r"timed out.*process may be stopped or hang"):
                asks()
