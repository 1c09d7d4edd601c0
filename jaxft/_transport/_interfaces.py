"""The addresses of this host, and whether the network interfaces that hold them work.

The kernel tells without a packet sent, for the network namespace of this process, whatever /sys shows there.
"""

import ctypes
import os
import socket
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

# Of netdevice(7): up by configuration; and with a carrier, or of a kind that tells of none.
_UP, _RUNNING = 0x1, 0x40
# Where sockaddr_in and sockaddr_in6 have the address, and its length.
_PLACES = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}


class Held(NamedTuple):
    """An address that an interface of this host holds.

    Attributes:
        interface: its name, such as "eth0".
        address: without a scope.
        works: the interface is up, and has a carrier if it tells of one.
    """

    interface: str
    address: IPv4Address | IPv6Address
    works: bool


class _Entry(ctypes.Structure):
    """`struct ifaddrs` of getifaddrs(3)."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("other_end", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def held_addresses() -> list[Held]:
    """Read all of them. Raises OSError if the kernel does not tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.freeifaddrs.argtypes = [ctypes.POINTER(_Entry)]
    libc.freeifaddrs.restype = None
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        return list(_held(first))
    finally:
        libc.freeifaddrs(first)


def ip_of(host: str) -> IPv4Address | IPv6Address:
    """An address in digits, without its scope. Raises ValueError for anything else."""
    found = ip_address(host.partition("%")[0])
    # As a socket for both families names the address of IPv4 that it was reached at.
    return getattr(found, "ipv4_mapped", None) or found


def ips_of(host: str) -> tuple[IPv4Address | IPv6Address, ...]:
    """What a name, or an address in digits, stands for on this host; nothing if it is not known here."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(ip_of(str(where[0])) for *_, where in found)


def _held(entry: "ctypes._Pointer[_Entry]") -> Iterator[Held]:
    while entry:
        one = entry.contents
        family = ctypes.c_ushort.from_address(one.address).value if one.address else 0
        if family in _PLACES:
            start, size = _PLACES[socket.AddressFamily(family)]
            packed = ctypes.string_at(one.address + start, size)
            works = one.flags & (_UP | _RUNNING) == _UP | _RUNNING
            name = os.fsdecode(one.name).partition(":")[0]  # without the label of a second address
            yield Held(name, ip_address(packed), works)
        entry = one.next
