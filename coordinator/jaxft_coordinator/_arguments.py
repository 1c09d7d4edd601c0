"""The arguments of `jaxft-coordinator`, and whether they fit together."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from jaxft_protocol.host.commands import empty_flags, host_and_port

from jaxft_coordinator.shell import limits

# Groups get times in milliseconds, as numbers of 32 bits. This is 24 days.
_MAX_MS = 2**31 - 1
# Four checks for silent groups fit into the shortest heartbeat timeout.
_RANGES = {
    "min_replicas": (1, limits.MAX_GROUPS_PER_JOB),
    "join_timeout_ms": (1, _MAX_MS),
    "heartbeat_timeout_ms": (400, _MAX_MS),
    "founding_wait_ms": (0, _MAX_MS),
}
_ADDRESSES = {"bind": "[::]:29510", "http": "[::]:29511"}
_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True)
class Arguments:
    """Decide, for any number of jobs, which replica groups take part in a step and whether it counts.

    `jaxft-coordinator token --token-file FILE JOB` prints the token that the groups of a job need.
    """

    bind: str = "[::]:29510"
    """Address to listen on, host:port."""
    min_replicas: int = 1
    """Groups that a quorum needs, for jobs that do not set it themselves. A job keeps its first number."""
    join_timeout_ms: int = 60_000
    """How long a job's first quorum waits for groups that compile; a step waits as long for a lost group."""
    heartbeat_timeout_ms: int = 5_000
    """Silence after which a group is considered dead. A death that closes its connection is noticed at once."""
    founding_wait_ms: int | None = None
    """How long a job that starts or resumes waits for groups with a newer state; default: the heartbeat timeout."""
    state: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder in which to record every decision, so that a restart resumes where it stopped. It must persist."""
    etcd: Annotated[str, tyro.conf.arg(metavar="HOST:PORT,...")] = ""
    """Record every decision in etcd instead. Of coordinators that share it, one leads and the others stand by."""
    etcd_ca: _File = None
    """CA that signed etcd's certificate, in PEM form; the connection to etcd then uses TLS."""
    etcd_cert: _File = None
    """Certificate to present to etcd, if it asks for one. Its common name is the user there."""
    etcd_key: _File = None
    """Private key of that certificate."""
    token_file: _File = None
    """The coordinator's secret: groups must prove that they know their job's key, which is derived from it."""
    tls_cert: _File = None
    """Certificate to serve with, in PEM form; streams are then encrypted."""
    tls_key: _File = None
    """Private key of that certificate."""
    tls_client_ca: _File = None
    """CA that must have signed the groups' certificates."""
    http: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = ""
    """Address of the HTTP port, with page, API, health and metrics, such as [::]:29511. Empty: none."""
    http_actions: tyro.conf.FlagCreatePairsOff[bool] = False
    """Let those who hold a job's token, or the operator's, drain and evict groups and pause jobs over HTTP. Needs
    --token-file."""
    events: _File = None
    """File to which events are appended, one JSON object a line."""
    insecure: tyro.conf.FlagCreatePairsOff[bool] = False
    """Admit every client that can reach the port, also from other machines."""


@dataclass(frozen=True)
class TokenArguments:
    """Print the token that the groups of a job need, or the operator's. Keep it secret: `JAXFT_TOKEN=$(...)`."""

    token_file: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The coordinator's secret."""
    job: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="JOB")] = ""
    """The job's name."""
    operator: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the operator's token: it allows actions on all jobs (--http-actions), and no group to take part."""


def emptiness_of(words: Sequence[str]) -> str:
    """Which flag of a command line has an empty value that must name something; "" if none has."""
    for flag in empty_flags(words):
        if flag != "--http":
            return f"{flag} has an empty value, as from a shell variable that is not set: give it one, or omit it"
    return ""


def problem_of(arguments: Arguments) -> str:
    """Return the first problem of the arguments; "" if there is none."""
    for name, (least, most) in _RANGES.items():
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            return f"--{name.replace('_', '-')} must be {least} to {most}, not {value}"
    for name, example in _ADDRESSES.items():
        address = getattr(arguments, name)
        if not _may_be_address(name, address):
            return f"--{name} must be host:port, such as {example}, with a port up to 65535, not {address!r}"
    if problem := _problem_of_actions(arguments):
        return problem
    if arguments.state is not None and arguments.etcd:
        return "--state and --etcd exclude each other: decisions are recorded in one place"
    if not arguments.etcd:
        for name in ("etcd_ca", "etcd_cert", "etcd_key"):
            if getattr(arguments, name):
                return f"--{name.replace('_', '-')} needs --etcd with the addresses of etcd"
    return ""


def _problem_of_actions(arguments: Arguments) -> str:
    if arguments.http_actions and not (arguments.http and arguments.token_file):
        return "--http-actions needs --http, and --token-file, from which the tokens derive that allow them"
    if arguments.http_actions and not arguments.tls_cert and not _is_local(arguments.http):
        return (
            f"--http-actions on {arguments.http}, which other machines can reach, needs --tls-cert and --tls-key: "
            "tokens would cross the network unencrypted"
        )
    return ""


def exposure_of(arguments: Arguments) -> str:
    """Why unauthenticated clients could take part; "" if they cannot, or are meant to."""
    if arguments.token_file or arguments.tls_client_ca or arguments.insecure or _is_local(arguments.bind):
        return ""
    return (
        f"does not listen on {arguments.bind}, which other machines can reach, without a way to authenticate "
        "clients. Choose a way:\n"
        "  --token-file FILE    groups prove that they know their job's token (`jaxft-coordinator token --help`)\n"
        "  --tls-cert FILE --tls-key FILE --tls-client-ca FILE    groups show a certificate; encrypted\n"
        "  --insecure           any client that reaches the port can join any job, and disrupt it\n"
        "On one machine, --bind localhost:29510 needs none of them."
    )


def _may_be_address(flag: str, address: str) -> bool:
    """Whether a flag takes this address. gRPC would also listen on unix:PATH, but no group can dial it."""
    if not address:
        return flag != "bind"
    try:
        host_and_port(address)
    except ValueError:
        return False
    return True


def _is_local(bind: str) -> bool:
    host = bind.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may stand for any address
        return False
