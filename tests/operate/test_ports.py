"""Whether a port of this machine is free, as `jaxft doctor --bind` says."""

import errno
import socket
from unittest import mock

import pytest
from jaxft_protocol.host.ports import host_and_port

from jaxft_launch.check import _ports
from jaxft_launch.check._ports import held_here, ports


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::]", "0.0.0.0"])
def test_a_port_is_free_until_another_program_has_it(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"{host}:{other.getsockname()[1]}"
        (taken,) = ports(address)
        (held,) = held_here(address)
    assert (taken.level, "Address already in use" in taken.text) == ("fail", True)
    assert "ss -ltnp" in taken.advice
    assert (held.level, held.text.startswith(f"a program of this machine holds {address}")) == ("warn", True)
    (free,) = ports(address)
    assert (free.level, free.text) == ("ok", f"{address} is free: a server could listen there")
    assert list(held_here(address)) == []


def test_each_of_several_addresses_is_judged() -> None:
    found = list(ports("127.0.0.1:0, 192.0.2.1:29510, nowhere.invalid:1, localhost, localhost:70000"))
    assert [each.level for each in found] == ["ok", "fail", "fail", "fail", "fail"]
    assert found[1].advice == "name an address of this machine, or [::] for all of them"
    assert "nothing could listen on nowhere.invalid:1" in found[2].text
    assert "'localhost' is not host:port" in found[3].text


def test_the_port_of_another_machine_is_not_held_here() -> None:
    assert list(held_here("192.0.2.1:29510")) == []


def test_a_port_that_only_root_may_have() -> None:
    forbidden = PermissionError(errno.EACCES, "Permission denied")
    with mock.patch.object(_ports, "check", side_effect=forbidden):
        (found,) = ports("localhost:443")
    assert (found.level, "1024" in found.advice) == ("fail", True)


def test_the_parts_of_an_address() -> None:
    assert host_and_port("[::1]:29510") == ("::1", 29510)
    assert host_and_port(":0") == ("", 0)


def test_all_addresses_of_a_machine_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator takes those of IPv4 then."""
    monkeypatch.setattr(socket, "has_ipv6", False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (taken,) = ports(f"[::]:{port}")
    (free,) = ports(f"[::]:{port}")
    assert ("Address already in use" in taken.text, free.level) == (True, "ok")
    assert f"at 0.0.0.0 port {port}" in taken.text
