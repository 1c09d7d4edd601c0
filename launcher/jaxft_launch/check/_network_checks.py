"""What `jaxft doctor` checks between this machine and the others."""

import os
import socket
import time
from collections.abc import Iterator

import grpc
from jaxft_protocol.host.commands import host_and_port

from jaxft import Network
from jaxft._errors import JaxftError
from jaxft._session._credentials import Credentials
from jaxft._session._stream import channel_target
from jaxft._transport._door import bind
from jaxft._transport._sockets import split_address
from jaxft_launch.check._machine_checks import Finding, fail, ok, warn

TIMEOUT_S = 5.0
EXPIRES_SOON_S = 14 * 86400.0
_HEALTH = "/grpc.health.v1.Health/Check"
_SERVICE = b"jaxft.v1.Coordinator"


def findings(coordinator: str) -> Iterator[Finding]:
    """Check the certificates, that each coordinator answers and one leads, and the address of this machine.

    `coordinator`: host:port, separated by commas. The environment names the files and the address, as for a group.
    """
    try:
        proven = Credentials.read(None, None)
    except JaxftError as error:
        yield fail(str(error), "see docs/security.md")
        return
    yield from certificate(proven, time.time())
    yield from coordinators(coordinator, proven)
    yield own_address(coordinator, os.environ.get("JAXFT_HOST") or None)


def certificate(proven: Credentials, now_s: float) -> Iterator[Finding]:
    """Check that the certificates of this group are valid for a while."""
    if proven.pem is None:
        return
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(proven.pem.until_s))
    if proven.pem.until_s < now_s:
        yield fail(f"a certificate of this group expired on {until}", "renew it, and start the group again")
    elif proven.pem.until_s < now_s + EXPIRES_SOON_S:
        yield warn(
            f"a certificate of this group expires on {until}",
            "renew it in time, and start the group again: it cannot connect with it after that",
        )
    else:
        yield ok(f"the certificates of this group are valid until {until}")


def coordinators(addresses: str, proven: Credentials) -> Iterator[Finding]:
    """Check that each coordinator answers, and that one leads. `addresses`: host:port, separated by commas."""
    leads = 0
    for address in (each.strip() for each in addresses.split(",")):
        try:
            host_and_port(address)
            status = _health(address, proven)
        except (OSError, ValueError) as error:
            yield fail(f"the coordinator {address} is not reached: {error}", "write it as coordinator:29510")
        except grpc.RpcError as error:
            code, details = error.code().name, error.details()  # pyright: ignore[reportAttributeAccessIssue]
            yield fail(
                f"the coordinator {address} does not answer: {code}, {proven.explained(str(details))}",
                "check that it runs (its log names the port), and the network between",
            )
        else:
            leads += status == 1
            yield ok(f"the coordinator {address} answers, and {'leads' if status == 1 else 'stands by'}")
    if not leads:
        yield fail(
            "no coordinator leads", "start one; if several stand by, look at their logs and at their store"
        )


def _health(address: str, proven: Credentials) -> int:
    """Return the status of the coordinator's service as gRPC's health protocol numbers it: 1 serves."""
    target, options = channel_target(address, TIMEOUT_S)  # as a group connects
    if proven.pem is None:
        channel = grpc.insecure_channel(target, options)
    else:
        files = grpc.ssl_channel_credentials(proven.pem.ca, proven.pem.key, proven.pem.cert)
        channel = grpc.secure_channel(target, files, options)
    with channel:
        request = b"\x0a" + bytes([len(_SERVICE)]) + _SERVICE
        answer: bytes = channel.unary_unary(_HEALTH)(request, timeout=TIMEOUT_S)
    return answer[1] if len(answer) > 1 else 0


def own_address(coordinator: str, host: str | None) -> Finding:
    """Check that this machine reaches itself at the address that it would give to the other groups.

    That the others reach it there, too, only they can show: a firewall, or a name that means another machine
    elsewhere, is not seen from here.
    """
    try:
        with bind("", 0) as listening:
            port = listening.getsockname()[1]
            address = Network(host=host).endpoint(port, coordinator, limit_s=TIMEOUT_S).address
            listening.settimeout(TIMEOUT_S)
            where = split_address(address)
            with socket.create_connection(where, TIMEOUT_S):
                pass
    except (OSError, JaxftError) as error:
        return fail(
            f"this machine cannot reach itself at its own address: {error}",
            "pass `Network(host=...)` or set JAXFT_HOST: the address at which the other groups reach this one",
        )
    if where[0] in ("127.0.0.1", "::1") and "localhost" not in coordinator:
        return warn(
            f"the other groups would try to reach this group at {where[0]}, which is every machine's own",
            "pass `Network(host=...)` or set JAXFT_HOST, unless all groups run here",
        )
    return ok(f"this machine reaches itself at {where[0]}, which it would tell the other groups")
