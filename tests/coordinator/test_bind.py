"""The address that the coordinator listens on for groups: it has all of it, or says why not."""

import re
import socket

import pytest
from jaxft_coordinator._server import Server
from jaxft_protocol.coordinator.job import Options

from tests.coordinator.test_server import run, serving


def test_a_port_in_use_is_an_error_that_says_so():
    async def scenario() -> None:
        async with serving() as server:
            second = Server(f"localhost:{server.port}", Options())
            with pytest.raises(
                OSError, match=r"cannot listen on 'localhost:\d+': Address already in use, at "
            ):
                await second.start()

    run(scenario)


@pytest.mark.parametrize("bind", ["127.0.0.1", "localhost", "0.0.0.0", "[::]"])
def test_a_port_that_another_program_holds_is_in_use_too(bind: str):
    refuses_a_port_held_at("127.0.0.1", bind)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("bind", ["[::1]", "[::]"])
def test_a_port_that_another_program_holds_in_ipv6_is_in_use_too(bind: str):
    refuses_a_port_held_at("::1", bind)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_of_a_name_every_address_is_taken_or_none():
    """gRPC is content with one: groups would find the other program at the other one."""
    refuses_a_port_held_at("::1", "localhost")


def refuses_a_port_held_at(host: str, bind: str) -> None:
    async def scenario(port: int) -> None:
        with pytest.raises(
            OSError, match=rf"Address already in use, at .* port {port}. For --bind, choose another port"
        ):
            await Server(f"{bind}:{port}", Options()).start()

    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        port = taken.getsockname()[1]
        run(lambda: scenario(port))


@pytest.mark.parametrize(
    ("bind", "said"),
    [
        ("nowhere.invalid:29510", "not known. For --bind, name an address of this machine"),
        (
            "192.0.2.1:29510",
            "requested address, at 192.0.2.1 port 29510. For --bind, name an address of this",
        ),
        ("::1:29510", "gRPC does not take it. For --bind, name an address and a port"),
    ],
)
def test_an_address_that_no_server_could_have_is_an_error_that_says_why(bind: str, said: str):
    async def scenario() -> None:
        with pytest.raises(OSError, match=re.escape(said)):
            await Server(bind, Options()).start()

    run(scenario)
