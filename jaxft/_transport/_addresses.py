"""Where this process and the coordinator are reached: names, network interfaces and routes, read once at a start.

The groups tell each other addresses in digits, so that a job that trains needs no name server. A name is resolved
here: of the coordinator with each dial, of this process (`host`) when it starts. The resolver of the system blocks,
by default for half a minute while no name server answers (resolv.conf(5)), so a thread asks it.
"""

import contextlib
import fcntl
import logging
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from jaxft_protocol.values import SLOW_WAIT_S

from jaxft._errors import ConfigurationError, CoordinatorUnreachable
from jaxft._transport._sockets import split_address

_log = logging.getLogger("jaxft")
_RETRY_S = 0.5
# A name server that works needs milliseconds. The resolver asks again after 5 s if a packet was lost.
_NAME_TIMEOUT_S = 10.0
# Of netdevice(7): asks for an interface's address of IPv4, which stands 20 bytes behind the name's start.
_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")

# A family, and an address as sockets of that family take it.
Target = tuple[int, tuple[Any, ...]]


def ip_of(host: str) -> IPv4Address | IPv6Address:
    """An address in digits, without its scope. Raises ValueError for anything else."""
    return ip_address(host.strip("[]").partition("%")[0])


def in_digits(address: str) -> bool:
    """Whether `host:port` needs no name server: the host is in digits, or this is no address at all."""
    try:
        ip_of(split_address(address)[0])
    except ValueError:
        return False
    except ConnectionError:  # `targets_of` raises it
        pass
    return True


def targets_of(address: str, limit_s: float) -> list[Target]:
    """Where to connect to for an address `host:port`: one target or more, in the order of preference.

    Raises:
        ConnectionError: that is no address.
        OSError: the name is unknown, or no name server has answered within `limit_s`, or 10 s.
        UnicodeError: the name cannot be one: a label of it is empty or too long.
    """
    name, port = split_address(address)
    answers: queue.SimpleQueue[list[Target] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            answers.put([(family, where) for family, _, _, _, where in found])
        except Exception as error:  # raised below, in the thread that needs the name
            answers.put(error)

    if in_digits(address):
        ask()
    else:
        try:
            threading.Thread(target=ask, name="jaxft-name", daemon=True).start()
        except RuntimeError as error:
            raise OSError(f"there is no thread that could ask a name server: {error}") from error
    most_s = min(limit_s, _NAME_TIMEOUT_S)
    try:
        answer = answers.get(timeout=max(0.0, most_s))
    except queue.Empty:
        raise TimeoutError(f"no name server has answered within {most_s:.3g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def own_address(coordinator: str, limit_s: float) -> str:
    """The address of the interface that routes to the coordinator; the other groups can reach it too.

    A scheduler may start this process before the coordinator's name is known, as Kubernetes does, or before a network
    is up. So it asks again for `limit_s`.

    Raises:
        CoordinatorUnreachable: there is no route to any of them.
    """
    began_s = time.monotonic()

    def find() -> str:
        problems: list[str] = []
        for each in map(str.strip, coordinator.split(",")):
            try:
                return _address_towards(each, max(_RETRY_S, began_s + limit_s - time.monotonic()))
            except (OSError, UnicodeError) as error:
                problems.append(f"{each}: {error}")
        raise OSError("; ".join(problems))

    try:
        return _patiently(find, "a route to the coordinator", limit_s)
    except OSError as error:
        raise CoordinatorUnreachable(
            f"found no route to the coordinator within {limit_s:.3g} s ({error}). Check the host name, or pass "
            "`host=`, the address at which the other groups reach this one."
        ) from error


def given_address(host: str, limit_s: float) -> str:
    """The address in digits of `host`: digits, a network interface, or a name.

    A link may come up, and a name be known, later than this process starts. So it asks again for `limit_s`.

    Raises:
        ConfigurationError: it stayed none of them.
    """
    host = host.removeprefix("[").removesuffix("]")

    def find() -> str:
        with contextlib.suppress(ValueError):
            ip_of(host)
            return _written(host)
        interfaces = [name for _, name in socket.if_nameindex()]
        if host in interfaces:
            return _address_of_interface(host)
        try:
            (_, (ip, *_)), *_ = targets_of(f"{host}:1", max(_RETRY_S, limit_s))
        except (OSError, UnicodeError) as error:
            problem = f"no interface of this machine ({', '.join(interfaces)}), and as a name: {error}"
            raise OSError(problem) from error
        return _written(str(ip))

    try:
        return _patiently(find, f"an address of host {host!r}", limit_s)
    except OSError as error:
        raise ConfigurationError(
            f"host is {host!r}, which has led to no address for {limit_s:.3g} s: {error}. Give an address, or "
            "the name of a network interface (`ip addr` lists them), or leave `host=` and JAXFT_HOST out: then the "
            "address from which this machine reaches the coordinator is used."
        ) from error


def leads_elsewhere(host: str, coordinator: str) -> bool:
    """Whether other machines, which take `host` for themselves, may be meant to reach this one there.

    Then a name of the coordinator leads to this machine itself: Debian lists its own name as 127.0.1.1.
    """
    if not _is_loopback(host):
        return False
    names = [split_address(each.strip())[0] for each in coordinator.split(",")]
    return not any(name == "localhost" or _is_loopback(name) for name in names)


def _patiently(find: Callable[[], str], what: str, limit_s: float) -> str:
    """Return what `find` finds. While it raises OSError, ask again for `limit_s`; then raise the last one."""
    began_s = time.monotonic()
    deadline_s, slow_s = began_s + limit_s, began_s + SLOW_WAIT_S
    while True:
        try:
            return find()
        except OSError as error:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise
            if now_s >= slow_s:
                _log.warning("Still waiting for %s: %s.", what, error)
                slow_s = deadline_s
        time.sleep(min(_RETRY_S, deadline_s - now_s))


def _address_of_interface(name: str) -> str:
    """Its first address of IPv4, or else of IPv6 beyond its link. Raises OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
        return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(FileNotFoundError):  # there is no IPv6 here
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            packed, *_, held_by = line.split()
            ip = IPv6Address(bytes.fromhex(packed))
            if held_by == name and not ip.is_link_local:
                return _written(str(ip))
    raise OSError(f"network interface {name} has no address: see `ip addr show {name}`")


def _is_loopback(host: str) -> bool:
    try:
        return ip_of(host).is_loopback
    except ValueError:  # a name
        return False


def _address_towards(coordinator: str, limit_s: float) -> str:
    """Try the addresses of a name in turn: this machine may have no route to some of them."""
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
    return _written(f"{address}{zone}")


def _written(ip: str) -> str:
    """As an address has it before its port."""
    return f"[{ip}]" if ":" in ip else ip
