"""Which of its addresses a process announces, as its network interfaces die and come back."""

import logging
import socket
from collections.abc import Sequence

import pytest

from jaxft._errors import CoordinatorUnreachable
from jaxft._transport._addresses import Addresses
from jaxft._transport._endpoints import endpoints_at
from jaxft._transport._interfaces import Held, ip_of


class Host:
    """A host whose interfaces eth0 and eth1 hold 10.0.0.1 and 10.1.0.1."""

    def __init__(self, text: str = "10.0.0.1:7+10.1.0.1:7*4") -> None:
        self.dead: set[str] = set()
        self.gone: set[str] = set()
        self.refuses = False
        (endpoint,) = endpoints_at(text)
        self._addresses = Addresses(endpoint, "a", self.read)

    def read(self) -> Sequence[Held]:
        if self.refuses:
            raise PermissionError("no netlink here")
        every = (("eth0", "10.0.0.1"), ("eth1", "10.1.0.1"))
        return [Held(name, ip_of(ip), name not in self.dead) for name, ip in every if name not in self.gone]

    def told(self) -> str:
        return str(self._addresses.now())


def test_addresses_of_interfaces_that_work_are_told() -> None:
    assert Host().told() == "10.0.0.1:7+10.1.0.1:7*4"


def test_a_dead_interface_is_left_out_with_a_word_and_used_again(caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    host.dead = {"eth1"}
    assert [host.told(), host.told()] == ["10.0.0.1:7+-*4"] * 2
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert line.getMessage().startswith(
        "[jaxft a] network interface eth1 does not work: it is down, has no carrier"
    )
    assert "So 10.1.0.1:7 is left out" in line.getMessage()
    caplog.clear()
    host.dead = set()
    with caplog.at_level(logging.INFO, "jaxft"):
        assert [host.told(), host.told()] == ["10.0.0.1:7+10.1.0.1:7*4"] * 2
    (line,) = caplog.messages
    assert line.endswith("eth1 works again: this group announces 10.1.0.1:7 when it joins")


def test_the_first_address_keeps_its_place() -> None:
    host = Host()
    host.dead = {"eth0"}
    assert host.told() == "-+10.1.0.1:7*4"


def test_an_interface_that_has_lost_its_address_is_dead(caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    host.told()
    host.gone = {"eth1"}
    assert host.told() == "10.0.0.1:7+-*4"
    assert "interface eth1" in caplog.text


def test_an_address_that_no_interface_has_held_is_forwarded_here() -> None:
    host = Host()
    host.gone = {"eth1"}
    assert host.told() == "10.0.0.1:7+10.1.0.1:7*4"


@pytest.mark.parametrize("dead", [{"eth0", "eth1"}, set[str]()])
def test_all_are_told_if_all_are_dead_or_the_kernel_tells_nothing(
    dead: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    host = Host()
    host.dead, host.refuses = dead, not dead
    assert host.told() == "10.0.0.1:7+10.1.0.1:7*4"
    assert not caplog.records


def test_a_single_address_is_not_looked_at() -> None:
    host = Host("10.0.0.1:7")
    host.dead, host.refuses = {"eth0"}, True
    assert host.told() == "10.0.0.1:7"


def test_a_name_is_resolved_once_and_one_that_is_unknown_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def resolve(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(host)
        if host == "nowhere":
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    host = Host("nowhere:7+here:7")
    assert host.told() == "nowhere:7+here:7"
    host.dead = {"eth1"}
    assert host.told() == "nowhere:7+-"
    assert asked == ["nowhere", "here"]


class MovingHost:
    """A host with one address, which its group has found by the route to the coordinator."""

    def __init__(self, address: str = "10.0.0.1") -> None:
        self.address = address
        self.routed = True
        (endpoint,) = endpoints_at(f"{address}:7*4")
        self._addresses = Addresses(endpoint, "a", self.read, self.find)

    def read(self) -> Sequence[Held]:
        return [Held("eth0", ip_of(self.address.strip("[]")), True)] if self.address else []

    def find(self) -> str:
        if not self.routed:
            raise CoordinatorUnreachable("found no route to the coordinator")
        return self.address

    def told(self) -> str:
        return str(self._addresses.now())


@pytest.mark.parametrize("other", ["10.0.0.9", "[fd00::9]"])
def test_a_host_that_has_another_address_now_announces_that(
    other: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = MovingHost()
    assert host.told() == "10.0.0.1:7*4"
    host.address = other
    assert [host.told(), host.told()] == [f"{other}:7*4"] * 2
    (line,) = caplog.messages
    assert line.startswith(
        f"[jaxft a] no network interface of this host holds 10.0.0.1 any more. So this group announces {other}:7 in"
    )
    host.address = "10.0.0.1"
    assert host.told() == "10.0.0.1:7*4"


def test_a_host_without_an_address_keeps_what_it_has_announced(caplog: pytest.LogCaptureFixture) -> None:
    host = MovingHost()
    host.address, host.routed = "", False
    assert host.told() == "10.0.0.1:7*4"
    assert not caplog.records
    host.address, host.routed = "10.0.0.9", True
    assert host.told() == "10.0.0.9:7*4"


def test_an_address_that_is_held_stays_though_the_route_leads_elsewhere() -> None:
    (endpoint,) = endpoints_at("10.0.0.1:7")
    addresses = Addresses(endpoint, "a", MovingHost().read, lambda: "10.0.0.9")
    assert str(addresses.now()) == "10.0.0.1:7"
