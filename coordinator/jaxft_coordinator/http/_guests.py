"""The connections to the HTTP port. One whose client lets this side wait too long is ended.

Uvicorn has a deadline only for the next request of a connection. One that never sends a whole request, such as a
browser's that was opened ahead on a machine that then went to sleep, would keep its descriptor forever and count
against the limit; so would one that reads nothing of its answer.
"""

import asyncio
import time

from jaxft_protocol.host.admission import crowded_out
from uvicorn.protocols.http.h11_impl import H11Protocol

# Connections that owe a request. Viewers and scrapes beside them stay within the limit of all connections.
MAX_SILENT = 32
# For a whole request, and for a client to take anything of what is sent.
TIMEOUT_S = 15.0


class Guest(H11Protocol):
    """One connection."""

    # What this side has waited for, and since when.
    _awaited: tuple[object, ...] = ()
    _since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
        super().connection_made(transport)
        self._came_s = time.monotonic()
        # With TLS, one that this side has closed stays until its client has answered that.
        silent = [guest for guest in self._all if guest.owes_request]
        silent.sort(key=lambda guest: guest._came_s)
        addresses = ((guest, guest.client[0] if guest.client else "") for guest in silent)
        for guest in crowded_out(addresses, MAX_SILENT):
            guest.transport.abort()

    @property
    def _all(self) -> list["Guest"]:
        return [guest for guest in self.connections if isinstance(guest, Guest)]

    @property
    def owes_request(self) -> bool:
        """Whether its next request has not come yet, or not all of it."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def end_if_stuck(self, now_s: float) -> None:
        """End the connection if it has not got on for too long. Call this again and again."""
        owes, unread = self.owes_request, self.transport.get_write_buffer_size()
        awaited = (self.cycle, owes, unread)
        if awaited != self._awaited or not (owes or unread):
            self._awaited, self._since_s = awaited, now_s
        elif now_s - self._since_s > TIMEOUT_S:
            self.transport.abort()
