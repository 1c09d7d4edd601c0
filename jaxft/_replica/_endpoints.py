"""Where the other groups reach the processes of a group: the address of a member, which is text to the coordinator.

A member's address lists its ranks in their order, separated by commas. Each gives one `host:port`, or several that
are joined by "+": one for each of its network interfaces. "*4" at the end says that it offers four threads for an
exchange: "10.0.0.1:7000+10.1.0.1:7000*4".
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Each thread has a connection to every other member.
MAX_THREADS = 64
# Unless told, one thread for so many cores of a process, but no more than a few: the rest compute, and each thread
# keeps a window of chunks for each peer.
_CORES_A_THREAD = 4
_USUAL_MAX_THREADS = 4
# The quota of this container in microseconds of each period: "200000 100000", or "max 100000" (cgroup-v2, cpu.max).
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
# Compared as text: a peer may send digits without end.
_COUNTS = {str(number): number for number in range(1, MAX_THREADS + 1)}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One process, as the others reach it.

    Attributes:
        addresses: `host:port`, one for each network interface that takes part.
        threads: how many threads it offers for an exchange.
    """

    addresses: tuple[str, ...]
    threads: int = 1

    def __str__(self) -> str:
        return "+".join(self.addresses) + (f"*{self.threads}" if self.threads > 1 else "")

    def address(self, strand: int = 0) -> str:
        """The address that a strand of an exchange dials: strands take turns at the interfaces."""
        return self.addresses[strand % len(self.addresses)]


def endpoints_at(address: str) -> tuple[Endpoint, ...]:
    """The processes of a member, by rank."""
    return tuple(map(_endpoint, address.split(",")))


def agreed_threads(addresses: Iterable[str]) -> int:
    """How many threads the members of a quorum use for an exchange: as many as all of them offer."""
    return min(endpoint.threads for address in addresses for endpoint in endpoints_at(address))


def usual_threads(interfaces: int) -> int:
    """How many threads this process offers for an exchange if the user has not said."""
    return max(interfaces, min(_USUAL_MAX_THREADS, _cores() // _CORES_A_THREAD), 1)


def _cores() -> int:
    """How many cores this process may use, also by the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota_us, period_us = _CPU_MAX.read_text().split()
        return cores if quota_us == "max" else min(cores, int(quota_us) // int(period_us))
    except (OSError, ValueError, ZeroDivisionError):  # no control groups of version 2
        return cores


def endpoint_of(hosts: Sequence[str], port: int, threads: int | None) -> Endpoint:
    """The endpoint of this process, which listens on `port`. Hosts may name another port."""
    addresses = tuple(host if _has_port(host) else f"{host}:{port}" for host in hosts)
    return Endpoint(addresses, threads or usual_threads(len(addresses)))


def _has_port(host: str) -> bool:
    name, colon, port = host.rpartition(":")
    # The colons of an IPv6 address without brackets do not separate a port.
    return bool(colon) and port.isdigit() and (":" not in name or name.endswith("]"))


def _endpoint(text: str) -> Endpoint:
    addresses, star, threads = text.partition("*")
    if star and (number := _COUNTS.get(threads)) is not None:
        return Endpoint(tuple(addresses.split("+")), number)
    # What is no number stays part of an address, and dialling it fails with a message about it.
    return Endpoint(tuple(text.split("+")))
