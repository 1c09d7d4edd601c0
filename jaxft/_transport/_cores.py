"""The cores near a network card: a thread that serves a connection there spares the way across the machine."""

import functools
import os
import socket
from collections.abc import Sequence, Set
from pathlib import Path

from jaxft._transport._interfaces import Held, held_addresses, ip_of

SYSFS = Path("/sys/class/net")
# As many as an exchange has threads by default. A container's cores may straddle two sides, with one on this side.
LEAST_CORES = 4


def cores_near(host: str, allowed: Set[int], held: Sequence[Held], sysfs: Path = SYSFS) -> frozenset[int]:
    """The cores on the side of the machine where a local address has its network card.

    Args:
        host: the local address, in digits.
        allowed: the cores that this process may use.
        held: the addresses of this host.
        sysfs: where the kernel tells of each interface.

    Returns:
        Those of them that are allowed; none if that is not known, no choice, or too few for the threads.
    """
    try:
        interface = next(each.interface for each in held if each.address == ip_of(host))
        listed = _cores((sysfs / interface / "device" / "local_cpulist").read_text())
    except (StopIteration, OSError, ValueError):  # a bridge or a tunnel has no device
        return frozenset()
    near = listed & allowed
    few = len(near) < min(LEAST_CORES, len(allowed) / 2)
    return frozenset() if near == allowed or few else frozenset(near)


def stay_near(socks: Sequence[socket.socket]) -> None:
    """Have the calling thread, until it ends, run on the cores near the network card that carries connections.

    The first of them counts: those of one strand share a card, except where a peer lacks one. Nothing happens where
    the cores are not known. Raises nothing.
    """
    try:
        if socks and (cores := _near(str(socks[0].getsockname()[0]), frozenset(os.sched_getaffinity(0)))):
            os.sched_setaffinity(0, cores)
    except OSError:  # the connection has ended, or the cores were taken away meanwhile
        return


@functools.lru_cache(maxsize=64)
def _near(host: str, allowed: frozenset[int]) -> frozenset[int]:
    return cores_near(host, allowed, held_addresses())


def _cores(listed: str) -> frozenset[int]:
    """Read a list as the kernel writes it: "0-3,8". Raises ValueError."""
    ranges = [part.partition("-") for part in listed.strip().split(",") if part]
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))
