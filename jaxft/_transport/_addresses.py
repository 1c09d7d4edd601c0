"""The addresses that this process announces: those whose network interfaces work."""

import logging
import threading
from collections.abc import Callable, Sequence

from jaxft._errors import JaxftError
from jaxft._transport._endpoints import Endpoint
from jaxft._transport._interfaces import Held, held_addresses, ip_of, ips_of
from jaxft._transport._sockets import split_address

_log = logging.getLogger("jaxft")


class Addresses:
    """Where the others reach this process, read again for each join. Any thread may use it.

    An address is dead if all interfaces that hold it are down or without carrier, or if the one that held it before
    has lost it. One that no interface has ever held is taken as living: it may be forwarded to this host. One
    that was found, and not given, is replaced once no interface holds it: the host has another one now.

    Args:
        endpoint: all addresses. A single one that was given is never looked at; names are resolved once, here.
        group: the name of this group, for the log.
        read: reads the addresses of this host.
        find: finds the host of the only address again, if it was found and not given. May raise JaxftError.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        group: str,
        read: Callable[[], Sequence[Held]] = held_addresses,
        find: Callable[[], str] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._group = group
        self._read = read
        self._find = find
        several = endpoint.addresses if len(endpoint.addresses) > 1 else ()
        self._ips = {address: ips_of(split_address(address)[0]) for address in several}
        self._interfaces: dict[str, str] = {}  # that held an address when last seen
        self._dead = frozenset[str]()
        self._lock = threading.Lock()

    def now(self) -> Endpoint:
        """The endpoint without the addresses that are dead now; the log names each that dies or is back.

        All of them if all are dead, or if the kernel does not tell: then the others find out.
        """
        with self._lock:
            try:
                self._follow()
                dead = self._look()
            except OSError:
                return self._endpoint
            if dead and len(dead) == len(self._ips):
                return self._endpoint
            self._tell(dead)
            living = ("" if address in dead else address for address in self._endpoint.addresses)
            return Endpoint(tuple(living), self._endpoint.threads)

    def _follow(self) -> None:
        """Take the address that this host has now, if it has lost the one that was found."""
        if self._find is None:
            return
        (before,) = self._endpoint.addresses
        host, port = split_address(before)
        if any(one.address == ip_of(host) for one in self._read()):
            return
        try:
            now = f"{self._find()}:{port}"
        except JaxftError:  # no route yet
            return
        if now == before:
            return
        self._endpoint = Endpoint((now,), self._endpoint.threads)
        _log.warning(
            "[jaxft %s] no network interface of this host holds %s any more. So this group announces %s instead; to "
            "choose an address, pass `Manager(host=...)`.",
            *(self._group, host, now),
        )

    def _look(self) -> frozenset[str]:
        held = self._read() if self._ips else ()
        return frozenset(address for address in self._ips if self._is_dead(address, held))

    def _is_dead(self, address: str, held: Sequence[Held]) -> bool:
        holders = [one for one in held if one.address in self._ips[address]]
        if not holders:
            return address in self._interfaces
        self._interfaces[address] = holders[0].interface
        return not any(one.works for one in holders)

    def _tell(self, dead: frozenset[str]) -> None:
        for address in sorted(dead - self._dead):
            interface = self._interfaces[address]
            _log.warning(
                "[jaxft %s] network interface %s does not work: it is down, has no carrier, or has lost its address. "
                "So %s is left out of the addresses that this group announces. Check its cable and its switch, and "
                "`ip addr show %s`; the address is used again from the first join after the interface works.",
                *(self._group, interface, address, interface),
            )
        for address in sorted(self._dead - dead):
            interface = self._interfaces[address]
            _log.info(
                "[jaxft %s] network interface %s works again: this group announces %s when it joins",
                *(self._group, interface, address),
            )
        self._dead = dead
