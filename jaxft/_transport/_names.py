"""Host names of other processes, resolved with a deadline.

The resolver of the system blocks: for half a minute, by default, while a name server does not answer (resolv.conf(5):
5 s for each try and server). So each name is looked up in a thread, and waited for only shortly. If no answer comes,
or only that the name is unknown, what it last stood for is used: a job that runs does not need its name server. The
handshake finds out whether the right process listens there.
"""

import logging
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

from jaxft._transport._interfaces import ip_of
from jaxft._transport._sockets import split_address

_log = logging.getLogger("jaxft")

# A name server that works answers within milliseconds, or within a few hops of it.
ANSWER_TIMEOUT_S = 2.0

# A family, and an address as sockets of that family take it.
Target = tuple[int, tuple[Any, ...]]


class _Lookup:
    """One question to the system's resolver, in a thread."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._began_s = time.monotonic()
        self._over = threading.Event()
        self._targets: list[Target] = []
        self._error: Exception = TimeoutError(f"no name server has answered within {ANSWER_TIMEOUT_S:g} s")
        try:
            threading.Thread(target=self._ask, name="jaxft-name", daemon=True).start()
        except RuntimeError:  # there is no room for one: without a deadline, then
            self._ask()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def is_old(self) -> bool:
        """Whether its answer came some time ago, and no one asked for it."""
        return self.over and time.monotonic() > self._began_s + ANSWER_TIMEOUT_S

    def targets(self) -> list[Target]:
        """What the name stands for. Raises OSError or UnicodeError, if no answer has come in time, too."""
        if self._over.wait(self._began_s + ANSWER_TIMEOUT_S - time.monotonic()) and self._targets:
            return self._targets
        raise self._error

    def _ask(self) -> None:
        try:
            self._targets = _resolved(self._address)
        except Exception as error:  # raised by `targets`, in the thread that needs the name
            self._error = error
        finally:
            self._over.set()


_lock = threading.Lock()
_under_way: dict[str, _Lookup] = {}
_last: dict[str, list[Target]] = {}  # an entry for each address of a group that this process has ever dialled


def look_up(addresses: Iterable[str]) -> None:
    """Begin to resolve the names in these addresses, all at once, for the calls of `targets_of` that follow."""
    for address in addresses:
        if not _in_digits(address):
            _lookup_of(address)


def targets_of(address: str) -> list[Target]:
    """What to connect to for an address `host:port`: one target or more, in the order of preference.

    Waits at most `ANSWER_TIMEOUT_S`, and not at all for a host in digits.

    Raises:
        OSError: the name is unknown, or no name server has answered, and it was never known here.
        UnicodeError: the name is none: a label of it is empty or too long.
    """
    if _in_digits(address):
        return _resolved(address)
    lookup = _lookup_of(address)
    try:
        targets = lookup.targets()
    except (OSError, UnicodeError) as error:
        with _lock:
            known = _last.get(address, [])
        if not known:
            raise
        _log.warning("Connects to %s at %s, as before: %s.", address, known[0][1][0], error)
        return known
    finally:
        with _lock:
            if lookup.over and _under_way.get(address) is lookup:
                del _under_way[address]
    with _lock:
        _last[address] = targets
    return targets


def _lookup_of(address: str) -> _Lookup:
    with _lock:
        lookup = _under_way.get(address)
        if lookup is None or lookup.is_old:
            lookup = _under_way[address] = _Lookup(address)
        return lookup


def _in_digits(address: str) -> bool:
    """Whether no name server is needed: the host is in digits, or this is no address at all."""
    try:
        ip_of(split_address(address)[0])
    except ValueError:
        return False
    except ConnectionError:  # `_resolved` says it
        pass
    return True


def _resolved(address: str) -> list[Target]:
    host, port = split_address(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, target) for family, _, _, _, target in found]
