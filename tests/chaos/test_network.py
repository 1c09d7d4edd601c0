"""The fault-injecting network: what gets through, and what does not."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from jaxft._transport._listener import Abort, ConnectionRequest, Listener, dial
from jaxft._transport._sockets import recv_exactly, send_all
from jaxft_launch.storm._faults import COORDINATOR
from jaxft_launch.storm._network import LEAST_DAMAGED_BYTES, Network
from tests import patience

GROUPS = ("group-0", "group-1", "group-2")
PATIENCE_S = patience.FAR_S
# Nothing must arrive for this long; everything else arrives within a millisecond.
SILENCE_S = 0.3


def soon() -> float:
    return time.monotonic() + PATIENCE_S


class Groups:
    """Listening groups, and a coordinator that echoes, connected by the network."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.healing: list[socket.socket] = []
        self.listeners = {
            group: Listener(
                job="job", group=group, incarnation=1, on_heal=lambda one, *_: self._keep(one.sock)
            )
            for group in GROUPS
        }
        for listener in self.listeners.values():
            stack.callback(listener.close)
        self.coordinator = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.network = stack.enter_context(Network(GROUPS, self._where))
        self._stack = stack
        self._over = threading.Event()
        stack.callback(self._over.set)

    def _keep(self, sock: socket.socket) -> None:
        self.healing.append(sock)
        self._over.wait(PATIENCE_S)

    def _where(self, name: str) -> int | None:
        if name == COORDINATOR:
            return self.coordinator.getsockname()[1]
        listener = self.listeners.get(name)
        return None if listener is None else listener.port

    def pair(self, dialler: str, listener: str, *, quorum_id: int = 1) -> tuple[socket.socket, socket.socket]:
        """An exchange connection through the network: the dialler's end and the listener's."""
        near = self.dial(dialler, listener, quorum_id=quorum_id)
        far = self.listeners[listener].take(
            quorum_id=quorum_id, group=dialler, incarnation=1, deadline_s=soon(), abort=Abort()
        )
        return near, self._stack.enter_context(far.sock)

    def dial(
        self, dialler: str, listener: str, *, kind: str = "exchange", quorum_id: int = 1
    ) -> socket.socket:
        request = ConnectionRequest(kind, "job", dialler, 1, listener, 1, quorum_id)
        return self._stack.enter_context(
            dial(self.network.host_of(listener), request, deadline_s=soon()).sock
        )

    def control(self, group: str) -> tuple[socket.socket, socket.socket]:
        """A connection of a group to the coordinator: both ends."""
        host, _, port = self.network.coordinator_of(group).rpartition(":")
        near = self._stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
        self.coordinator.settimeout(PATIENCE_S)
        far, _ = self.coordinator.accept()
        return near, self._stack.enter_context(far)


@pytest.fixture
def groups() -> Iterator[Groups]:
    with contextlib.ExitStack() as stack:
        yield Groups(stack)


def passes(sender: socket.socket, receiver: socket.socket, text: bytes = b"frame") -> None:
    send_all(sender, [text], deadline_s=soon())
    received = bytearray(len(text))
    recv_exactly(receiver, memoryview(received), deadline_s=soon())
    assert received == text


def is_silent(receiver: socket.socket) -> bool:
    receiver.settimeout(SILENCE_S)
    try:
        receiver.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return True
    return False


def ends(receiver: socket.socket) -> type[BaseException] | None:
    """How a connection ends: the exception, or None for an orderly end."""
    receiver.settimeout(PATIENCE_S)
    try:
        while receiver.recv(1 << 16):
            pass
    except OSError as error:
        return type(error)
    return None


def test_bytes_get_through_both_ways(groups: Groups) -> None:
    near, far = groups.pair("group-0", "group-1")
    blob = bytes(range(256)) * 20_000
    for sender, receiver in ((near, far), (far, near)):
        thread = threading.Thread(target=send_all, args=(sender, [blob]), kwargs={"deadline_s": soon()})
        thread.start()
        received = bytearray(len(blob))
        recv_exactly(receiver, memoryview(received), deadline_s=soon())
        thread.join()
        assert received == blob
    near, far = groups.control("group-2")
    passes(near, far)
    passes(far, near)


def test_nothing_passes_a_cut_link_and_everything_once_it_is_mended(groups: Groups) -> None:
    near, far = groups.pair("group-0", "group-1")
    both = (("group-0", "group-1"), ("group-1", "group-0"))
    groups.network.cut(both)
    for sender, receiver in ((near, far), (far, near)):
        send_all(sender, [b"held back"], deadline_s=soon())
        assert is_silent(receiver)
    near.close()
    assert is_silent(far)
    groups.network.repair(both)
    received = bytearray(9)
    recv_exactly(far, memoryview(received), deadline_s=soon())
    assert received == b"held back"
    assert ends(far) in (None, ConnectionResetError)


@pytest.mark.parametrize(("into", "out"), [(True, True), (True, False), (False, True)])
def test_around_a_group_are_the_links_with_everybody(groups: Groups, *, into: bool, out: bool) -> None:
    groups.network.cut(groups.network.around("group-1", into=into, out=out))
    near, far = groups.pair("group-0", "group-2")
    passes(near, far)
    groups.network.repair(groups.network.around("group-1"))
    near, far = groups.pair("group-0", "group-1")
    control_near, control_far = groups.control("group-1")
    groups.network.cut(groups.network.around("group-1", into=into, out=out))
    for sender, receiver, cut in (
        (near, far, into),
        (far, near, out),
        (control_near, control_far, out),
        (control_far, control_near, into),
    ):
        if cut:
            send_all(sender, [b"frame"], deadline_s=soon())
            assert is_silent(receiver)
        else:
            passes(sender, receiver)


def test_a_reset_ends_what_is_there_and_nothing_else(groups: Groups) -> None:
    near, far = groups.pair("group-0", "group-1")
    other = groups.pair("group-1", "group-2")
    assert groups.network.reset("group-1", "group-0") == 1
    assert ends(near) is ConnectionResetError
    assert ends(far) is ConnectionResetError
    passes(*other)
    passes(*groups.pair("group-0", "group-1", quorum_id=2))


def test_a_burst_of_bits_of_one_large_piece_is_flipped(groups: Groups) -> None:
    def heal(length: int) -> bytearray:
        count = len(groups.healing)
        near = groups.dial("group-0", "group-1", kind="heal")
        while len(groups.healing) == count:
            time.sleep(0.001)
        received = bytearray(length)
        thread = threading.Thread(
            target=send_all, args=(groups.healing[-1], [bytes(length)]), kwargs={"deadline_s": soon()}
        )
        thread.start()
        recv_exactly(near, memoryview(received), deadline_s=soon())
        thread.join()
        return received

    groups.network.damage([("group-1", "group-0")])
    near, far = groups.pair("group-0", "group-1")
    passes(far, near, bytes(100_000))  # the fault was not for exchanges
    assert not any(heal(LEAST_DAMAGED_BYTES // 2)), "headers are not damaged"
    damaged = heal(200_000)
    assert sum(byte.bit_count() for byte in damaged) == 4
    assert groups.network.damaged == 1
    assert not any(heal(200_000)), "once"
    groups.network.damage([("group-1", "group-0")])
    groups.network.spare()
    assert not any(heal(200_000))


def test_a_capped_link_takes_its_time(groups: Groups) -> None:
    near, far = groups.pair("group-0", "group-1")
    groups.network.cap([("group-0", "group-1")], 1_000_000)
    began_s = time.monotonic()
    passes(near, far, bytes(400_000))
    assert 0.3 < time.monotonic() - began_s
    groups.network.cap([("group-0", "group-1")], None)
    passes(near, far, bytes(400_000))
