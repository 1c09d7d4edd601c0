"""Which cores a thread near a network card gets."""

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxft._transport import _cores
from jaxft._transport._cores import cores_near, stay_near
from jaxft._transport._interfaces import Held, ip_of

NEAR = Held("eth7", ip_of("10.0.0.1"), works=True)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    (tmp_path / "eth7" / "device").mkdir(parents=True)
    return tmp_path


def listed(sysfs: Path, text: str) -> None:
    (sysfs / "eth7" / "device" / "local_cpulist").write_text(text)


@pytest.mark.parametrize(
    ("cpulist", "allowed", "cores"),
    [
        ("0-3,8\n", range(16), {0, 1, 2, 3, 8}),
        ("0-3\n", {2, 3, 9}, {2, 3}),
        ("0-15\n", range(12, 44), {12, 13, 14, 15}),
        ("0-15\n", range(15, 47), set()),  # one for all threads
        ("0-15\n", range(8), set()),  # all that it may use
        ("8-15\n", range(8), set()),  # none that it may use
        ("\n", range(8), set()),
        ("what\n", range(8), set()),
    ],
)
def test_cores_are_those_near_the_card_if_that_is_a_choice(
    cpulist: str, allowed: Iterator[int], cores: set[int], sysfs: Path
) -> None:
    listed(sysfs, cpulist)
    assert cores_near("10.0.0.1", set(allowed), [NEAR], sysfs) == cores


@pytest.mark.parametrize("host", ["10.0.0.2", "not in digits"])
def test_an_address_that_no_interface_holds_has_no_cores(host: str, sysfs: Path) -> None:
    listed(sysfs, "0-3\n")
    assert cores_near(host, set(range(8)), [NEAR], sysfs) == set()


def test_an_interface_without_a_device_has_no_cores(sysfs: Path) -> None:
    assert cores_near("10.0.0.1", set(range(8)), [NEAR], sysfs) == set()


@pytest.fixture
def connected() -> Iterator[socket.socket]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as one,
    ):
        yield one


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a choice needs two cores")
def test_a_thread_stays_near_its_connection_and_no_other_does(
    connected: socket.socket, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(_cores, "_near", lambda host, allowed: frozenset({max(allowed)}))
    seen: list[set[int]] = []

    def work() -> None:
        stay_near([connected])
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{max(before)}]
    assert os.sched_getaffinity(0) == before


def refuses(*_: object) -> None:
    raise OSError(errno.EINVAL, "no such core")


def test_what_the_kernel_refuses_changes_nothing(
    connected: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(_cores, "_near", lambda host, allowed: frozenset({max(allowed)}))
    monkeypatch.setattr(os, "sched_setaffinity", refuses)
    stay_near([connected])
    connected.close()
    stay_near([connected])
    stay_near([])
    assert os.sched_getaffinity(0) == before
