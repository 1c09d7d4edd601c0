"""Accepted exchange connections, until their exchange takes them. See `_listener.py`."""

import select
import threading

from jaxft._transport._seals import Connection
from jaxft._transport._sockets import Abort, wait

# Connections for the current quorum, and perhaps for the next. Jobs have thousands of groups.
MAX_PENDING = 16384

# Quorum, group, incarnation, first lane, strand: the lowest key belongs to the oldest quorum.
_Key = tuple[int, str, int, int, int]


class PendingConnections:
    """A bounded table from (quorum, group, incarnation, lane, strand) to a connection. Thread-safe."""

    def __init__(self, room: int, of: str = "quorum") -> None:
        self._of = of
        self._room = min(room, MAX_PENDING)
        self._lock = threading.Lock()
        self._over = -1  # this quorum and older ones are over
        self._closed = False
        self._waiting: dict[_Key, Connection] = {}
        self._takers: dict[_Key, Abort] = {}

    def refusal(self, quorum_id: int) -> str | None:
        """Why no connection is accepted for a quorum, or None."""
        with self._lock:
            return self._refusal(quorum_id)

    def add(self, key: _Key, connection: Connection) -> None:
        """Keep a connection until it is taken, or close it if its quorum is over."""
        with self._lock:
            if self._refusal(key[0]) is not None:
                connection.close()
                return
            if (older := self._waiting.pop(key, None)) is not None:
                older.close()  # the peer dialled again, so it has abandoned this one
            elif len(self._waiting) >= self._room:
                self._waiting.pop(min(self._waiting)).close()
            self._waiting[key] = connection
            if (taker := self._takers.get(key)) is not None:
                taker.set("arrived")

    def take(self, key: _Key, *, deadline_s: float, abort: Abort | None) -> Connection:
        """Wait for a connection and hand it over. Raises TimeoutError or ConnectionError."""
        quorum_id, group, *_ = key
        arrived = Abort()  # used as a flag that can be polled
        with self._lock:
            if key in self._waiting or self._refusal(quorum_id) is not None:
                arrived.set("nothing to wait for")
            self._takers[key] = arrived
        try:
            what = f"group {group!r} to connect for {self._of} {quorum_id}"
            wait(arrived.fileno(), select.POLLIN, deadline_s=deadline_s, what=what, abort=abort)
        finally:
            with self._lock:
                del self._takers[key]
        # After a wait that failed it stays here: for the next call, or until its quorum is over.
        with self._lock:
            connection = self._waiting.pop(key, None)
        if connection is None:
            dropped = f"The connection of group {group!r} for {self._of} {quorum_id} was dropped"
            raise ConnectionError(self.refusal(quorum_id) or f"{dropped} to make room for others.")
        return connection

    def forget(self, quorum_id: int) -> None:
        """Close the connections for this quorum and older ones, and refuse later ones."""
        with self._lock:
            self._over = max(self._over, quorum_id)
            self._drop(quorum_id)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._drop(None)

    def _refusal(self, quorum_id: int) -> str | None:
        if self._closed:
            return "This process is leaving the job."
        if quorum_id <= self._over:
            return f"Quorum {quorum_id} is over here; quorums up to {self._over} have ended."
        return None

    def _drop(self, up_to: int | None) -> None:
        for key in list(self._waiting):
            if up_to is None or key[0] <= up_to:
                self._waiting.pop(key).close()
        for key, taker in self._takers.items():
            if up_to is None or key[0] <= up_to:
                taker.set("dropped")
