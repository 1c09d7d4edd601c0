"""Whether a server that is to be started on this machine would get its ports: part of `jaxft doctor`."""

import errno
from collections.abc import Iterator

from jaxft_protocol.host.ports import advice, check

from jaxft_launch.check._findings import Finding, fail, ok, warn


def ports(addresses: str) -> Iterator[Finding]:
    """Check that a server could listen on each of these addresses: host:port, separated by commas."""
    for address in (each.strip() for each in addresses.split(",")):
        try:
            check(address)
        except (OSError, ValueError) as error:
            yield fail(f"nothing could listen on {address}: {error}", advice(error))
        else:
            yield ok(f"{address} is free: a server could listen there")


def held_here(address: str) -> Iterator[Finding]:
    """Say if a program of this machine holds a port at which a coordinator was expected, and does not answer."""
    try:
        check(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            yield warn(
                f"a program of this machine holds {address}: it is no coordinator, or one that hangs",
                "see which it is (ss -ltnp), and end it, or give the coordinator another port",
            )
