"""Where the other groups reach the processes of a group: the address of a member, which is text to the coordinator.

A member's address lists its ranks in their order, separated by commas, each as `host:port` in digits. "*4" at its end
means that the rank offers four threads for an exchange: "10.0.0.1:7000*4,10.0.0.1:7001*4".
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Each thread has a connection to every other member.
MAX_THREADS = 64
# By default one thread for this many cores of a process, but no more than a few: the rest compute, and each thread
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
        address: `host:port`.
        threads: how many threads it offers for an exchange.
    """

    address: str
    threads: int = 1

    def __str__(self) -> str:
        return self.address + (f"*{self.threads}" if self.threads > 1 else "")


def endpoints_at(address: str) -> tuple[Endpoint, ...]:
    """The processes of a member, by rank."""
    return tuple(map(_endpoint, address.split(",")))


def agreed_threads(addresses: Iterable[str]) -> int:
    """How many threads the members of a quorum use for an exchange: as many as all of them offer."""
    return min(endpoint.threads for address in addresses for endpoint in endpoints_at(address))


def usual_threads() -> int:
    """How many threads this process offers for an exchange by default."""
    return max(1, min(_USUAL_MAX_THREADS, _cores() // _CORES_A_THREAD))


def _cores() -> int:
    """How many cores this process may use, also by the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota_us, period_us = _CPU_MAX.read_text().split()
        return cores if quota_us == "max" else min(cores, int(quota_us) // int(period_us))
    except (OSError, ValueError, ZeroDivisionError):  # no control groups of version 2
        return cores


def _endpoint(text: str) -> Endpoint:
    address, star, threads = text.partition("*")
    if star and (number := _COUNTS.get(threads)) is not None:
        return Endpoint(address, number)
    # Other text stays part of the address, and dialling it fails with a message about it.
    return Endpoint(text)
