"""What the kernel tells of this host's addresses."""

import socket

import pytest

from jaxft._transport._interfaces import Held, held_addresses, ip_of, ips_of


def test_the_loopback_holds_its_address_and_works() -> None:
    assert Held("lo", ip_of("127.0.0.1"), works=True) in held_addresses()


def test_every_interface_of_this_host_is_one_that_the_kernel_lists() -> None:
    assert {one.interface for one in held_addresses()} <= {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize(
    ("text", "same"), [("fe80::1%eth0", "fe80::1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("10.0.0.1", "10.0.0.1")]
)
def test_an_address_is_the_same_with_a_scope_and_at_a_socket_for_both_families(text: str, same: str) -> None:
    assert str(ip_of(text)) == same


def test_a_name_stands_for_addresses_and_one_that_is_unknown_for_none() -> None:
    assert ip_of("127.0.0.1") in ips_of("localhost")
    assert ips_of("10.0.0.1") == (ip_of("10.0.0.1"),)
    assert ips_of("host.invalid") == ()
