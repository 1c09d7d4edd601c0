"""Groups on other hosts: which group runs where, and the command that starts its part there."""

import contextlib
import os
import random
import secrets
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.processes._processes import TLS_VARIABLES
from jaxft_launch.processes._ranks import PORTS, Member, given_out

REMOTE_SHELL = Path(__file__).with_name("_remote_shell.py")
# Of the environment, what a program on another host should have too. The token goes another way.
PASSED_ON = (
    *("JAX", "XLA_", "NCCL_", "RCCL_"),
    *("PYTHONPATH", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "PATH", "VIRTUAL_ENV"),
)
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
# What is said of this machine alone, or of one process.
NOT_PASSED_ON = (
    *(
        "JAXFT_TOKEN",
        "JAXFT_HOST",
        "JAXFT_SPARE",
        "JAXFT_GROUP",
        "JAXFT_RANK",
        "JAXFT_NPROC",
        "JAXFT_PHASE_FILE",
    ),
    *(
        "JAX_COORDINATOR_ADDRESS",
        "JAX_LOCAL_DEVICE_IDS",
        "JAX_CUDA_VISIBLE_DEVICES",
        "JAX_ROCM_VISIBLE_DEVICES",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a group that runs on one host.

    Attributes:
        group: the name of the group.
        host: as the remote shell knows it.
        nodes: the number of hosts of the group.
        node: which of them this is, from 0.
        share: which of the groups on this host it is, from 0.
        shares: how many groups this host has.
    """

    group: str
    host: str
    nodes: int = 1
    node: int = 0
    share: int = 0
    shares: int = 1

    @property
    def name(self) -> str:
        return f"{self.group}@{self.host}"


def check_names(hosts: Sequence[str]) -> None:
    """Raise a LaunchError if a host has no possible name."""
    if not hosts:
        raise LaunchError(
            "--hosts names no host. Give them as A,B,..., or leave it out to start the groups here."
        )
    for host in hosts:
        if host.startswith("-") or "/" in host or len(host.split()) != 1:
            raise LaunchError(f"--hosts has {host!r}, which is no host. Give names as in HOST or USER@HOST.")


def parts_of(groups: Sequence[str], hosts: Sequence[str]) -> list[Part]:
    """Return where each group runs: on separate hosts, or beside others on one.

    Raises:
        LaunchError: the hosts cannot be shared evenly, or one of them is named twice.
    """
    if repeated := sorted({host for host in hosts if hosts.count(host) > 1}):
        raise LaunchError(f"--hosts names {', '.join(repeated)} twice. Name each host once.")
    if len(hosts) % len(groups) == 0:
        nodes = len(hosts) // len(groups)
        return [
            Part(group=group, host=hosts[number * nodes + node], nodes=nodes, node=node)
            for number, group in enumerate(groups)
            for node in range(nodes)
        ]
    if len(groups) % len(hosts) == 0:
        shares = len(groups) // len(hosts)
        return [
            Part(group=group, host=hosts[number // shares], share=number % shares, shares=shares)
            for number, group in enumerate(groups)
        ]
    raise LaunchError(
        f"--hosts names {len(hosts)} hosts, which {len(groups)} groups (spares among them) cannot share evenly: name "
        "as many hosts as groups, or a multiple, or a divisor."
    )


def check_reachable(coordinator: str, hosts: Sequence[str]) -> None:
    """Raise a LaunchError if the hosts cannot know the coordinator by this address."""
    if _is_loopback(coordinator.rpartition(":")[0]) and not all(_is_loopback(_bare(host)) for host in hosts):
        raise LaunchError(
            f"--coordinator {coordinator} is this machine for each host by itself: name an address that the hosts "
            "can reach."
        )


def http_for(hosts: Sequence[str], http: str, *, needed: bool) -> str:
    """Return the URL by which hosts reach the port `http` of this machine; "" if they cannot.

    Raises:
        LaunchError: they cannot, and it is needed.
    """
    host, _, port = http.rpartition(":")
    if host in ("", "0.0.0.0", "[::]"):
        host = own_name(hosts)
    if not _is_loopback(host) or all(_is_loopback(_bare(one)) for one in hosts):
        return f"http://{host}:{port}"
    if needed:
        raise LaunchError(
            f"--http {http} is for this machine alone, but the rules of --health are checked on each host: give an "
            f"address that they can reach, such as --http '[::]:{port}'."
        )
    return ""


def own_name(hosts: Sequence[str]) -> str:
    """Return the address by which these hosts reach this machine: that of the route to another machine, if any."""
    found = [route for host in hosts if (route := _route_to(_bare(host)))]
    outside = [route for route in found if not _is_loopback(route)]
    if outside or len(found) == len(hosts):
        return (outside or found)[0]
    return socket.gethostname()  # the remote shell alone knows the hosts, by other names


def _route_to(host: str) -> str:
    """Our address on the route to a host; "" if its name is unknown."""
    with contextlib.suppress(OSError):
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return in_url(probe.getsockname()[0])
    return ""


def in_url(host: str) -> str:
    """A host as it stands before a colon and a port."""
    return f"[{host}]" if ":" in host else host


def own_secret(folder: Path) -> Path:
    """Return the file with the secret of the coordinator that this launch starts; make it if there is none."""
    file = folder / "secret"
    with contextlib.suppress(FileExistsError), os.fdopen(os.open(file, _NEW_FILE, 0o600), "w") as new:
        new.write(secrets.token_hex(32))
    return file


def check_shell(text: str) -> list[str]:
    """Return the words of `--remote-shell`.

    Raises:
        LaunchError: it is no command, or there is no such program.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"--remote-shell {text!r} is no command: {error}.") from error
    if not words or shutil.which(words[0]) is None:
        raise LaunchError(
            f"--remote-shell {text!r}: there is no program {words[0] if words else ''!r} to run."
        )
    return words


def meeting_of(part: Part, parts: Sequence[Part]) -> str:
    """Return where the processes of a group with several hosts meet: a port of the first one."""
    first = next(one for one in parts if one.group == part.group)
    low, high = given_out()
    ports = [port for port in PORTS if not low <= port <= high] or list(PORTS)
    # The same for all parts of the group, and another one in every launch.
    chosen = random.Random(f"{os.getpid()} {part.group}").choice(ports)
    return f"{in_url(_bare(first.host))}:{chosen}"


def _bare(host: str) -> str:
    """A host without the user's name there."""
    return host.rpartition("@")[2]


def remote_member(
    part: Part,
    shell: Sequence[str],
    options: Sequence[str],
    program: Sequence[str],
    environment: Mapping[str, str],
    token: str,
) -> Member:
    """Return the part of a group as a process of this launch: a remote shell around another launcher.

    Args:
        part: which one.
        shell: the words before the host.
        options: of the other launcher.
        program: the user's.
        environment: what it gets besides our own `PASSED_ON`.
        token: the job's, whose coordinator this launch starts, without TLS; empty: that of our environment, if there
            is one, for a coordinator elsewhere.
    """
    whole = passed_on(os.environ) | dict(environment) | dict.fromkeys(TLS_VARIABLES if token else (), "")
    launch = [sys.executable, "-P", "-m", "jaxft_launch", "launch", "--attached", *options, "--", *program]
    assignments = [f"{name}={value}" for name, value in sorted(whole.items())]
    # Each word is quoted, for this one text is read by a shell there.
    texts = (shlex.join(words) for words in (["cd", os.getcwd()], ["exec", "env", *assignments, *launch]))
    command = " && ".join(texts)
    return Member(
        name=part.name,
        group=part.group,
        coordinator=None,
        extra={"JAXFT_TOKEN": token} if token else {},
        command=(sys.executable, "-I", "-S", str(REMOTE_SHELL), *shell, part.host, command),
    )


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what another host should have of this environment."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(PASSED_ON) and name not in NOT_PASSED_ON
    }


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")
