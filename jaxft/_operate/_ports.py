"""Whether a server that is to be started on this machine would get its ports: part of `jaxft doctor`."""

import errno
import socket
from collections.abc import Iterator

from jaxft._operate._findings import Finding, fail, ok, warn

# An address of another machine, or of a kind that this machine does not have.
_ELSEWHERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_ADVICE = {
    errno.EADDRINUSE: "choose another port, or see which program has it: ss -ltnp",
    errno.EACCES: "choose a port from 1024 on: lower ones are for root",
    errno.EADDRNOTAVAIL: "name an address of this machine, or [::] for all of them",
}


def ports(addresses: str) -> Iterator[Finding]:
    """Check that a server could listen on each of these addresses: host:port, separated by commas."""
    for address in (each.strip() for each in addresses.split(",")):
        try:
            bind(*host_and_port(address))
        except (OSError, ValueError) as error:
            number = error.errno if isinstance(error, OSError) else None
            yield fail(
                f"nothing could listen on {address}: {error}",
                _ADVICE.get(number or 0, "name it as host:port"),
            )
        else:
            yield ok(f"{address} is free: a server could listen there")


def held_here(address: str) -> Iterator[Finding]:
    """Say if a program of this machine holds a port at which a coordinator was expected, and does not answer."""
    try:
        bind(*host_and_port(address))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            yield warn(
                f"a program of this machine holds {address}: it is no coordinator, or one that hangs",
                "see which it is (ss -ltnp), and end it, or give the coordinator another port",
            )


def bind(host: str, port: int) -> None:
    """Listen for a moment on all addresses of a name.

    Raises:
        OSError: one of them is taken or forbidden, or none is this machine's.
    """
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # as a coordinator does
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    elsewhere: list[OSError] = []
    for family, _, _, _, where in found:
        try:
            # As gRPC listens: [::] takes IPv4 too.
            both = where[0] == "::" and socket.has_dualstack_ipv6()
            socket.create_server(where[:2], family=family, dualstack_ipv6=both).close()
        except OSError as error:
            if error.errno not in _ELSEWHERE:
                raise
            elsewhere.append(error)
    if len(elsewhere) == len(found):
        raise elsewhere[0]


def host_and_port(address: str) -> tuple[str, int]:
    """Return both parts of host:port. Raises ValueError if it is not that."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)
