"""Whether a server could listen on an address of this machine, on all addresses that its name stands for.

gRPC is content with some of them: of `localhost`, with one of two families while another program has the port of the
other one, which would then get a part of the connections.
"""

import contextlib
import errno
import socket
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

# The address of a socket: host and port; for IPv6 flow and scope, too.
_Where: TypeAlias = tuple[Any, ...]

# How often to look for a port that is free at all addresses of a name.
_MOST_TRIES = 16
# An address of another machine, or of a kind that this machine does not have.
_ELSEWHERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_MORE_DESCRIPTORS = "raise the limit on open files: ulimit -n, LimitNOFILE= of systemd"
_ADVICE = {
    errno.EMFILE: _MORE_DESCRIPTORS,
    errno.ENFILE: _MORE_DESCRIPTORS,
    errno.EADDRINUSE: "choose another port, or see which program has it: ss -ltnp",
    errno.EACCES: "choose a port from 1024 on: lower ones are for root",
    errno.EADDRNOTAVAIL: "name an address of this machine, or [::] for all of them",
}


def check(address: str) -> None:
    """Take all addresses of host:port for a moment, without listening. Raises as `held` does."""
    with held(address):
        pass


@contextlib.contextmanager
def held(address: str) -> Generator[Sequence[str]]:
    """Hold all addresses of host:port without listening; give them, in digits. Port 0 has become one of the free.

    A server that sets SO_REUSEADDR can bind and listen there meanwhile, and no other program can (socket(7)).

    Raises:
        OSError: one of them is taken or forbidden, none is this machine's, or the name is unknown.
        ValueError: it is not host:port.
    """
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(each) for each in bound(address)]
        yield [_text(*sock.getsockname()[:2]) for sock in sockets]


def bound(address: str) -> list[socket.socket]:
    """Return a socket for each address of host:port, bound to it and not listening. Port 0: a free one, of them all.

    Raises:
        OSError: one of them is taken or forbidden, none is this machine's, or the name is unknown. Then none is
            bound.
        ValueError: it is not host:port.
    """
    host, port = host_and_port(address)
    host = host or "::"
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # as a coordinator does
    # gRPC takes both for this name, whatever the machine's list of hosts says.
    hosts = ("127.0.0.1", "::1") if host == "localhost" else (host,)
    every = (
        one[4]
        for each in hosts
        for one in socket.getaddrinfo(each, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    )
    wanted = list(dict.fromkeys(every))
    tries = 1
    while True:
        try:
            return _all_bound(wanted)
        except OSError as error:
            # The port that is free at the first address may be taken at the second one.
            if port or error.errno != errno.EADDRINUSE or tries == _MOST_TRIES:
                raise
        tries += 1


def _all_bound(wanted: Sequence[_Where]) -> list[socket.socket]:
    found: list[socket.socket] = []
    elsewhere: list[OSError] = []
    with contextlib.ExitStack() as opened:
        for host, port, *more in wanted:
            at = port or (found[0].getsockname()[1] if found else 0)
            try:
                found.append(opened.enter_context(_bound((host, at, *more))))
            except OSError as error:
                said = OSError(error.errno, f"{error.strerror}, at {host} port {at}")
                if error.errno not in _ELSEWHERE:
                    raise said from error
                elsewhere.append(said)
        if not found:
            raise elsewhere[0]
        opened.pop_all()
    return found


def _bound(where: _Where) -> socket.socket:
    family = socket.AF_INET if len(where) == 2 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As gRPC does: connections that have ended do not hold the port, and [::] takes IPv4 too.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            both = where[0] == "::" and socket.has_dualstack_ipv6()
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not both))
        sock.bind(where)
    except OSError:
        sock.close()
        raise
    return sock


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def advice(error: OSError | ValueError) -> str:
    """What to do about an error of `bound`."""
    if isinstance(error, socket.gaierror):
        return _ADVICE[errno.EADDRNOTAVAIL]
    number = error.errno if isinstance(error, OSError) else None
    return _ADVICE.get(number or 0, "name it as host:port, such as localhost:29510 or [::]:29510")


def problem(error: OSError | ValueError, flag: str) -> str:
    """Say what an error of `bound` means for the address of a flag, and what to do."""
    said = getattr(error, "strerror", None) or error
    return f"{said}. For {flag}, {advice(error)}."


def host_and_port(address: str) -> tuple[str, int]:
    """Return both parts of host:port. Raises ValueError if it is not that."""
    host, _, port = address.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    if not port.isdecimal() or int(port) > 65535 or (":" in host and not in_brackets):
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)
