"""Connections to the HTTP port that stay in the middle of TLS: few at a time, and none for long."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator

import pytest
from jaxft_coordinator.http import _door

from tests import patience
from tests.coordinator.test_server import run
from tests.operate.test_http import FEW, few_connections, hurried, serving, silent_at
from tests.operate.test_https import Certificates

ASKS = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def trusted(files: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))  # which urllib trusts
    few_connections(monkeypatch)


class Client:
    """TLS by hand: the test sends its messages."""

    def __init__(self, files: Certificates) -> None:
        self._heard, self._said = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=str(files.ca))
        self.inside = context.wrap_bio(self._heard, self._said, server_hostname="localhost")

    def hello(self) -> bytes:
        with contextlib.suppress(ssl.SSLWantReadError):
            self.inside.do_handshake()
        return self._said.read()

    async def finish(self, reader: asyncio.StreamReader) -> bytes:
        """Read the other side's part of the handshake; return the last part of this side."""
        while True:
            received = await patience.wait_for(reader.read(1 << 16))
            assert received, "the connection was ended"
            self._heard.write(received)
            with contextlib.suppress(ssl.SSLWantReadError):
                self.inside.do_handshake()
                return self._said.read()

    def sent(self, data: bytes) -> bytes:
        self.inside.write(data)
        return self._said.read()

    async def answer(self, reader: asyncio.StreamReader) -> bytes:
        answer = b""
        while not answer.endswith(b"ok\n"):
            with contextlib.suppress(ssl.SSLWantReadError):
                answer += self.inside.read(1 << 16)
                continue
            received = await patience.wait_for(reader.read(1 << 16))
            assert received, "the connection was ended"
            self._heard.write(received)
        return answer


@contextlib.asynccontextmanager
async def crowd(
    port: int, size: int, output: bytes
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Connections that have sent this."""
    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(silent_at(port)) for _ in range(size)]
        for _, writer in made:
            writer.write(output)
        yield made


@pytest.mark.parametrize("part", [0, 1, -1, None], ids=["nothing", "a byte", "all but a byte", "its hello"])
def test_handshakes_that_are_left_in_the_middle_do_not_keep_others_out(
    files: Certificates, part: int | None
) -> None:
    async def scenario() -> None:
        async with (
            serving(cert=files.cert, key=files.key) as (_, http, _, web),
            crowd(http.port, 2 * FEW, Client(files).hello()[:part]) as silent,
        ):
            assert await asyncio.to_thread(web.get, "/healthz") == (200, "ok\n")
            ended = [reader.read() for reader, _ in silent[:-FEW]]
            await patience.wait_for(asyncio.gather(*ended, return_exceptions=True))

    run(scenario)


def test_clients_that_do_not_answer_the_end_of_tls_do_not_pile_up(files: Certificates) -> None:
    async def scenario() -> None:
        async with (
            serving(cert=files.cert, key=files.key) as (_, http, _, web),
            contextlib.AsyncExitStack() as stack,
        ):
            for _ in range(2 * FEW):
                reader, writer = await stack.enter_async_context(silent_at(http.port))
                client = Client(files)
                writer.write(client.hello())
                writer.write(await client.finish(reader) + client.sent(ASKS))
                await client.answer(reader)
            assert await asyncio.to_thread(web.get, "/healthz") == (200, "ok\n")
            here = http._uvicorn.server_state.connections  # pyright: ignore[reportPrivateUsage]
            assert len(here) <= FEW

    run(scenario)


def test_a_handshake_that_takes_too_long_is_ended(
    files: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried(monkeypatch)
    monkeypatch.setattr(_door, "TIMEOUT_S", 0.1)

    async def scenario() -> None:
        async with (
            serving(cert=files.cert, key=files.key) as (_, http, _, _),
            silent_at(http.port) as (reader, writer),
        ):
            writer.write(Client(files).hello())
            with contextlib.suppress(ConnectionError):
                await patience.wait_for(reader.read())

    run(scenario)


@pytest.mark.parametrize(
    "output", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x40\x00" + bytes(16384), b"\x15\x03\x03\0\2\2\x28"]
)
def test_what_is_no_handshake_ends_its_connection_without_a_word(
    files: Certificates, output: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with (
            serving(cert=files.cert, key=files.key) as (_, http, _, web),
            silent_at(http.port) as (reader, writer),
        ):
            writer.write(output)
            with contextlib.suppress(ConnectionError):
                await patience.wait_for(reader.read())
            assert await asyncio.to_thread(web.get, "/healthz") == (200, "ok\n")

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert caplog.messages == []


def test_an_error_in_a_handshake_ends_its_connection_alone(
    files: Certificates, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(cert=files.cert, key=files.key) as (_, http, _, web):
            with monkeypatch.context() as patch:
                patch.setattr(http._uvicorn.config, "http_protocol_class", lambda **_: 1 // 0)
                async with silent_at(http.port) as (reader, _):
                    assert await patience.wait_for(reader.read()) == b""
            assert await asyncio.to_thread(web.get, "/healthz") == (200, "ok\n")

    run(scenario)
    assert caplog.messages == ["a connection to the HTTP port failed in its TLS handshake"]
