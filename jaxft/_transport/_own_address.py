"""The address at which the others reach this machine: the one from which it reaches the coordinator."""

import contextlib
import logging
import socket
import time
from typing import Any

from jaxft._errors import CoordinatorUnreachable
from jaxft._transport._interfaces import ip_of
from jaxft._transport._names import SLOW_WAIT_S, targets_of
from jaxft._transport._sockets import split_address

_log = logging.getLogger("jaxft")
_RETRY_S = 0.5


def own_address(coordinator: str, limit_s: float) -> str:
    """The address of the interface that routes to the coordinator; the other groups can reach it too.

    A scheduler may start this process before the coordinator's name is known, as Kubernetes does, or before a network
    is up. So it asks again until there is a route.

    Args:
        coordinator: host:port, or several separated by commas.
        limit_s: how long to ask.

    Raises:
        CoordinatorUnreachable: there is no route to any of them.
    """
    began_s = time.monotonic()
    deadline_s, slow_s = began_s + limit_s, began_s + SLOW_WAIT_S
    while True:
        problems: list[str] = []
        for each in map(str.strip, coordinator.split(",")):
            try:
                return _address_towards(each, max(_RETRY_S, deadline_s - time.monotonic()))
            except (OSError, UnicodeError) as error:
                problems.append(f"{each}: {error}")
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise CoordinatorUnreachable(
                f"found no route to the coordinator within {limit_s:.3g} s ({'; '.join(problems)}). Check the host "
                "name, or pass `host=`, the address at which the other groups reach this one."
            )
        if now_s >= slow_s:
            _log.warning("Still waiting for a route to the coordinator: %s.", "; ".join(problems))
            slow_s = deadline_s
        time.sleep(min(_RETRY_S, deadline_s - now_s))


def leads_elsewhere(host: str, coordinator: str) -> bool:
    """Whether other machines, which take `host` for themselves, may be meant to reach this one there.

    So it is where a name of the coordinator leads to this machine itself: Debian lists its own name as 127.0.1.1.
    """
    if not _is_loopback(host):
        return False
    names = [split_address(each.strip())[0] for each in coordinator.split(",")]
    return not any(name == "localhost" or _is_loopback(name) for name in names)


def _is_loopback(host: str) -> bool:
    try:
        return ip_of(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return False


def _address_towards(coordinator: str, limit_s: float) -> str:
    """Try what a name stands for in turn: this machine may have no route to its IPv4 address, or to its IPv6 one."""
    *others, last = targets_of(coordinator, limit_s)
    for each in others:
        with contextlib.suppress(OSError):
            return _routed(*each)
    return _routed(*last)


def _routed(family: int, target: tuple[Any, ...]) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing: it only picks the route
        address, _, *scope = probe.getsockname()
    # Nothing connects to an address of a link (fe80::) without an interface. Its name must be the same there.
    zone = f"%{socket.if_indextoname(scope[1])}" if scope and scope[1] else ""
    return f"[{address}{zone}]" if ":" in address else address
