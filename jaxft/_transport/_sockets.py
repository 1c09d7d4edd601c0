"""Blocking socket calls that always end: each has a deadline, and an `Abort` can wake it.

Deadlines are absolute, on the clock of `time.monotonic()`. Sockets stay in blocking mode and are read and
written with MSG_DONTWAIT between polls, so one deadline covers a whole transfer and a wait can watch a second
descriptor. Nothing here retries a transfer: the caller knows better whether a retry makes sense.
"""

import logging
import os
import random
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from jaxft_protocol.values import LongWait

from jaxft._base._room import TIMEOUT_S, is_shortage, once_there_is_room

_log = logging.getLogger("jaxft")

# Log waits longer than this.

# How long TCP itself may take to notice that a machine vanished without a FIN. The exchange has its own, shorter
# deadlines; this covers connections that no thread is waiting on. gRPC's default is 20 s.
_USER_TIMEOUT_MS = 30_000
_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 4

# Never block in a system call, and never raise SIGPIPE, whatever the process has set for that signal.
SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

# sendmsg takes at most IOV_MAX (1024) buffers; far fewer fill the socket's buffer.
_MAX_BUFFERS = 64

# How long Ctrl-C may take at most where it has just missed a poll.
_LOOK_MS = 500

# While the kernel has no memory for a transfer.
_NO_ROOM_PAUSE_S = 0.01

# The longest single poll, so that a deadline may be infinite.
_LONGEST_POLL_S = 3600.0


# A child that the program forks, such as a worker that loads data, inherits all descriptors. Its copies stay open
# when this process closes them, and even when this process is killed: no other group would notice.
_not_for_children: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


class Aborted(ConnectionError):
    """A wait ended because its `Abort` was set."""


class Abort:
    """A flag that any thread may set once; setting it wakes every thread that polls its descriptor."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._lock = threading.Lock()
        self._read_fd, self._write_fd = once_there_is_room(os.pipe)
        weakref.finalize(self, _close_fds, self._read_fd, self._write_fd).atexit = False

    def set(self, reason: str) -> None:
        """Set the flag. Only the first reason is kept."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            os.write(self._write_fd, b"!")

    @property
    def is_set(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str:
        """Why it was set; "" while it is not."""
        return self._reason or ""

    def fileno(self) -> int:
        """A descriptor that becomes readable when the flag is set, and stays so."""
        return self._read_fd


def wait(
    source: int | socket.socket, events: int, *, deadline_s: float, what: str, abort: Abort | None = None
) -> None:
    """Wait until one of the poll events holds for a descriptor. Logs a wait that exceeds 5 s once.

    Raises:
        TimeoutError: the deadline passed.
        Aborted: the flag was set.
    """
    fd = source if isinstance(source, int) else source.fileno()
    wait_any({fd: events}, deadline_s=deadline_s, what=what, abort=abort)


def wait_flags(*flags: Abort) -> None:
    """Return once one of the flags is set. No deadline: code with deadlines sets each of them in the end.

    Ctrl-C interrupts this, but a signal that comes just before a poll begins does not wake that poll. So it is
    a series of short polls.
    """
    poller = select.poll()
    for flag in flags:
        poller.register(flag, select.POLLIN)
    while not poller.poll(_LOOK_MS):
        pass


def wait_any(
    sources: Mapping[int, int], *, deadline_s: float, what: str, abort: Abort | None = None
) -> list[int]:
    """Like `wait`, for several descriptors with their events; returns the ready descriptors."""
    poller = select.poll()
    for fd, events in sources.items():
        poller.register(fd, events)
    if abort is not None:
        poller.register(abort, select.POLLIN)
    waiting = LongWait(time.monotonic())
    while True:
        now_s = time.monotonic()
        slow_s = waiting.began_s + waiting.due_s
        ready = poller.poll(1000 * max(0.0, min(deadline_s - now_s, slow_s - now_s, _LONGEST_POLL_S)))
        if abort is not None and abort.is_set:
            raise Aborted(abort.reason)
        if ready:
            return [fd for fd, _ in ready]
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise TimeoutError(f"Timed out after {now_s - waiting.began_s:.1f} s waiting for {what}.")
        if (waited_s := waiting.to_say(now_s)) is not None:
            _log.warning("Still waiting for %s after %.0f s.", what, waited_s)


def pause(seconds: float, *, abort: Abort | None = None) -> None:
    """Sleep. Raises Aborted as soon as the flag is set."""
    if abort is None:
        time.sleep(seconds)
        return
    poller = select.poll()
    poller.register(abort, select.POLLIN)
    if poller.poll(1000 * seconds):
        raise Aborted(abort.reason)


def backoff_s(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield the pause before each attempt: exponential backoff with jitter, which subtracts up to a half."""
    most_s = first_s
    while True:
        yield most_s * random.uniform(0.5, 1.0)
        most_s = min(2 * most_s, longest_s)


def recv_exactly(
    sock: socket.socket,
    view: memoryview,
    *,
    deadline_s: float,
    abort: Abort | None = None,
    what: str = "the peer's data",
) -> None:
    """Fill a buffer from a socket. A moment in which the kernel has no memory is waited out.

    Raises:
        ConnectionError: the peer closed or reset the connection first, or is not reached any more.
        TimeoutError: the deadline passed.
        Aborted: the flag was set (a ConnectionError too).
    """
    rest, begun_s, give_up_s = _flat(view), time.monotonic(), deadline_s
    while rest.nbytes:
        try:
            received = sock.recv_into(rest, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            try:
                wait(sock, select.POLLIN, deadline_s=deadline_s, what=what, abort=abort)
            except TimeoutError as error:
                waited_s, missing = (
                    time.monotonic() - begun_s,
                    f"{rest.nbytes} of {view.nbytes} bytes missing",
                )
                raise TimeoutError(
                    f"Timed out after {waited_s:.1f} s waiting for {what}, with {missing}."
                ) from error
            continue
        except ConnectionError:
            raise
        except OSError as error:
            give_up_s = _await_room(error, give_up_s, abort)
            continue
        give_up_s = deadline_s
        if received == 0:
            missing = f"{rest.nbytes} of {view.nbytes} bytes missing"
            raise ConnectionError(f"The peer closed the connection with {missing}.")
        rest = rest[received:]


def send_all(
    sock: socket.socket,
    buffers: Sequence[bytes | memoryview],
    *,
    deadline_s: float,
    abort: Abort | None = None,
    what: str = "the peer to take our data",
) -> None:
    """Send several buffers, in order, without joining them in memory first. As in `recv_exactly`, a moment without
    memory is waited out.

    Raises:
        ConnectionError: the peer closed or reset the connection, or is not reached any more.
        TimeoutError: the deadline passed.
        Aborted: the flag was set (a ConnectionError too).
    """
    pending = deque(view for view in map(_flat, buffers) if view.nbytes)
    give_up_s = deadline_s
    while pending:
        try:
            sent = sock.sendmsg(tuple(islice(pending, _MAX_BUFFERS)), (), SEND_FLAGS)
        except BlockingIOError:
            wait(sock, select.POLLOUT, deadline_s=deadline_s, what=what, abort=abort)
            continue
        except ConnectionError:
            raise
        except OSError as error:
            give_up_s = _await_room(error, give_up_s, abort)
            continue
        give_up_s = deadline_s
        drop_sent(pending, sent)


def _await_room(error: OSError, give_up_s: float, abort: Abort | None) -> float:
    """Pause if a call that failed may succeed soon; return how long to try.

    Raises:
        ConnectionError: it may not, or has failed until `give_up_s`.
    """
    now_s = time.monotonic()
    if not is_shortage(error) or now_s >= give_up_s:  # such as "No route to host"
        raise ConnectionError(f"The connection is lost: {error.strerror or error}.") from error
    pause(_NO_ROOM_PAUSE_S, abort=abort)
    return min(give_up_s, now_s + TIMEOUT_S)


def drop_sent(pending: deque[memoryview], sent: int) -> None:
    """Remove the first `sent` bytes from a queue of buffers."""
    while sent:
        first = pending[0]
        if sent < first.nbytes:
            pending[0] = first[sent:]
            return
        sent -= first.nbytes
        pending.popleft()


def close_in_children(sock: socket.socket) -> None:
    """Let no child that this process forks from now on keep the socket open."""
    _not_for_children.add(sock)


def _close_inherited() -> None:
    for sock in list(_not_for_children):
        sock.close()


os.register_at_fork(after_in_child=_close_inherited)


def tune(sock: socket.socket) -> None:
    """Set the socket options of the data plane: no delay for small frames, and detection of dead peers."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" or "[v6::address]:port". Raises ConnectionError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535):
        raise ConnectionError(f"{address!r} is not an address: expected host:port, or [v6 address]:port.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _flat(buffer: bytes | memoryview) -> memoryview:
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")  # cast refuses an empty view


def _close_fds(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
