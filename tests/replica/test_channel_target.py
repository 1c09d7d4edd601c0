"""Where gRPC connects to for a coordinator's address, and that no name server is needed for it."""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jaxft
from jaxft._session._credentials import Credentials
from jaxft._session._stream import Stream, channel_target
from jaxft._transport import _addresses
from jaxft_launch.check._network_checks import coordinators
from tests import patience
from tests.faults.namespaces import MISSING, available

ROOT = Path(__file__).parents[2]
V4, V6 = socket.AF_INET, socket.AF_INET6
NAMED = {
    "grpc.enable_http_proxy": 0,
    "grpc.default_authority": "coordinator.test:29510",
    "grpc.ssl_target_name_override": "coordinator.test",
}

Answer = Callable[[list[tuple[int, str]]], None]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Has the system's resolver answer with these addresses; without any, that the name is unknown."""

    def begin(found: list[tuple[int, str]]) -> None:
        def resolve(_name: str, port: int, **_options: Any) -> list[tuple[Any, ...]]:
            if not found:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [
                (family, socket.SOCK_STREAM, 6, "", (ip, port) if family == V4 else (ip, port, 0, 0))
                for family, ip in found
            ]

        monkeypatch.setattr(_addresses.socket, "getaddrinfo", resolve)

    return begin


@pytest.mark.parametrize(
    ("found", "target"),
    [
        ([(V4, "10.0.0.1")], "ipv4:10.0.0.1:29510"),
        ([(V4, "10.0.0.2"), (V4, "10.0.0.1")], "ipv4:10.0.0.2:29510,10.0.0.1:29510"),
        ([(V6, "fd00::1")], "ipv6:[fd00::1]:29510"),
        ([(V6, "fd00::1"), (V4, "10.0.0.1")], "ipv6:[fd00::1]:29510,[::ffff:10.0.0.1]:29510"),
        ([(V4, "10.0.0.1"), (V6, "fd00::1")], "ipv6:[::ffff:10.0.0.1]:29510,[fd00::1]:29510"),
    ],
)
def test_a_name_becomes_its_addresses_and_stays_the_authority(
    answer: Answer, found: list[tuple[int, str]], target: str
) -> None:
    answer(found)
    got, options = channel_target("coordinator.test:29510", patience.FAR_S)
    assert (got, dict(options)) == (target, NAMED)


@pytest.mark.parametrize("address", ["10.0.0.1:29510", "[fd00::1]:29510", "[fe80::1%eth0]:29510"])
def test_an_address_in_digits_stays_as_it_is(answer: Answer, address: str) -> None:
    answer([])
    assert channel_target(address, patience.FAR_S) == (address, [("grpc.enable_http_proxy", 0)])


def test_each_dial_asks_where_the_coordinator_is_now(answer: Answer) -> None:
    answer([(V4, "10.0.0.1")])
    channel_target("coordinator.test:29510", patience.FAR_S)
    answer([(V4, "10.0.0.2")])
    assert channel_target("coordinator.test:29510", patience.FAR_S)[0] == "ipv4:10.0.0.2:29510"


def test_without_a_thread_a_dial_fails_and_the_session_goes_on(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next dial may find one. Digits need none."""
    answer([(V4, "10.0.0.1")])

    def none_left(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    stream: Any = SimpleNamespace(_silence_s=patience.FAR_S)
    expected = "no thread could resolve the name in 'coordinator.test:29510': can't start new thread"
    loop = asyncio.new_event_loop()
    with contextlib.closing(loop), pytest.raises(ConnectionError, match=f"^{re.escape(expected)}$"):
        loop.run_until_complete(Stream._resolved(stream, "coordinator.test:29510"))
    target, _ = asyncio.run(Stream._resolved(stream, "10.0.0.1:29510"))
    assert target == "10.0.0.1:29510"


def test_an_unknown_name_is_an_error_that_names_it(answer: Answer) -> None:
    answer([])
    expected = "the host name in 'coordinator.test:29510' is unknown: Name or service not known"
    with pytest.raises(ConnectionError, match=f"^{re.escape(expected)}$"):
        channel_target("coordinator.test:29510", patience.FAR_S)
    found, *_ = coordinators("coordinator.test:29510", Credentials())
    assert found.text == f"the coordinator coordinator.test:29510 is not reached: {expected}"


@pytest.mark.parametrize("room", [0, 9])
def test_a_coordinator_that_says_nothing_may_hang_or_be_cut_off(room: int) -> None:
    """gRPC cannot tell a process that does not read from packets that are dropped: so the error names both."""
    with socket.socket() as silent, contextlib.ExitStack() as crowd:
        silent.bind(("127.0.0.1", 0))
        silent.listen(room)
        for _ in range(2 if room == 0 else 0):  # then the kernel drops what asks for another connection
            other = crowd.enter_context(socket.socket())
            other.settimeout(0.0)
            other.connect_ex(silent.getsockname())
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            jaxft.CoordinatorUnreachable,
            match=r"sent nothing for 0.25 s: it hangs, or the network drops all\)",
        ):
            jaxft.Manager(address, group="a", failure_timeout_s=1).__enter__()


# On a separate host: /etc/hosts knows etcd and the coordinator by IPv4 only, and the name server is silent.
WITH_A_SILENT_NAME_SERVER = """
import socket, subprocess, sys
from pathlib import Path
import jaxft
from jaxft._session._credentials import Credentials
from jaxft_launch.check._network_checks import coordinators
from tests.stores.etcd_server import etcd_in

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
for name in ("resolv.conf", "hosts"):
    subprocess.run(["mount", "--bind", f"{sys.argv[1]}/{name}", f"/etc/{name}"], check=True)
name_server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
name_server.bind(("127.0.0.1", 53))
with etcd_in(Path(sys.argv[1])) as etcd:
    command = [sys.executable, "-m", "jaxft_coordinator", "--bind", "coordinator.test:29510", "--insecure"]
    command += ["--etcd", f"etcd.test:{etcd.port}"]
    coordinator = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in coordinator.stderr:
            assert "waiting for etcd" not in line, line
            if "leads" in line:
                break
        with jaxft.Manager("coordinator.test:29510", group="a", failure_timeout_s=12):
            print("is in the job")
        print(next(coordinators("coordinator.test:29510", Credentials())).text)
    finally:
        coordinator.kill()
"""


@pytest.mark.processes
@pytest.mark.long
def test_what_the_hosts_file_knows_is_reached_without_a_name_server(tmp_path: Path) -> None:
    if not available():
        pytest.skip(MISSING)
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.0.1 coordinator.test etcd.test\n")
    ran = subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, "-c", WITH_A_SILENT_NAME_SERVER, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=patience.FAR_S,
    )
    assert ran.stdout.splitlines() == [
        "is in the job",
        "the coordinator coordinator.test:29510 answers, and leads",
    ], ran.stderr
