"""Blocking socket calls that end."""

import itertools
import logging
import re
import select
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxft_protocol import values

from jaxft._transport import _sockets
from jaxft._transport._handshake import BadRequest, ConnectionRequest, decode, missing_bytes
from jaxft._transport._sockets import Abort, Aborted, recv_exactly, send_all, split_address, wait
from tests import patience


def test_abort_wakes_at_once_and_keeps_its_first_reason() -> None:
    ours, theirs = socket.socketpair()
    abort = Abort()
    assert not abort.is_set
    assert abort.reason == ""
    timer = threading.Timer(0.02, abort.set, ["first"])
    with ours, theirs:
        timer.start()
        with pytest.raises(Aborted, match="first"):
            recv_exactly(ours, memoryview(bytearray(1)), deadline_s=patience.far(), abort=abort)
        abort.set("second")
        assert abort.is_set
        assert abort.reason == "first"
        with pytest.raises(Aborted):
            wait(ours, 1, deadline_s=patience.far(), what="nothing", abort=abort)
    timer.join()


def test_abort_wakes_within_milliseconds() -> None:
    delays: list[float] = []
    for _ in range(9):
        abort, woken, ready = Abort(), [], threading.Event()

        def sleeper(abort: Abort = abort, woken: list = woken, ready: threading.Event = ready) -> None:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                ready.set()
                with pytest.raises(Aborted):
                    wait(ours, 1, deadline_s=patience.far(), what="nothing", abort=abort)
            woken.append(patience.machine_s())

        thread = threading.Thread(target=sleeper)
        thread.start()
        ready.wait(timeout=patience.FAR_S)
        set_s = patience.machine_s()
        abort.set("now")
        thread.join(timeout=patience.FAR_S)
        delays.append(woken[0] - set_s)
    assert sorted(delays)[len(delays) // 2] < 0.02  # 0.1 ms on an idle machine


def test_deadlines() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        begun_s, begun_machine_s = time.monotonic(), patience.machine_s()
        with pytest.raises(TimeoutError, match=r"Timed out after \d+\.\d s waiting for the peer's data"):
            recv_exactly(ours, memoryview(bytearray(1)), deadline_s=begun_s + 0.05)
        with pytest.raises(TimeoutError, match="the peer to take our data"):
            send_all(ours, [bytes(1 << 24)], deadline_s=time.monotonic() + 0.05)
        assert 0.1 <= time.monotonic() - begun_s
        assert patience.machine_s() - begun_machine_s < 5
        with pytest.raises(TimeoutError):
            recv_exactly(ours, memoryview(bytearray(1)), deadline_s=begun_s - 5)


def test_a_deadline_says_how_long_all_of_it_took_and_what_is_missing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"abc")
        with pytest.raises(TimeoutError, match="waiting for a chunk, with 6 of 9 bytes missing") as caught:
            recv_exactly(ours, memoryview(bytearray(9)), deadline_s=time.monotonic() + 0.25, what="a chunk")
        assert float(str(caught.value).split()[3]) >= 0.2


def test_what_is_here_is_received_even_after_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"late")
        buffer = bytearray(4)
        recv_exactly(ours, memoryview(buffer), deadline_s=time.monotonic() - 1)
        assert buffer == b"late"


def test_an_end_and_a_reset_are_connection_errors() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(b"abc")
        theirs.close()
        with pytest.raises(ConnectionError, match="closed the connection with 2 of 5 bytes missing"):
            recv_exactly(ours, memoryview(bytearray(5)), deadline_s=patience.far())
        with pytest.raises(ConnectionError):
            send_all(ours, [b"abc"], deadline_s=patience.far())


def test_many_buffers_of_any_size_arrive_in_order() -> None:
    ours, theirs = socket.socketpair()
    buffers = [bytes([k % 251]) * (k * 37 % 5000) for k in range(300)]
    whole = b"".join(buffers)
    received = bytearray(len(whole))
    with ours, theirs:
        thread = threading.Thread(
            target=send_all, args=(ours, buffers), kwargs={"deadline_s": patience.far()}
        )
        thread.start()
        recv_exactly(theirs, memoryview(received), deadline_s=patience.far())
        thread.join()
        recv_exactly(theirs, memoryview(bytearray()), deadline_s=time.monotonic() - 1)
        send_all(theirs, [b"", b""], deadline_s=time.monotonic() - 1)
    assert received == whole


def test_a_slow_wait_is_logged_and_again_when_it_has_doubled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is looked at every 20 ms, and ends 10 looks after the first message."""
    monkeypatch.setattr(values, "SLOW_WAIT_S", 0.02)
    monkeypatch.setattr(_sockets, "_LONGEST_POLL_S", 0.02)
    looks = itertools.count()

    class Counted(Abort):
        @property
        def is_set(self) -> bool:
            if caplog.records and next(looks) == 10:
                self.set("enough")
            return super().is_set

    ours, theirs = socket.socketpair()
    with ours, theirs, caplog.at_level(logging.WARNING, logger="jaxft"), pytest.raises(Aborted):
        wait(ours, 1, deadline_s=patience.far(), what="group 'b' to wake up", abort=Counted())
    assert 1 < len(caplog.messages) < 8
    for logged in caplog.messages:
        assert re.fullmatch(r"Still waiting for group 'b' to wake up after \d+ s\.", logged)


def test_a_deadline_may_be_infinite() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        timer = threading.Timer(0.02, theirs.sendall, [b"x"])
        timer.start()
        recv_exactly(ours, memoryview(bytearray(1)), deadline_s=float("inf"))
        timer.join()


def test_addresses() -> None:
    assert split_address("host.example:29510") == ("host.example", 29510)
    assert split_address("[fe80::1]:80") == ("fe80::1", 80)
    for address in ("", "host", "host:", ":80", "host:port", "host:-1"):
        with pytest.raises(ConnectionError, match="expected host:port"):
            split_address(address)


@settings(deadline=None)
@given(st.binary(max_size=400) | st.binary(max_size=60).map(lambda rest: b"jaxft-hi\x01" + rest))
def test_a_request_of_any_bytes_is_read_or_refused(received: bytes) -> None:
    for _ in range(4):  # bounded: a connection request has a header and two names
        try:
            missing = missing_bytes(received)
            if missing <= 0:
                assert isinstance(decode(received[: len(received) + missing]), ConnectionRequest)
                return
        except BadRequest:
            return
        assert missing <= 512
        received += b"\x01" * missing
    pytest.fail("never whole")


def test_a_wait_for_flags_is_one_of_many_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes just before a poll does not wake it, so with an endless one Ctrl-C would be taken late."""
    looks: list[float | None] = []
    first, second = Abort(), Abort()

    class Noted:
        def __init__(self) -> None:
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
            looks.append(timeout_ms)
            if len(looks) == 3:
                second.set("now")
            return self._poll.poll(timeout_ms)

    monkeypatch.setattr(_sockets, "_LOOK_MS", 1)
    monkeypatch.setattr(_sockets, "select", SimpleNamespace(poll=Noted, POLLIN=select.POLLIN))
    _sockets.wait_flags(first, second)
    assert looks == [1, 1, 1]


def test_every_error_of_a_connection_is_a_connection_error() -> None:
    """The kernel has many more than those for which Python has a class."""
    with (
        socket.socket() as sock,
        pytest.raises(ConnectionError, match="is lost: Transport endpoint is not conn"),
    ):
        recv_exactly(sock, memoryview(bytearray(1)), deadline_s=patience.far())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", 1))
        with pytest.raises(ConnectionError, match="is lost: Message too long"):
            send_all(sock, [bytes(1 << 20)], deadline_s=patience.far())
