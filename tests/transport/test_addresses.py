"""Where a process is reached: what `host` and `port` may be, the route to the coordinator, names with a deadline."""

import contextlib
import errno
import itertools
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxft
from jaxft import Network
from jaxft._replica import _membership
from jaxft._replica._config import GroupConfig
from jaxft._transport import _addresses, _endpoints
from jaxft._transport._addresses import given_address, own_address, targets_of
from jaxft._transport._endpoints import MAX_THREADS, Endpoint, agreed_threads, endpoints_at, usual_threads
from jaxft._transport._listener import Listener
from tests import patience
from tests.faults.namespaces import MISSING, available, switch

FAR_S = patience.FAR_S
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
Found = list[tuple[int, tuple[Any, ...]]]


class Resolver:
    """In the place of the system's: gives its answers in turn, the last one again and again."""

    def __init__(self, *answers: Exception | Found) -> None:
        *self._first, self._last = answers
        self.asked: list[str] = []

    def __call__(self, name: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        self.asked.append(name)
        answer = self._first.pop(0) if self._first else self._last
        if isinstance(answer, Exception):
            raise answer
        return [(family, socket.SOCK_STREAM, 6, "", (where[0], port, *where[1:])) for family, where in answer]


HERE: Found = [(socket.AF_INET, ("127.0.0.1",))]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Resolver]]:
    def begin(*answers: Exception | Found) -> Resolver:
        made = Resolver(*answers)
        monkeypatch.setattr(_addresses.socket, "getaddrinfo", made)
        return made

    monkeypatch.setattr(_addresses, "_RETRY_S", 0.001)
    yield begin
    patience.until(lambda: all(each.name != "jaxft-name" for each in threading.enumerate()), "threads to end")


# ---- names ----


def test_a_name_is_asked_for_again_with_each_dial(resolver: Callable[..., Resolver]) -> None:
    asked = resolver(HERE, [(socket.AF_INET, ("10.0.0.2",))])
    assert targets_of("peer:7", FAR_S) == [(socket.AF_INET, ("127.0.0.1", 7))]
    assert targets_of("peer:8", FAR_S) == [(socket.AF_INET, ("10.0.0.2", 8))]
    assert asked.asked == ["peer", "peer"]


@pytest.mark.parametrize("address", ["nonsense", "host:port", ":7"])
def test_what_is_no_address_is_an_error(address: str) -> None:
    with pytest.raises(ConnectionError, match="is not an address"):
        targets_of(address, FAR_S)


@pytest.mark.usefixtures("resolver")
def test_a_name_that_no_one_answers_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(_addresses.socket, "getaddrinfo", lambda *_, **__: [] * go_on.wait())
    with pytest.raises(TimeoutError, match=r"no name server has answered within 0\.05 s"):
        targets_of("peer:7", 0.05)
    go_on.set()


def test_without_room_for_a_thread_a_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask in the calling thread would block without a deadline."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert targets_of("10.0.0.1:7", 0.0) == [(socket.AF_INET, ("10.0.0.1", 7))]
    with pytest.raises(OSError, match="there is no thread that could ask a name server: can't start new"):
        targets_of("other:7", FAR_S)


# ---- the address by the route to the coordinator ----


def test_an_address_in_digits_needs_no_name_server() -> None:
    assert own_address("127.0.0.1:29510", 0.0) == "127.0.0.1"


def test_the_next_coordinator_is_tried_at_once(resolver: Callable[..., Resolver]) -> None:
    asked = resolver(UNKNOWN, HERE)
    assert own_address("a:1, b:2", 0.0) == "127.0.0.1"
    assert asked.asked == ["a", "b"]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_name_with_an_address_that_has_no_route_is_reached_at_the_next(
    resolver: Callable[..., Resolver], family: socket.AddressFamily
) -> None:
    """As on a machine with IPv6 alone, for a name that also has an IPv4 address."""
    # A broadcast, and an address of a link without its name: the kernel refuses both.
    unreachable = {socket.AF_INET: ("255.255.255.255",), socket.AF_INET6: ("fe80::1",)}[family]
    resolver([(family, unreachable), *HERE])
    assert own_address("both:1", 0.0) == "127.0.0.1"
    resolver([(family, unreachable)])
    with pytest.raises(jaxft.CoordinatorUnreachable, match="both:1: "):
        own_address("both:1", 0.0)


def test_a_route_that_comes_later_is_found_with_a_line(
    resolver: Callable[..., Resolver], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_addresses, "SLOW_WAIT_S", 0.0)
    asked = resolver(UNKNOWN, OSError(errno.ENETUNREACH, "Network is unreachable"), UNKNOWN, HERE)
    assert own_address("later:1", 60.0) == "127.0.0.1"
    assert len(asked.asked) == 4
    assert [each for each in caplog.messages if "route to the coordinator: later:1: [Errno -2] Name" in each]
    assert len(caplog.messages) == 1


def test_no_route_is_an_error_after_the_limit() -> None:
    with pytest.raises(
        jaxft.CoordinatorUnreachable, match=r"within 0.2 s .*no-such-host.*Check the host name"
    ):
        jaxft.Manager("no-such-host.invalid:29510", group="group-0", failure_timeout_s=0.2).__enter__()


@pytest.mark.parametrize(
    ("coordinator", "host", "warns"),
    [
        ("node-1:29510", None, True),
        ("elsewhere:1, node-1:29510", None, True),
        ("127.0.0.1:29510", None, False),
        ("[::1]:29510", None, False),
        ("node-1:29510", "127.0.0.1", False),
    ],
)
def test_a_name_that_leads_to_this_machine_itself_is_said(
    coordinator: str,
    host: str | None,
    resolver: Callable[..., Resolver],
    caplog: pytest.LogCaptureFixture,
    *,
    warns: bool,
) -> None:
    """As with the name of a machine of Debian: 127.0.1.1. Other machines would dial themselves."""
    resolver(HERE)
    config = GroupConfig(coordinator=coordinator, group="a", network=Network(host=host))
    with contextlib.closing(Listener(job="default", group="a", incarnation=1, on_heal=None)) as listener:
        announced = _membership._own_endpoint(config, listener, 0).address
    assert announced == f"127.0.0.1:{listener.port}"
    line = f"[jaxft a] announces {announced}, which is every machine's own address: the coordinator's name leads to"
    assert any(each.startswith(line) for each in caplog.messages) == warns


def test_an_address_of_a_link_names_its_interface() -> None:
    """Nothing connects to it otherwise."""
    if not available():
        pytest.skip(MISSING)
    with switch(("a", "b")) as net:
        program = (
            "import jaxft._transport._addresses as own; "
            "print(own.own_address('[fe80::1%eth0]:29510', 9.0)); print(own.given_address('eth0', 9.0))"
        )
        command = [*net.within("a"), sys.executable, "-c", program]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = patience.run(command, capture_output=True, text=True, env=environment)
    assert re.fullmatch(r"\[fe80::[0-9a-f:]+%eth0\]\n[0-9.]+\n", ran.stdout), ran


# ---- the address that the user gives ----


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("lo", "127.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("::1", "[::1]"),
        ("[fe80::1%eth0]", "[fe80::1%eth0]"),
        ("localhost", "127.0.0.1"),
    ],
)
def test_a_host_is_an_interface_an_address_or_a_name(
    host: str, address: str, resolver: Callable[..., Resolver]
) -> None:
    resolver(HERE)
    assert given_address(host, 0.0) == address


def test_an_interface_with_ipv6_alone_is_reached_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held = tmp_path / "if_inet6"
    held.write_text(
        "fe800000000000000000000000000001 02 40 20 80     ib0\n"
        "fd000000000000000000000000000007 02 40 00 80     ib0\n"
    )
    monkeypatch.setattr(_addresses, "_IPV6_ADDRESSES", held)
    monkeypatch.setattr(_addresses.socket, "if_nameindex", lambda: [(2, "ib0"), (3, "ib1")])
    assert given_address("ib0", 0.0) == "[fd00::7]"
    with pytest.raises(jaxft.ConfigurationError, match="network interface ib1 has no address: see `ip addr"):
        given_address("ib1", 0.0)


def test_a_host_that_leads_nowhere_is_refused_and_the_interfaces_are_listed(
    resolver: Callable[..., Resolver],
) -> None:
    resolver(UNKNOWN)
    with pytest.raises(
        jaxft.ConfigurationError, match=r"host is 'ib7'.*no interface of this machine \(lo.*as a name"
    ):
        given_address("ib7", 0.0)


def test_a_host_may_name_the_port_that_is_forwarded() -> None:
    given = lambda host: str(Network(host=host, threads=4).endpoint(7, "here:1", limit_s=0.0))  # noqa: E731
    assert [given(host) for host in ("10.0.0.1", "10.0.0.1:9", "[::1]:9", "::1")] == [
        "10.0.0.1:7*4",
        "10.0.0.1:9*4",
        "[::1]:9*4",
        "[::1]:7*4",
    ]


@pytest.mark.parametrize("host", ["a*2", "a b", "a\tb", "10.0.0..1", "a" * 64, ["a"], 7])
def test_what_cannot_be_a_host_is_refused(host: object) -> None:
    with pytest.raises(jaxft.ConfigurationError, match="host must be one address"):
        Network(host=host)


def test_several_hosts_are_refused_and_what_to_use_instead_is_said() -> None:
    with pytest.raises(jaxft.ConfigurationError, match="run one process for each, or bond them"):
        Network(host="10.0.0.1,10.1.0.1")


def test_a_coordinator_at_ipv6_without_brackets_is_refused() -> None:
    with pytest.raises(jaxft.ConfigurationError, match=r"'::1:29510' must have brackets .*: \[::1\]:29510"):
        GroupConfig(group="g", coordinator="::1:29510")
    assert GroupConfig(group="g", coordinator="[::1]:29510").coordinator == "[::1]:29510"


# ---- ports ----


@pytest.mark.parametrize("port", [-1, 65536, "9-8", "a", "1-70000", "1-", "²", 1.5, True, [1]])
def test_what_cannot_be_a_port_is_refused(port: object) -> None:
    with pytest.raises(jaxft.ConfigurationError, match="port must be a port of up to 65535"):
        Network(port=port)


def free_range(size: int) -> range:
    """Consecutive ports that are free now."""
    for first in itertools.count(20_000, size):
        with contextlib.ExitStack() as taken:
            try:
                for port in range(first, first + size):
                    taken.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            return range(first, first + size)
    raise AssertionError


def test_each_process_takes_a_free_port_of_the_range() -> None:
    ports = free_range(2)
    given = Network(port=f"{ports[0]}-{ports[-1]}").ports
    assert given == ports

    def listening() -> Listener:
        return Listener(ports=given, job="default", group="a", incarnation=1, on_heal=None)

    with contextlib.closing(listening()) as one, contextlib.closing(listening()) as other:
        assert [one.port, other.port] == [*ports]
        with pytest.raises(jaxft.ConfigurationError, match=f"no port of {ports[0]} to {ports[1]} is free"):
            listening()


# ---- by a member's address ----


@pytest.mark.parametrize(
    "endpoint", [Endpoint("a:1"), Endpoint("a:1", 4), Endpoint("[fe80::1%eth0]:7000", MAX_THREADS)]
)
def test_an_endpoint_is_read_as_it_was_written(endpoint: Endpoint) -> None:
    assert endpoints_at(f"{endpoint},b:2") == (endpoint, Endpoint("b:2"))


@pytest.mark.parametrize("threads", ["", "x", "0", "65", "-2", "²", "0004", "00649", "9" * 5000])
def test_what_is_no_number_of_threads_stays_part_of_the_address(threads: str) -> None:
    """Dialling it fails with a word about it; a text of a peer never raises here."""
    assert endpoints_at(f"a:1*{threads}") == (Endpoint(f"a:1*{threads}"),)


def test_members_use_as_many_threads_as_all_of_them_offer() -> None:
    assert agreed_threads(["a:1*4,a:2*3", "b:1*8"]) == 3
    assert agreed_threads(["a:1*4", "b:1"]) == 1


@pytest.mark.parametrize(("cores", "threads"), [(2, 1), (4, 1), (8, 2), (16, 4), (256, 4)])
def test_a_process_offers_threads_by_its_cores(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(_endpoints, "_CPU_MAX", Path("none"))
    assert usual_threads() == threads


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 4), ("800000 100000", 2), ("50000 100000", 1), ("", 4), ("many 100000", 4), ("1 0", 4)],
)
def test_the_quota_of_a_container_counts(
    quota: str, threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(_endpoints, "_CPU_MAX", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert usual_threads() == threads


@pytest.mark.parametrize(
    ("threads", "match"), [(0, "at least 1"), (65, "at most 64"), ("2", "must be an int")]
)
def test_a_number_of_threads_that_cannot_be_is_refused(threads: object, match: str) -> None:
    with pytest.raises(jaxft.ConfigurationError, match=match):
        Network(threads=threads)
