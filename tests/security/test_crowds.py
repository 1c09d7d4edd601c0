"""Many connections at one data port: no peer's is lost, and no unknown client takes what peers need."""

import contextlib
import gc
import logging
import os
import resource
import select
from collections.abc import Iterator

import pytest
from jaxft_protocol import credentials
from jaxft_protocol.credentials import DataKey, JobKey

from jaxft._exchange._links import Peer
from jaxft._transport import _door
from jaxft._transport._handshake import Dialling
from jaxft._transport._listener import Connection, ConnectionRequest, Listener
from tests import patience
from tests.security.meeting import meet
from tests.security.unknown_clients import crowd, raw_request

KEY = credentials.data_key(JobKey(b"k" * 32))
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds must not cost a peer its connection."""
    monkeypatch.setattr(_door, "_HELLO_TIMEOUT_S", PATIENCE_S)


@contextlib.contextmanager
def listening(group: str, key: DataKey | None, incarnation: int = 9) -> Iterator[Listener]:
    made = Listener(host="127.0.0.1", job="job", group=group, incarnation=incarnation, on_heal=None, key=key)
    try:
        yield made
    finally:
        made.close()


def as_many_as_allowed(wanted: int, ends: int = 2) -> int:
    """Of connections whose ends are both in this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if most == resource.RLIM_INFINITY else min(wanted, (most - 1000) // ends)


def dial_at_once(listener: Listener, count: int, key: DataKey | None) -> list[Connection]:
    """Begin all dials, then serve whichever is ready, as a program with as many threads would."""
    requests = (ConnectionRequest("exchange", "job", f"group-{i}", 1, "me", 9, 5) for i in range(count))
    dialling = {i: Dialling(f"127.0.0.1:{listener.port}", request, key) for i, request in enumerate(requests)}
    made: list[Connection] = []
    deadline_s = patience.machine_s() + PATIENCE_S
    while dialling:
        assert patience.machine_s() < deadline_s, f"{len(dialling)} of {count} dials have not been answered"
        poller = select.poll()
        by_fd = {one.sock.fileno(): i for i, one in dialling.items()}
        for each in dialling.values():
            poller.register(each.sock, each.events)
        for fd, _ in poller.poll(1000):
            if (connection := dialling[by_fd[fd]].advance()) is not None:
                made.append(connection)
                del dialling[by_fd[fd]]
    return made


@pytest.mark.parametrize("key", [None, KEY], ids=["no token", "token"])
@pytest.mark.parametrize("count", [400, pytest.param(as_many_as_allowed(2000), marks=pytest.mark.long)])
def test_of_many_peers_that_dial_at_once_none_is_lost(key: DataKey | None, count: int) -> None:
    with listening("me", key) as listener:
        made = dial_at_once(listener, count, key)
        for i in range(count):
            with listener.take(
                quorum_id=5,
                group=f"group-{i}",
                incarnation=1,
                deadline_s=patience.far(),
                abort=None,
            ):
                continue
        for each in made:
            each.close()


@pytest.mark.parametrize("count", [400, pytest.param(as_many_as_allowed(5600), marks=pytest.mark.long)])
@pytest.mark.parametrize("key", [None, KEY], ids=["no token", "token"])
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"jaxft-hi",
        raw_request(),
        raw_request(to=b"group-0", to_incarnation=8),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=[
        "nothing",
        "half a connection request",
        "a connection request for another",
        "for an incarnation that is none",
        "another protocol",
    ],
)
def test_strangers_do_not_keep_a_group_from_its_peers(
    key: DataKey | None, sent: bytes, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as stack, caplog.at_level(logging.INFO, "jaxft"):
        listeners = [stack.enter_context(listening(f"group-{i}", key)) for i in range(2)]
        members = [
            Peer(f"group-{i}", 9, f"127.0.0.1:{listener.port}", (i,)) for i, listener in enumerate(listeners)
        ]
        stack.enter_context(crowd(listeners[1].port, count, sent))
        for quorum_id in range(1, 4):
            meet(listeners, members, quorum_id)
        assert len(listeners[1]._door.half_open) <= 256, "as docs/security.md promises"
        assert not listeners[1]._pending._waiting
    assert len(caplog.records) <= 30, "a crowd does not fill the disk"


def test_a_group_without_descriptors_lets_strangers_go_and_peers_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit is lowered below what unknown clients hold; each that is dropped gives a peer its place."""
    monkeypatch.setattr(_door, "_MAX_UNKNOWN", 10**6)
    gc.collect()  # a descriptor that is freed in between would be one more
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening("me", KEY))
        unknown = stack.enter_context(crowd(listener.port, 200))
        patience.until(
            lambda: len(listener._door.half_open) == len(unknown), "the unknown clients to be there"
        )
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        highest = max(each.fileno() for each in unknown)
        while (fd := os.dup(0)) <= highest:
            stack.callback(os.close, fd)
        os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, hard))  # one more, for the dialler's own end
        (made,) = dial_at_once(listener, 1, KEY)
        made.close()
        assert len(listener._door.half_open) < len(unknown)
    assert sum("Cannot accept connections" in sent for sent in caplog.messages) <= 20
