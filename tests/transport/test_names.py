"""Names of hosts: a name server that stands still costs no more than a moment, and a running job nothing."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxft._transport import _names
from jaxft._transport._handshake import ConnectionRequest
from jaxft._transport._listener import dial
from jaxft._transport._names import look_up, targets_of
from tests import patience
from tests.faults.namespaces import MISSING, available

ROOT = Path(__file__).parents[2]
Found = list[tuple[Any, ...]]


def found(host: str, port: int) -> Found:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]


class Resolver:
    """In the place of the system's: answers as the test says, or not until the test is over."""

    def __init__(self) -> None:
        self.answer: Callable[[str, int], Found] | None = None
        self.asked: list[str] = []
        self.end = threading.Event()

    def __call__(self, host: str, port: int, **options: Any) -> Found:
        self.asked.append(host)
        if self.answer is None:
            self.end.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "the test is over")
        return self.answer(host, port)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(_names.socket, "getaddrinfo", made)
    monkeypatch.setattr(_names, "_under_way", {})
    monkeypatch.setattr(_names, "_last", {})
    monkeypatch.setattr(_names, "ANSWER_TIMEOUT_S", 0.2)
    yield made
    made.end.set()
    patience.until(lambda: not asking(), "threads to end")


def asking() -> int:
    """How many threads wait for the resolver."""
    return sum(thread.name == "jaxft-name" for thread in threading.enumerate())


def unknown(host: str, port: int) -> Found:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_name_is_asked_for_each_time(resolver: Resolver) -> None:
    """Another host may have taken it over."""
    for last in range(3):
        resolver.answer = lambda host, port, last=last: found(f"10.0.0.{last}", port)
        assert targets_of("peer:7") == [(socket.AF_INET, (f"10.0.0.{last}", 7))]
    assert resolver.asked == ["peer"] * 3


def test_a_host_in_digits_needs_no_thread(resolver: Resolver) -> None:
    resolver.answer = found
    look_up(["10.0.0.1:7", "[fe80::1%eth0]:7", "nonsense", "host:port"])
    assert (asking(), resolver.asked) == (0, [])
    assert targets_of("10.0.0.1:7") == [(socket.AF_INET, ("10.0.0.1", 7))]
    resolver.answer = None
    look_up(["10.0.0.1:7"])
    assert asking() == 0


@pytest.mark.parametrize("address", ["nonsense", "host:port", ":7"])
def test_what_is_no_address_is_an_error(address: str) -> None:
    with pytest.raises(ConnectionError, match="is not an address"):
        targets_of(address)


def test_a_name_that_no_one_answers_for_is_given_up_soon(resolver: Resolver) -> None:
    with pytest.raises(TimeoutError, match=r"no name server has answered within 0\.2 s"):
        targets_of("peer:7")


@pytest.mark.parametrize("fault", ["silence", "unknown"])
def test_what_was_known_is_used_while_the_name_server_does_not_know(
    fault: str, resolver: Resolver, caplog: pytest.LogCaptureFixture
) -> None:
    resolver.answer = found
    known = targets_of("peer:7")
    resolver.answer = None if fault == "silence" else unknown
    with caplog.at_level(logging.WARNING):
        assert targets_of("peer:7") == known
    says = "no name server has answered" if fault == "silence" else "Name or service not known"
    assert "Connects to peer:7 at peer, as before: " in caplog.text
    assert says in caplog.text
    with pytest.raises(OSError):
        targets_of("other:7")  # was never known


def test_no_more_threads_than_names_wait_for_a_name_server(resolver: Resolver) -> None:
    for _ in range(5):
        with pytest.raises(TimeoutError):
            targets_of("peer:7")
    assert asking() == 1
    resolver.answer = found
    resolver.end.set()  # that answer is an error, and late: the next question is a new one
    patience.until(lambda: not asking(), "the thread to end")
    assert targets_of("peer:7") == [(socket.AF_INET, ("peer", 7))]


def test_many_names_are_waited_for_at_once(resolver: Resolver) -> None:
    addresses = [f"peer-{number}:7" for number in range(20)]
    look_up(addresses)
    began_s = time.monotonic()
    for address in addresses:
        with pytest.raises(TimeoutError):
            targets_of(address)
    assert time.monotonic() - began_s < 20 * 0.2 / 2


def test_an_old_answer_that_no_one_took_is_not_used(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver.answer = lambda host, port: found("10.0.0.1", port)
    look_up(["peer:7"])
    patience.until(lambda: _names._under_way["peer:7"].over, "an answer")
    resolver.answer = lambda host, port: found("10.0.0.2", port)
    monkeypatch.setattr(_names, "ANSWER_TIMEOUT_S", 60.0)
    monkeypatch.setattr(_names._under_way["peer:7"], "_began_s", time.monotonic() - 61)
    assert targets_of("peer:7") == [(socket.AF_INET, ("10.0.0.2", 7))]


def test_without_room_for_a_thread_it_is_asked_for_here(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver.answer = found
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert targets_of("peer:7") == [(socket.AF_INET, ("peer", 7))]


@pytest.mark.parametrize("answer", [None, unknown])
def test_a_dial_says_what_is_wrong_with_a_name(
    answer: Callable[[str, int], Found] | None, resolver: Resolver
) -> None:
    resolver.answer = answer
    request = ConnectionRequest("heal", "job", "a", 1, "b", 2, 3)
    with pytest.raises(ConnectionError, match=r"The host name in 'peer:7' is unknown: (no name|Name or)"):
        dial("peer:7", request, deadline_s=time.monotonic() + patience.FAR_S)


# In separate namespaces: a name server on loopback that answers twice (A and AAAA), and then no more.
WITH_A_REAL_RESOLVER = """
import socket, subprocess, threading, time
from pathlib import Path
from jaxft._transport._names import targets_of

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["mount", "--bind", "{folder}/resolv.conf", "/etc/resolv.conf"], check=True)
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))

def answer():
    for _ in range(2):
        asked, sender = server.recvfrom(1500)
        end = asked.index(b"\\0", 12) + 5
        is_a = asked[end - 4 : end - 2] == b"\\0\\1"
        head = asked[:2] + b"\\x81\\x80\\0\\1" + bytes([0, is_a]) + bytes(4)
        record = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\1\\0\\4" + socket.inet_aton("10.9.8.7")
        server.sendto(head + asked[12:end] + (record if is_a else b""), sender)

thread = threading.Thread(target=answer)
thread.start()
print(targets_of("peer.test:7"))
thread.join()
for name in ("peer.test:7", "other.test:7"):
    began_s = time.monotonic()
    try:
        print(targets_of(name))
    except TimeoutError as error:
        print(error)
    print(time.monotonic() - began_s < 4)
"""


@pytest.mark.processes
def test_a_real_name_server_that_falls_silent(tmp_path: Path) -> None:
    if not available():
        pytest.skip(MISSING)
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    script = WITH_A_REAL_RESOLVER.replace("{folder}", str(tmp_path))
    ran = subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience.FAR_S,
    )
    assert ran.stdout.splitlines() == [
        "[(<AddressFamily.AF_INET: 2>, ('10.9.8.7', 7))]",
        "[(<AddressFamily.AF_INET: 2>, ('10.9.8.7', 7))]",
        "True",
        "no name server has answered within 2 s",
        "True",
    ], ran.stderr
