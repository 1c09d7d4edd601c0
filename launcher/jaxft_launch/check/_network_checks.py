"""What `jaxft doctor` checks between this machine and the others."""

import socket
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import grpc
from jaxft_protocol.host.ports import host_and_port

from jaxft._errors import JaxftError
from jaxft._replica._config import GroupConfig
from jaxft._session._channel_target import channel_target
from jaxft._transport._endpoints import endpoints_at
from jaxft._transport._half_open import bind
from jaxft._transport._sockets import split_address
from jaxft_launch.check._certificates import served, served_by
from jaxft_launch.check._findings import Finding, fail, ok, warn
from jaxft_launch.check._ports import held_here
from jaxft_launch.client._clock import ClockDifference, clock_difference
from jaxft_launch.client._port import ask, job_path

TIMEOUT_S = 5.0
# jaxft itself measures no time across machines. But logs and events of two machines can only be put in order while
# their clocks differ by less than a step takes, and machines that are synchronised differ by milliseconds.
SKEW_S = 1.0
_HEALTH = "/grpc.health.v1.Health/Check"
_SERVICE = b"jaxft.v1.Coordinator"
_MOST_GROUPS = 50


def coordinators(
    addresses: str, *, ca: Path | None = None, cert: Path | None = None, key: Path | None = None
) -> Iterator[Finding]:
    """Check that each coordinator answers, that the certificate it serves is valid, and that one leads.

    Args:
        addresses: host:port, separated by commas.
        ca: the authority of their certificates, if they use TLS.
        cert: this group's certificate, if they ask for one.
        key: its private key.
    """
    leads = 0
    if (cert is None) != (key is None):
        given, lacking = ("certificate", "key") if key is None else ("key", "certificate")
        yield fail(
            f"TLS with the coordinator needs a group's certificate and its key, but the {lacking} is missing",
            f"name it beside the {given}: --tls-cert and --tls-key, or JAXFT_TLS_CERT and JAXFT_TLS_KEY",
        )
        return
    try:
        proven = _credentials(ca, cert, key)
    except OSError as error:
        yield fail(
            f"the files for TLS with the coordinator cannot be read: {error}", "name files in PEM form"
        )
        return
    for address in (each.strip() for each in addresses.split(",")):
        try:
            host, port = host_and_port(address)
        except ValueError as error:
            yield fail(f"the coordinator's address cannot be used: {error}", "write it as coordinator:29510")
            continue
        if proven is not None:
            yield served_by(f"the coordinator {address}", host, port)
        try:
            status = _health(address, proven)
        except ConnectionError as error:
            yield fail(
                f"the coordinator {address} is not reached: {error}",
                f"check the name, and what knows it on this machine: `getent ahosts {host}`",
            )
            continue
        except grpc.RpcError as error:
            code, details = error.code().name, error.details()  # pyright: ignore[reportAttributeAccessIssue]
            yield fail(
                f"the coordinator {address} does not answer: {code}, {details}",
                _advice(host, port, plain=proven is None),
            )
            if not _shows_certificate(host, port):
                yield from held_here(address)
            continue
        leads += status == 1
        yield ok(f"the coordinator {address} answers, and {'leads' if status == 1 else 'stands by'}")
    if not leads:
        yield fail(
            "no coordinator leads", "start one; if several stand by, look at their logs and at their store"
        )


def _advice(host: str, port: int, *, plain: bool) -> str:
    listens = "check that it runs (its log says on which port), and the network between"
    usual = f"{listens}, and TLS: --tls-ca"
    if not plain:
        return usual
    try:
        served(host, port)
    except (ConnectionRefusedError, socket.gaierror):
        return listens
    except OSError as error:
        return f"{usual}; a handshake of TLS ends with: {error}"
    return "it serves TLS: name the authority that signed its certificate with --tls-ca"


def _shows_certificate(host: str, port: int) -> bool:
    """Whether what listens there speaks TLS, as a coordinator does whose certificate is not trusted."""
    try:
        served(host, port)
    except OSError:
        return False
    return True


def _credentials(ca: Path | None, cert: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    if ca is None and cert is None:
        return None
    texts = [None if path is None else path.read_bytes() for path in (ca, key, cert)]
    return grpc.ssl_channel_credentials(*texts)


def _health(address: str, proven: grpc.ChannelCredentials | None) -> int:
    """Return the status of the coordinator's service as gRPC's health protocol numbers it: 1 serves."""
    target, options = channel_target(address, TIMEOUT_S)  # as a group connects
    channel = (
        grpc.insecure_channel(target, options)
        if proven is None
        else grpc.secure_channel(target, proven, options)
    )
    with channel:
        request = b"\x0a" + bytes([len(_SERVICE)]) + _SERVICE
        answer: bytes = channel.unary_unary(_HEALTH)(request, timeout=TIMEOUT_S)
    return answer[1] if len(answer) > 1 else 0


def own_address(coordinator: str, host: str | None) -> Iterator[Finding]:
    """Check that this machine reaches itself at the address that it would give to the other groups.

    That the others reach it there, too, only they can show: a firewall, or a name that means another machine
    elsewhere, is not seen from here.
    """
    try:
        with bind("", 0) as listening:
            config = GroupConfig(coordinator=coordinator, group="doctor", host=host)
            address = config.endpoint(listening.getsockname()[1], limit_s=TIMEOUT_S).address
            listening.settimeout(TIMEOUT_S)
            where = split_address(address)
            with socket.create_connection(where, TIMEOUT_S):
                pass
    except (OSError, JaxftError) as error:
        yield fail(
            f"this machine cannot reach itself at its own address: {error}",
            "pass `Manager(host=...)` or JAXFT_HOST: the address at which the other groups reach this one",
        )
        return
    if where[0] in ("127.0.0.1", "::1") and "localhost" not in coordinator:
        yield warn(
            f"the other groups would be told to reach this one at {where[0]}, which is every machine's own",
            "pass `Manager(host=...)` or JAXFT_HOST, unless all groups run here",
        )
        return
    yield ok(f"this machine reaches itself at {where[0]}, which it would tell the other groups")


def peers(url: str, *, ca: Path | None = None) -> Iterator[Finding]:
    """Check that this machine reaches the groups that are there, and that its clock agrees with the coordinator's.

    Args:
        url: the address of the coordinator's HTTP port; if it begins with https, its certificate is checked too.
        ca: the authority of its certificate; by default that of JAXFT_HTTP_CA, or those this machine trusts.
    """
    try:
        yield from _http_certificate(url)
        yield clock(clock_difference(url, ca=ca))
        for job in ask(url, "jobs", ca=ca)["jobs"]:
            groups = ask(url, job_path(job["job"]), ca=ca)["group_list"]
            there = [group for group in groups if "address" in group][:_MOST_GROUPS]
            yield from (_reached(job["job"], group["group"], group["address"]) for group in there)
    except JaxftError as error:
        yield fail(str(error), "without it, the clock and the way to the other groups cannot be checked")


def _http_certificate(url: str) -> Iterator[Finding]:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or 443
    except ValueError:
        return  # who asks that address says what is wrong with it
    if parts.scheme == "https":
        yield served_by(f"the HTTP port {url}", parts.hostname or "", port)


def _reached(job: str, group: str, address: str) -> Finding:
    """Check each process of a group."""
    every = [endpoint.address for endpoint in endpoints_at(address)][:_MOST_GROUPS]
    each = ""
    try:
        for each in every:
            with socket.create_connection(split_address(each), TIMEOUT_S):
                pass
        return ok(f"group {group!r} of job {job!r} is reached at {', '.join(every)}")
    except OSError as error:
        return fail(
            f"group {group!r} of job {job!r} is not reached at {each}: {error}",
            "open all ports between the hosts of a job's groups; if it listens elsewhere, set its JAXFT_HOST",
        )


def clock(found: ClockDifference) -> Finding:
    """Judge a difference of clocks: a warning if it exceeds SKEW_S, or if the measurement cannot exclude that."""
    if found.most_s <= SKEW_S:
        return ok(f"this machine's clock agrees with the coordinator's: it is {found}")
    if found.least_s <= SKEW_S:
        return warn(
            f"this machine's clock may differ by more than {SKEW_S:g} s from the coordinator's: it is {found}",
            "run this again on a quiet machine or network: half of a round trip is the uncertainty",
        )
    return warn(
        f"this machine's clock is {found}, more than {SKEW_S:g} s",
        "synchronise both (chrony, systemd-timesyncd): otherwise logs cannot be compared, and certificates may be "
        "refused",
    )
