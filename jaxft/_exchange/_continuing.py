"""A connection that stays when the quorum changes.

Most changes come between two exchanges: a group joins, or leaves after a step. Then nothing is under way between
two members of both quorums, and a new handshake would prove what the last one has proved. Each of them sends a
frame with the new quorum's number, and continues when the other's has come.

The frame also counts the exchanges that ended over the connection. If one has ended here and not there, its bytes
may still be in the connection, and both ends see that the numbers differ. After a failed exchange the connection is
closed. In each of these cases the two connect again (`_links.py`).

Before it there may be frames by which the peer showed that bytes of a round move (`_grid.py`): in the last exchange
it had nothing else to send over this connection, so they were not read.

The frame has the connection's next tag: no one else can send it, or send it twice (`_seals.py`).
"""

import hmac
import select
import socket
from typing import NamedTuple

from jaxft._exchange._frames import HEADER_BYTES
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import SEND_FLAGS


class NotContinued(ConnectionError):
    """A connection of an older quorum cannot be used. It is closed."""


class Kept(NamedTuple):
    """A connection of an older quorum, at one end of which no exchange is under way."""

    connection: Connection
    exchanges: int  # how many have ended over it
    progress: bytes  # the header, not read yet, by which the peer may have shown that bytes move


class Continuing:
    """One connection of an older quorum, until the peer's frame has come.

    Raises:
        NotContinued: the frame cannot be sent.
    """

    events = select.POLLIN

    def __init__(self, connection: Connection, mine: bytes, theirs: bytes, skipped: bytes) -> None:
        self.sock: socket.socket = connection.sock
        self._connection = connection
        self._theirs, self._skipped = theirs, skipped
        self._received = bytearray()
        frame = mine + connection.outgoing.tag(mine, b"")
        try:
            sent = self.sock.send(frame, SEND_FLAGS)
        except OSError as error:
            raise self._over(str(error)) from error
        if sent < len(frame):
            raise self._over("it does not read the bytes of an exchange")

    def advance(self) -> Connection | None:
        """Read the bytes that have come; return the connection once the frame is whole, and None before.

        Raises:
            NotContinued: the peer does not go on with this connection.
        """
        tags = self._connection.incoming
        while True:
            rest = HEADER_BYTES + tags.size_bytes - len(self._received)
            try:
                received = self.sock.recv(rest, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                raise self._over(str(error)) from error
            if not received:
                raise self._over("it closed the connection")
            self._received += received
            if len(received) < rest:
                continue
            header = bytes(self._received[:HEADER_BYTES])
            is_known = header in (self._theirs, self._skipped)
            if not is_known or not hmac.compare_digest(self._received[HEADER_BYTES:], tags.tag(header, b"")):
                raise self._over("it sent something else")
            if header == self._theirs:
                return self._connection
            self._received.clear()

    def _over(self, why: str) -> NotContinued:
        self.sock.close()
        return NotContinued(f"The peer does not go on with the connection of the last quorum: {why}.")
