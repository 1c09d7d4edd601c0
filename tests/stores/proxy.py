"""A network cable that can be held: bytes go in and do not come out, and neither side is notified."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass
class _Direction:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    passed: bytearray = field(default_factory=bytearray)
    held: list[bytes] | None = None

    async def carry(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self.reader.read(1 << 16):
                if self.held is None:
                    self.put([data])
                else:
                    self.held.append(data)
            # The end of a connection does not get through a held cable either.
            if self.held is None:
                self.writer.close()

    def put(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            self.passed += piece
        with contextlib.suppress(OSError):
            self.writer.writelines(pieces)


@dataclass
class Connection:
    up: _Direction
    down: _Direction

    @property
    def held_request(self) -> bytes:
        """The held bytes of the client."""
        return b"".join(self.up.held or [])

    def hold(self) -> None:
        """Let nothing through from now on, in either direction."""
        for direction in (self.up, self.down):
            direction.held = direction.held or []

    def let_go(self, pieces: int | None = None) -> None:
        """Deliver the held bytes; or the first `pieces` of the requests, and then nothing more of them."""
        held, self.up.held = self.up.held or [], None if pieces is None else []
        self.up.put(held[:pieces])
        back, self.down.held = self.down.held or [], None
        self.down.put(back)


class Proxy:
    """Forwards connections to a local port."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._hold_new = False
        self.connections: list[Connection] = []
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def hold(self) -> None:
        """Let nothing through from now on, in either direction, and on new connections neither."""
        self._hold_new = True
        for connection in self.connections:
            connection.hold()

    def let_go(self) -> None:
        self._hold_new = False
        for connection in self.connections:
            connection.let_go()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        connection = Connection(_Direction(reader, far_writer), _Direction(far_reader, writer))
        if self._hold_new:
            connection.up.held, connection.down.held = [], []
        self.connections.append(connection)
        await asyncio.gather(connection.up.carry(), connection.down.carry())

    def close(self) -> None:
        for connection in self.connections:
            connection.up.writer.close()
            connection.down.writer.close()


@contextlib.asynccontextmanager
async def proxy_to(port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.close()
