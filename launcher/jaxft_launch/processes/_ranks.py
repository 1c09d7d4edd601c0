"""The environment of each process of a group: for it and for `jax.distributed`."""

import contextlib
import random
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxft_launch.processes._devices import environment_of, shares
from jaxft_launch.processes._processes import Child, Processes
from jaxft_launch.processes._warm import Warm

HOST = "127.0.0.1"
# Above the ports of most services.
PORTS = range(10_000, 65_536)
TRIES = 100
GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A group of a launch.

    Attributes:
        name: its name in the job.
        nproc: its number of processes on this machine.
        nodes: the number of machines that it has, with as many processes on each.
        node: which of them this is, from 0.
        meet: with several machines, where `jax.distributed` meets: HOST:PORT of the first one.
        coordinator: the address of the job's coordinator; None for a group without one.
        spare: whether it stands by.
        devices: the machine's devices that belong to it, dealt out to its ranks; empty: not limited.
        compilation_cache: the folder for its compiled programs.
        extra: further environment variables of all of its processes.
    """

    name: str
    nproc: int = 1
    nodes: int = 1
    node: int = 0
    meet: str = ""
    coordinator: str | None
    spare: bool = False
    devices: tuple[str, ...] = ()
    compilation_cache: Path | None = None
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """The number of its processes on all machines."""
        return self.nproc * self.nodes

    @property
    def ranks_here(self) -> range:
        """The numbers of its processes on this machine, among all of them."""
        return range(self.node * self.nproc, (self.node + 1) * self.nproc)

    def on(self, devices: tuple[str, ...]) -> "Member":
        """Return this group, which has one process, on some of its devices."""
        # For simulated devices; others are chosen by their numbers.
        extra = self.extra | {"JAX_NUM_CPU_DEVICES": str(len(devices))}
        return replace(self, devices=devices, extra=extra)

    def environment(self) -> dict[str, str]:
        """Return what all of its processes have in common."""
        found = {
            "JAXFT_NPROC": str(self.world),
            **({"JAXFT_SPARE": "1"} if self.spare else {}),
            **self.extra,
        }
        if self.coordinator is not None:
            found |= {"JAXFT_COORDINATOR": self.coordinator, "JAXFT_GROUP": self.name}
        if self.compilation_cache is not None:
            found |= cache_in(self.compilation_cache)
        return found

    def process_name(self, life: str, rank: int) -> str:
        """Return the name of a process in a life of that name."""
        return life if self.world == 1 else f"{life}.{rank}"

    def ranks(self) -> list[dict[str, str]]:
        """Return what each of its processes here has for itself in one life.

        On a single machine they meet at a port that is free now.
        """
        meeting = f"{HOST}:{free_ports(1)[0]}" if self.nproc > 1 else ""
        if self.nodes > 1:
            meeting = self.meet
        own = {"JAX_COORDINATOR_ADDRESS": meeting} if meeting else {}
        return [
            {"JAXFT_RANK": str(rank), **own, **environment_of(devices)}
            for rank, devices in zip(self.ranks_here, shares(self.devices, self.nproc), strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """How a process of a life is started: its command, its own environment, and where its pipe of orders is."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    orders: Path | None = None


def cache_in(folder: Path) -> dict[str, str]:
    """Return the environment of a group that keeps its compiled programs in a folder."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        # By default JAX caches only slow compilations; a restarted group needs every program at once.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def start_ranks(
    member: Member,
    starts: Sequence[RankStart],
    processes: Processes,
    *,
    name: str,
    warm: Warm | None,
) -> list[Child]:
    """Start the processes of one life of a group: the only place where that happens.

    Raises:
        OSError: one could not be started; the others do not run either.
    """
    started: list[Child] = []
    try:
        for rank, own, start in zip(member.ranks_here, member.ranks(), starts, strict=True):
            child = processes.start(
                member.process_name(name, rank),
                start.words,
                orders=start.orders,
                environment={**member.environment(), **own, **start.environment},
                warm=warm,
            )
            started.append(child)
    except BaseException:
        processes.end(started, timeout_s=0.0)
        raise
    return started


def free_ports(count: int) -> list[int]:
    """Return different ports that no program listens on.

    They are not among the ports that the kernel gives to connections and to listeners on any port: such a port may
    be taken before the program for which it is meant listens on it.
    """
    with ExitStack() as stack:
        listeners = [stack.enter_context(_listener()) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def _listener() -> socket.socket:
    """A listener on a port of `PORTS` that the kernel does not give out, or on any port if they are all taken."""
    low, high = given_out()
    ours = [port for port in PORTS if not low <= port <= high]
    for port in random.sample(ours, min(TRIES, len(ours))):
        with contextlib.suppress(OSError):
            return socket.create_server((HOST, port))
    return socket.create_server((HOST, 0))


def given_out() -> tuple[int, int]:
    """Return the first and the last port that the kernel gives out."""
    try:
        low, high = GIVEN_OUT.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 65535
