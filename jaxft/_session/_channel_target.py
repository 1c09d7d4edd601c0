"""Where gRPC connects to for a coordinator's address.

gRPC would resolve the name itself. It asks a name server even for what /etc/hosts knows, if that has no address of
IPv6. So the system resolves names, with each dial, for the coordinator may have moved; and gRPC gets addresses.
"""

import socket
from collections.abc import Sequence
from typing import Any

from jaxft._transport._addresses import Target, in_digits, targets_of
from jaxft._transport._sockets import split_address

# gRPC would take the proxy of the variable http_proxy, even to this machine. Groups need a direct way to each other
# anyway.
_DIRECT = ("grpc.enable_http_proxy", 0)


def channel_target(address: str, limit_s: float) -> tuple[str, list[tuple[str, Any]]]:
    """Resolve a coordinator's address; return the target of a channel, and the options that belong to it.

    Args:
        address: host:port.
        limit_s: how long to wait for a name server.

    Raises:
        ConnectionError: the name is unknown, or no name server has answered in time.
    """
    if in_digits(address):
        return address, [_DIRECT]
    try:
        found = targets_of(address, limit_s)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConnectionError(f"the host name in {address!r} is unknown: {why}") from error
    # What it would be if gRPC resolved the name: proxies route by it, and certificates name it.
    named = [
        ("grpc.default_authority", address),
        ("grpc.ssl_target_name_override", split_address(address)[0]),
    ]
    return _target(found), [_DIRECT, *named]


def _target(found: Sequence[Target]) -> str:
    """All addresses, in their order: gRPC tries the next one if one does not answer soon."""
    if all(family == socket.AF_INET for family, _ in found):
        return "ipv4:" + ",".join(f"{ip}:{port}" for _, (ip, port, *_) in found)
    # A target has addresses of one family, and those of IPv4 can be written as of IPv6.
    return "ipv6:" + ",".join(
        f"[::ffff:{ip}]:{port}" if family == socket.AF_INET else f"[{ip}]:{port}"
        for family, (ip, port, *_) in found
    )
