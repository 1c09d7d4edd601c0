"""Whether a server could listen on an address of this machine, on all addresses that its name stands for.

gRPC is content with some of them: of `localhost`, with one of two families while another program has the port of the
other one, which would then get a part of the connections.
"""

import errno
import socket

# An address of another machine, or of a kind that this machine does not have.
_ELSEWHERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_ADVICE = {
    errno.EADDRINUSE: "choose another port, or see which program has it: ss -ltnp",
    errno.EACCES: "choose a port from 1024 on: lower ones are for root",
    errno.EADDRNOTAVAIL: "name an address of this machine, or [::] for all of them",
}


def check(address: str) -> None:
    """Take all addresses of host:port for a moment, without listening, so that no connection arrives meanwhile.

    Raises:
        OSError: one of them is taken or forbidden, none is this machine's, or the name is unknown.
        ValueError: it is not host:port.
    """
    host, port = host_and_port(address)
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # as a coordinator does
    # gRPC takes both for this name, whatever the machine's list of hosts says.
    hosts = ("127.0.0.1", "::1") if host == "localhost" else (host or None,)
    found = [
        one
        for each in hosts
        for one in socket.getaddrinfo(each, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    ]
    elsewhere: list[OSError] = []
    for family, _, _, _, where in found:
        try:
            _take(family, where)
        except OSError as error:
            said = OSError(error.errno, f"{error.strerror}, at {where[0]} port {where[1]}")
            if error.errno not in _ELSEWHERE:
                raise said from error
            elsewhere.append(said)
    if len(elsewhere) == len(found):
        raise elsewhere[0]


def _take(family: int, where: tuple[object, ...]) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        # As gRPC does: connections that have ended do not hold the port, and [::] takes IPv4 too.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            both = where[0] == "::" and socket.has_dualstack_ipv6()
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not both))
        sock.bind(where)


def advice(error: OSError | ValueError) -> str:
    """What to do about an error of `check`."""
    if isinstance(error, socket.gaierror):
        return _ADVICE[errno.EADDRNOTAVAIL]
    number = error.errno if isinstance(error, OSError) else None
    return _ADVICE.get(number or 0, "name it as host:port, such as localhost:29510 or [::]:29510")


def host_and_port(address: str) -> tuple[str, int]:
    """Return both parts of host:port. Raises ValueError if it is not that."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)
