"""Host names of other processes, resolved with a deadline.

The resolver of the system blocks: for half a minute, by default, while no name server answers (resolv.conf(5): 5 s
for each try and server). So names are resolved in threads, and waited for only so long; what was known before is used
if no answer comes in time, or only that the name is unknown. A job that runs does not need its name server, and a
late answer is there for the next call. The handshake finds out whether the right process listens where a name leads.
"""

import logging
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

from jaxft._transport._interfaces import ip_of
from jaxft._transport._sockets import SLOW_WAIT_S, split_address

_log = logging.getLogger("jaxft")

# How long an answer is waited for if the host is known from before. A name server that works needs milliseconds.
KNOWN_TIMEOUT_S = 2.0
# If it is not: the resolver asks again after 5 s if a packet was lost, or asks a second server.
UNKNOWN_TIMEOUT_S = 10.0
# For so long an answer is not asked for again. Name servers give theirs for as long or longer.
FRESH_S = 5.0

# A family, and an address as sockets of that family take it.
Target = tuple[int, tuple[Any, ...]]


class _Host:
    """A name that this process dials, and where it leads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._asking = False
        self._found: list[Target] = []  # of the last answer that was no error
        self._found_s = 0.0
        self._error: Exception | None = None  # of the last answer
        self._warned = False  # that what was known before is used

    def ask(self, fresh_s: float) -> None:
        """Begin to resolve the name, unless that is under way or was done less than `fresh_s` ago."""
        with self._changed:
            if self._asking or (self._found and time.monotonic() < self._found_s + fresh_s):
                return
            self._asking = True
        try:
            threading.Thread(target=self._ask, name="jaxft-name", daemon=True).start()
        except RuntimeError as error:
            self._note([], OSError(f"there is no thread that could ask a name server: {error}"))

    def _ask(self) -> None:
        try:
            answers = socket.getaddrinfo(self._name, None, type=socket.SOCK_STREAM)
        except Exception as error:  # raised by `targets`, in the thread that needs the name
            self._note([], error)
        else:
            self._note([(family, where) for family, _, _, _, where in answers], None)

    def _note(self, found: list[Target], error: Exception | None) -> None:
        with self._changed:
            self._asking, self._error = False, error
            if found:
                self._found, self._found_s, self._warned = found, time.monotonic(), False
            self._changed.notify_all()

    def targets(self, limit_s: float) -> list[Target]:
        """Where the name leads, without ports. Raises OSError or UnicodeError if that was never known."""
        with self._changed:
            most_s = min(limit_s, KNOWN_TIMEOUT_S if self._found else UNKNOWN_TIMEOUT_S)
            in_time = self._changed.wait_for(lambda: not self._asking, min(most_s, SLOW_WAIT_S))
            if not in_time and most_s > SLOW_WAIT_S:
                _log.warning(
                    "Still waiting for a name server to answer for %s after %.0f s.", self._name, SLOW_WAIT_S
                )
                in_time = self._changed.wait_for(lambda: not self._asking, most_s - SLOW_WAIT_S)
            late = TimeoutError(f"no name server has answered within {most_s:.3g} s")
            known, error = self._found, self._error if in_time else late
            warned, self._warned = self._warned, bool(error and known)
        if error is not None and not known:
            raise error
        if error is not None and not warned:
            _log.warning("Connects to %s at %s, as before: %s.", self._name, known[0][1][0], error)
        return known


_lock = threading.Lock()
_hosts: dict[str, _Host] = {}  # as many as there are hosts, whatever processes come and go there


def look_up(addresses: Iterable[str]) -> None:
    """Begin to resolve the names in these addresses, all at once, for the calls of `targets_of` that follow."""
    for address in addresses:
        if not in_digits(address):
            _host_of(address).ask(FRESH_S)


def targets_of(address: str, limit_s: float, *, fresh_s: float | None = None) -> list[Target]:
    """What to connect to for an address `host:port`: one target or more, in the order of preference.

    Waits for a name server, but not for a host in digits.

    Args:
        address: "host:port" or "[v6 address]:port".
        limit_s: how long to wait at most.
        fresh_s: for so long an answer is not asked for again; by default FRESH_S.

    Raises:
        ConnectionError: that is no address.
        OSError: the name is unknown, or no name server has answered in time, and it was never known here.
        UnicodeError: the name is none: a label of it is empty or too long.
    """
    name, port = split_address(address)
    if in_digits(address):
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        return [(family, where) for family, _, _, _, where in found]
    host = _host_of(address)
    host.ask(FRESH_S if fresh_s is None else fresh_s)
    return [(family, (ip, port, *rest)) for family, (ip, _, *rest) in host.targets(limit_s)]


def _host_of(address: str) -> _Host:
    name, _ = split_address(address)
    with _lock:
        return _hosts.setdefault(name, _Host(name))


def in_digits(address: str) -> bool:
    """Whether no name server is needed: the host is in digits, or this is no address at all."""
    try:
        ip_of(split_address(address)[0])
    except ValueError:
        return False
    except ConnectionError:  # `targets_of` says it
        pass
    return True
