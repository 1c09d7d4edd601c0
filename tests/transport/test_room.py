"""A moment without a descriptor or a thread is waited out; a longer one is logged, with advice."""

import errno
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest

from jaxft._base import _room
from jaxft._base._room import once_there_is_room
from jaxft._transport._handshake import ConnectionRequest, Dialling
from jaxft._transport._sockets import Abort
from jaxft._transport._threads import Team
from tests import injection, patience
from tests.shortages import Allow, no_descriptors, no_threads


def make_flag() -> None:
    Abort()


def dial_closed_port() -> None:
    with pytest.raises(ConnectionError, match="refused"):
        Dialling("127.0.0.1:1", ConnectionRequest("exchange", "job", "a", 1, "b", 2, 3)).advance()


def start_thread() -> None:
    done: list[int] = []
    team = Team()
    team.start("jaxft-work", lambda: done.append(1))
    team.wait()
    assert done == [1]


NAMES = ["a flag", "a connection", "a thread"]
CASES = [
    (no_descriptors, make_flag, OSError, r"Too many open files, for 0\.\d s\. .*ulimit -n"),
    (no_descriptors, dial_closed_port, OSError, r"Too many open files, for 0\.\d s\. .*ulimit -n"),
    (no_threads, start_thread, RuntimeError, r"can't start new thread, for 0\.\d s\. .*pids\.max"),
]


@pytest.mark.parametrize(("shortage", "makes"), [case[:2] for case in CASES], ids=NAMES)
def test_a_moment_without_room_is_waited_out(
    monkeypatch: pytest.MonkeyPatch,
    shortage: Callable[[], AbstractContextManager[Allow]],
    makes: Callable[[], None],
) -> None:
    pauses: list[float] = []
    with shortage() as allow:

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                allow()

        monkeypatch.setattr(_room, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        makes()
    assert len(pauses) == 3


@pytest.mark.parametrize(("shortage", "makes", "error", "says"), CASES, ids=NAMES)
def test_without_room_for_long_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    shortage: Callable[[], AbstractContextManager[Allow]],
    makes: Callable[[], None],
    error: type[Exception],
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_room, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(_room, "_SAY_AFTER_S", 0.0)
    with shortage(), pytest.raises(error, match=says) as raised:
        makes()
    (record,) = caplog.records
    logged = rf"No room .* for 0\.0 s \({says.partition(',')[0]}\); tries again .*"
    assert re.fullmatch(logged, record.getMessage())
    assert not isinstance(raised.value, OSError) or raised.value.errno == errno.EMFILE


@pytest.mark.skipif(bool(injection.why_not()), reason=injection.why_not() or "it can")
def test_a_moment_without_descriptors_leaves_a_listener_no_family_less() -> None:
    """It would listen on IPv4 alone for as long as it lives."""
    program = (
        "from jaxft._transport._listener import Listener\n"
        "for _ in range(6):\n"
        "    listener = Listener(job='job', group='me', incarnation=9, on_heal=None)\n"
        "    print(listener._sock.family.name)\n"
        "    listener.close()\n"
    )
    command = [*injection.failing("socket:error=EMFILE:when=2+2"), sys.executable, "-c", program]
    done = patience.run(command, capture_output=True, text=True, check=True)
    expected = "AF_INET6" if socket.has_dualstack_ipv6() else "AF_INET"
    assert done.stdout.split() == [expected] * 6, done.stderr


@pytest.mark.parametrize(
    "error", [PermissionError("no"), RuntimeError("threads can only be started once")], ids=repr
)
def test_another_error_is_raised_at_once(error: Exception) -> None:
    tries: list[int] = []

    def fails() -> None:
        tries.append(1)
        raise error

    with pytest.raises(type(error)) as raised:
        once_there_is_room(fails)
    assert raised.value is error
    assert tries == [1]
