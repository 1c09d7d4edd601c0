"""The data plane's listener: one listening socket per process, with admission control.

Its door (`_door.py`) admits connections. They are kept here: for exchanges and of ranks, until `take` and `take_rank`
ask for them; for heals, in a thread each that runs `on_heal`. The limits leave room for a job of thousands of groups.

A quorum's connections are kept under (quorum, group, incarnation, lane, strand), because a peer may learn of a quorum
before this process does. `forget` drops the connections of quorums that are over, and refuses later ones.

Errors. An error caused by a connection ends that connection. An error of the listener itself ends the listener: it is
logged, and `check`, which runs before each step and before a quorum's connections are made, raises it on the training
thread.

Left out: encryption. Frames carry MACs (`_seals.py`) if the job has a key; an attacker on the path can still read
them.
"""

import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Callable

from jaxft_protocol.credentials import DataKey
from jaxft_protocol.host.admission import allow_all_descriptors

from jaxft._base._room import once_there_is_room, start_thread
from jaxft._errors import JaxftError
from jaxft._transport._door import Door, HalfOpen, bind_one_of
from jaxft._transport._handshake import ConnectionRequest, check_name, dial
from jaxft._transport._pending import PendingConnections
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import Abort, close_in_children, recv_exactly, send_all

__all__ = ["Abort", "Connection", "ConnectionRequest", "Listener", "dial", "recv_exactly", "send_all"]

_log = logging.getLogger("jaxft")

# Each has a thread that serves one joiner. A spare's connection stays open for as long as it follows the job.
_MAX_HEALING = 1024
# Each kind may take at most this fraction (1/n) of the process's file descriptors.
_HEALING_PART, _PENDING_PART = 4, 2
# Descriptors needed besides connections: files of data and checkpoints, devices, other libraries' sockets.
_OWN_DESCRIPTORS = 500
# Ranks of one group. Its hosts have some 8 each.
_MAX_RANKS = 4096


class Listener:
    """Accepts the connections of one job's data plane, from construction until `close`."""

    def __init__(  # noqa: PLR0913 (by name: who a peer is)
        self,
        *,
        host: str = "",
        ports: range = range(1),
        job: str,
        group: str,
        incarnation: int,
        on_heal: Callable[[Connection, ConnectionRequest], None] | None,
        key: DataKey | None = None,
        rank: int = 0,
    ) -> None:
        """Listen, and start the thread that accepts. Raises the limit on file descriptors to the hard limit."""
        check_name(job, what="job")
        check_name(group, what="group")
        self.key = key
        self.rank = rank
        self._job = job
        self._me = (group, incarnation)
        self._on_heal = on_heal
        self._descriptors = allow_all_descriptors()
        self._warned_of_descriptors = False
        self._failure: Exception | None = None
        self._sock = once_there_is_room(functools.partial(bind_one_of, host, ports))
        close_in_children(self._sock)
        self._sock.settimeout(0.0)
        self.port: int = self._sock.getsockname()[1]
        self._door = Door(self._sock, key, self._descriptors, self._wrong_end, self._admit)
        self._pending = PendingConnections(self._descriptors // _PENDING_PART)
        self._ranks = PendingConnections(_MAX_RANKS, of="rank")
        self._healing: set[socket.socket] = set()
        self._healing_lock = threading.Lock()
        self._closed = Abort()
        self._thread = start_thread(self._run, name="jaxft-listener")

    def take(  # noqa: PLR0913 (by name: who a peer is)
        self,
        *,
        quorum_id: int,
        group: str,
        incarnation: int,
        deadline_s: float,
        abort: Abort | None,
        lane: int = 0,
        strand: int = 0,
    ) -> Connection:
        """Wait for a peer's connection for one strand of the exchange of a quorum, from some lane on, and return it.

        Raises:
            TimeoutError: the deadline passed.
            ConnectionError: the quorum was forgotten, the listener closed, or the abort flag set.
        """
        key = (quorum_id, group, incarnation, lane, strand)
        return self._pending.take(key, deadline_s=deadline_s, abort=abort)

    def take_rank(self, rank: int, number: int = 0, *, deadline_s: float) -> Connection:
        """Wait for the first or second connection of another rank of this group, and return it. For rank 0.

        Raises:
            TimeoutError: the deadline passed.
            ConnectionError: the listener closed.
        """
        return self._ranks.take((rank, *self._me, number, 0), deadline_s=deadline_s, abort=None)

    def forget(self, quorum_id: int) -> None:
        """Close the connections for this quorum and older ones, and refuse later ones."""
        self._pending.forget(quorum_id)

    def check(self, peers: int, strands: int = 1) -> None:
        """Raise the error that ended this listener, if one did; warn if a quorum of this size needs more descriptors.

        Raises:
            JaxftError: the listener's thread ended with an error.
        """
        if self._failure is not None:
            raise JaxftError(
                f"The listener of group {self._me[0]!r} on port {self.port} failed with {self._failure!r}, so no "
                "other group can reach this one. Restart the group; its log has the traceback."
            ) from self._failure
        # For the current quorum, and for the next one while its connections are made.
        needed = 2 * peers * strands + _OWN_DESCRIPTORS
        if needed > self._descriptors and not self._warned_of_descriptors:
            self._warned_of_descriptors = True
            _log.warning(
                "Connections to %d other groups may need %d file descriptors, but this process may open only %d: "
                "raise the hard limit (`ulimit -Hn`, LimitNOFILE= of systemd), or lower `exchange_threads`.",
                *(peers, needed, self._descriptors),
            )

    def close(self) -> None:
        """Stop listening and close every connection that was not taken. Idempotent."""
        self._closed.set("closed")
        self._thread.join()
        self._sock.close()
        self._pending.close()
        self._ranks.close()
        with self._healing_lock:
            for sock in self._healing:
                with contextlib.suppress(OSError):  # the peer closed it first
                    sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self._door.serve(self._closed)
        except Exception as error:
            _log.exception("The listener on port %d failed; no group can reach this one any more.", self.port)
            self._failure = error
            self._sock.close()  # refuse diallers at once
            self._pending.close()  # and wake the threads that wait for a peer
            self._ranks.close()

    def _admit(self, half: HalfOpen, request: ConnectionRequest, connection: Connection) -> None:
        if request.kind == "exchange":
            self._admit_exchange(half, request, connection)
        elif request.kind == "rank":
            self._door.accept(half)
            self._ranks.add((request.number, request.group, request.incarnation, request.lane, 0), connection)
        else:
            self._admit_heal(half, request, connection)

    def _wrong_end(self, request: ConnectionRequest) -> str:
        """Why a connection request is not for this process; "" if it is for it."""
        if request.job != self._job:
            return f"The request is for job {request.job!r}; this process belongs to job {self._job!r}."
        if (request.to_group, request.to_incarnation) != self._me:
            return (
                f"The request is for incarnation {request.to_incarnation} of group {request.to_group!r}; this "
                f"process is incarnation {self._me[1]} of group {self._me[0]!r}."
            )
        if request.rank != self.rank:
            return (
                f"The request is for rank {request.rank} of group {request.to_group!r}; this process is rank "
                f"{self.rank}."
            )
        if request.kind == "rank" and (request.group, request.incarnation) != self._me:
            return (
                f"Only a rank of group {self._me[0]!r} may ask for orders here, not group {request.group!r}."
            )
        return ""

    def _admit_exchange(self, half: HalfOpen, request: ConnectionRequest, connection: Connection) -> None:
        refusal = self._pending.refusal(request.number)
        if refusal is not None:
            self._door.refuse(half, refusal)
            return
        # Answer first: once it is pending, another thread may take it and send frames.
        self._door.accept(half)
        key = (request.number, request.group, request.incarnation, request.lane, request.strand)
        self._pending.add(key, connection)

    def _admit_heal(self, half: HalfOpen, request: ConnectionRequest, connection: Connection) -> None:
        if self._on_heal is None:
            self._door.refuse(half, "This process does not heal other groups.")
            return
        with self._healing_lock:
            most = min(_MAX_HEALING, self._descriptors // _HEALING_PART)
            if len(self._healing) >= most:
                self._door.put_off(
                    half, f"This process is already healing {most} groups, its limit: ask another donor."
                )
                return
            self._door.accept(half)
            self._healing.add(half.sock)
        name = f"jaxft-heal-{request.group}"
        try:
            threading.Thread(target=self._heal, args=(connection, request), name=name, daemon=True).start()
        except RuntimeError as error:  # cannot start a thread: the joiner must not wait for one
            _log.warning("Group %r has to ask again to be healed: %s.", request.group, error)
            self._end_healing(connection)

    def _heal(self, connection: Connection, request: ConnectionRequest) -> None:
        assert self._on_heal is not None
        try:
            self._on_heal(connection, request)
        except Exception:  # a failed heal ends that connection, not the donor's training
            _log.exception("Healing group %r failed.", request.group)
        finally:
            self._end_healing(connection)

    def _end_healing(self, connection: Connection) -> None:
        with self._healing_lock:
            self._healing.discard(connection.sock)
        connection.close()
