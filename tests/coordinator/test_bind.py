"""The address that the coordinator listens on for groups: it has all of it, or says why not."""

import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
from jaxft_coordinator.shell._server import Server
from jaxft_protocol.coordinator.job import Options

from tests import patience
from tests.coordinator.test_server import run, serving

# A network without others, in which a program gets one of these ports where it asks for any.
NETWORK = ("unshare", "--user", "--map-root-user", "--net")
FEW_PORTS = "ip link set lo up; echo 40000 40063 > /proc/sys/net/ipv4/ip_local_port_range"
# All but one of them are taken in IPv4. To dial it, there are others.
CROWDED = """
import asyncio, socket
from pathlib import Path
from jaxft_coordinator.shell._server import Server
from jaxft_protocol.coordinator.job import Options

async def main():
    server = Server("localhost:0", Options())
    await server.start()
    assert server.port == 40063
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("32768 60999")
    for host in ("127.0.0.1", "::1"):
        socket.create_connection((host, server.port)).close()
    await server.stop()

taken = [socket.create_server(("127.0.0.1", port)) for port in range(40000, 40063)]
asyncio.run(main())
"""


def _can_have_a_network() -> bool:
    if shutil.which("unshare") is None or not socket.has_dualstack_ipv6():
        return False
    return subprocess.run([*NETWORK, "sh", "-ec", FEW_PORTS], capture_output=True).returncode == 0


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


@pytest.mark.skipif(not _can_have_a_network(), reason="needs unshare, ip, and user namespaces")
def test_any_port_is_one_that_is_free_at_every_address():
    words = [*NETWORK, "sh", "-ec", f'{FEW_PORTS}; exec "$@"', "sh", sys.executable, "-c", CROWDED]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = patience.run(words, capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


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
        ("::1:29510", "is not host:port. For --bind, name it as host:port, such as"),
    ],
)
def test_an_address_that_no_server_could_have_is_an_error_that_says_why(bind: str, said: str):
    async def scenario() -> None:
        with pytest.raises(OSError, match=re.escape(said)):
            await Server(bind, Options()).start()

    run(scenario)
