"""The address that a group tells the others: it waits for a coordinator that no name server knows yet."""

import contextlib
import logging
import os
import re
import socket
import sys
import time
from typing import Any

import pytest

import jaxft
from jaxft._replica import _membership
from jaxft._replica._config import GroupConfig
from jaxft._transport import _own_address
from jaxft._transport._listener import Listener
from jaxft._transport._own_address import own_address
from tests import patience
from tests.faults.namespaces import MISSING, available, switch


class Routes:
    """In the place of name servers: the errors in turn, and then this machine."""

    def __init__(self, *errors: OSError) -> None:
        self._errors = list(errors)
        self.asked: list[str] = []

    def __call__(self, address: str, limit_s: float) -> list[tuple[int, tuple[Any, ...]]]:
        self.asked.append(address)
        if self._errors:
            raise self._errors.pop(0)
        return [(socket.AF_INET, ("127.0.0.1", 29510))]


UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_own_address, "_RETRY_S", 0.001)


def test_an_address_in_digits_needs_no_name_server() -> None:
    assert own_address("127.0.0.1:29510", 0.0) == "127.0.0.1"


def test_the_next_coordinator_is_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = Routes(UNKNOWN)
    monkeypatch.setattr(_own_address, "targets_of", routes)
    assert own_address("a:1, b:2", 0.0) == "127.0.0.1"
    assert routes.asked == ["a:1", "b:2"]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_name_with_an_address_that_has_no_route_is_reached_at_the_next(
    monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily
) -> None:
    """As on a machine with IPv6 alone, for a name that also has an IPv4 address."""
    # A broadcast, and an address of a link without its name: the kernel refuses both.
    unreachable = {socket.AF_INET: "255.255.255.255", socket.AF_INET6: "fe80::1"}[family]
    targets = [(family, (unreachable, 1)), (socket.AF_INET, ("127.0.0.1", 1))]
    monkeypatch.setattr(_own_address, "targets_of", lambda address, limit_s: targets)
    assert own_address("both:1", 0.0) == "127.0.0.1"
    monkeypatch.setattr(_own_address, "targets_of", lambda address, limit_s: targets[:1])
    with pytest.raises(jaxft.CoordinatorUnreachable, match="both:1: "):
        own_address("both:1", 0.0)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("error", [UNKNOWN, OSError(101, "Network is unreachable")])
def test_a_route_that_comes_later_is_found(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    routes = Routes(error, error, error)
    monkeypatch.setattr(_own_address, "targets_of", routes)
    assert own_address("later:1", 60.0) == "127.0.0.1"
    assert len(routes.asked) == 4


@pytest.mark.usefixtures("hurried")
def test_a_long_wait_says_for_what(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(_own_address, "targets_of", Routes(*[UNKNOWN] * 9))
    monkeypatch.setattr(_own_address, "SLOW_WAIT_S", 0.0)
    with caplog.at_level(logging.WARNING, "jaxft"):
        own_address("later:1", 60.0)
    assert [one for one in caplog.messages if "route to the coordinator: later:1: [Errno -2] Name" in one]
    assert len(caplog.messages) == 1


def test_no_route_is_an_error_after_the_limit() -> None:
    began_s = time.monotonic()
    with pytest.raises(
        jaxft.CoordinatorUnreachable, match=r"within 0.2 s .*no-such-host.*Check the host name"
    ):
        jaxft.Manager("no-such-host.invalid:29510", group="group-0", failure_timeout_s=0.2).__enter__()
    assert time.monotonic() - began_s >= 0.2


@pytest.mark.parametrize(
    ("coordinator", "host", "warns"),
    [
        ("node-1:29510", None, True),
        ("elsewhere:1, node-1:29510", None, True),
        ("localhost:29510", None, False),
        ("127.0.0.1:29510", None, False),
        ("[::1]:29510", None, False),
        ("node-1:29510", "127.0.0.1", False),
    ],
)
def test_a_name_that_leads_to_this_machine_itself_is_said(
    coordinator: str,
    host: str | None,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As with the name of a machine of Debian: 127.0.1.1. Other machines would dial themselves."""
    here = [(socket.AF_INET, ("127.0.1.1", 29510))]
    monkeypatch.setattr(_own_address, "targets_of", lambda address, limit_s: here)
    config = GroupConfig(coordinator=coordinator, group="a", host=host)
    with contextlib.closing(Listener(job="default", group="a", incarnation=1, on_heal=None)) as listener:
        announced = str(_membership._addresses(config, listener, 0).now()).partition("*")[0]
    assert announced == f"{host or '127.0.0.1'}:{listener.port}"
    line = f"[jaxft a] announces {announced}, which is every machine's own address: the coordinator's name leads to"
    assert any(each.startswith(line) for each in caplog.messages) == warns


def test_an_address_of_a_link_names_its_interface() -> None:
    """Nothing connects to it otherwise."""
    if not available():
        pytest.skip(MISSING)
    with switch(("a", "b")) as net:
        program = (
            "import jaxft._transport._own_address as own; print(own.own_address('[fe80::1%eth0]:29510', 9.0))"
        )
        command = [*net.within("a"), sys.executable, "-c", program]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = patience.run(command, capture_output=True, text=True, env=environment)
    assert re.fullmatch(r"\[fe80::[0-9a-f:]+%eth0\]\n", ran.stdout), ran
