"""Where the other groups reach the processes of a group: the address of a member, which is text to the coordinator.

A member's address lists its ranks in their order, separated by commas. Each gives one `host:port`, or several that
are joined by "+": one for each of its network interfaces, or "-" in the place of one that is dead. "*4" at the end
says that it offers four threads for an exchange: "10.0.0.1:7000+10.1.0.1:7000*4".
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
_DEAD = "-"
# Compared as text: a peer may send digits without end.
_COUNTS = {str(number): number for number in range(1, MAX_THREADS + 1)}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One process, as the others reach it.

    Attributes:
        addresses: `host:port`, one for each network interface that takes part; "" for one that is dead.
        threads: how many threads it offers for an exchange.
    """

    addresses: tuple[str, ...]
    threads: int = 1

    def __str__(self) -> str:
        written = "+".join(address or _DEAD for address in self.addresses)
        return written + (f"*{self.threads}" if self.threads > 1 else "")

    @property
    def living(self) -> tuple[str, ...]:
        """The addresses of interfaces that work."""
        return tuple(filter(None, self.addresses))

    def way_to(self, other: "Endpoint", strand: int = 0) -> str:
        """The address at which this process dials another, for a heal or for a strand: strands take turns at them.

        Only what lives at both ends counts: addresses in the same place are in the same network, which a process
        without a living address there may not reach. If there is no such place, all that live at the other end count.
        """
        shared = [
            theirs for mine, theirs in zip(self.addresses, other.addresses, strict=False) if mine and theirs
        ]
        ways = shared or other.living or other.addresses
        return ways[strand % len(ways)]


def endpoints_at(address: str) -> tuple[Endpoint, ...]:
    """The processes of a member, by rank."""
    return tuple(map(_endpoint, address.split(",")))


def agreed_threads(addresses: Iterable[str]) -> int:
    """How many threads the members of a quorum use for an exchange: as many as all of them offer."""
    return min(endpoint.threads for address in addresses for endpoint in endpoints_at(address))


def has_lost(announced: str, now: str) -> bool:
    """Whether a member is no longer reached at one of the addresses that it has announced."""
    before, after = (
        {each for endpoint in endpoints_at(text) for each in endpoint.living} for text in (announced, now)
    )
    return not before <= after


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
        return Endpoint(_addresses(addresses), number)
    # What is no number stays part of an address, and dialling it fails with a message about it.
    return Endpoint(_addresses(text))


def _addresses(text: str) -> tuple[str, ...]:
    return tuple("" if address == _DEAD else address for address in text.split("+"))
