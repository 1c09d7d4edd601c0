"""The data plane's front door: which connections it accepts, and that none can block it."""

import contextlib
import gc
import logging
import os
import queue
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from jaxft._errors import ConfigurationError, JaxftError
from jaxft._transport import _door, _listener, _pending
from jaxft._transport._handshake import encode
from jaxft._transport._listener import (
    Abort,
    Connection,
    ConnectionRequest,
    Listener,
    dial,
    recv_exactly,
    send_all,
)
from tests import patience
from tests.security.unknown_clients import raw_request

OnHeal = Callable[[Connection, ConnectionRequest], None]


@contextmanager
def listening(
    on_heal: OnHeal | None = None, *, host: str = "127.0.0.1", job: str = "job"
) -> Iterator[Listener]:
    listener = Listener(host=host, job=job, group="me", incarnation=9, on_heal=on_heal)
    try:
        yield listener
    finally:
        listener.close()


def request(kind: str = "exchange", **changes: object) -> ConnectionRequest:
    fields: dict = {"kind": kind, "job": "job", "group": "group-1", "incarnation": 3, "number": 5}
    return ConnectionRequest(**{**fields, "to_group": "me", "to_incarnation": 9, **changes})


def soon(wait_s: float = patience.FAR_S) -> float:
    return time.monotonic() + wait_s


def call(
    listener: Listener, sent: ConnectionRequest | None = None, *, wait_s: float = patience.FAR_S
) -> socket.socket:
    return dial(f"127.0.0.1:{listener.port}", sent or request(), deadline_s=soon(wait_s)).sock


def take(
    listener: Listener, *, wait_s: float = patience.FAR_S, abort: Abort | None = None, **key: int
) -> socket.socket:
    fields = {"quorum_id": 5, "incarnation": 3, **key}
    return listener.take(group="group-1", deadline_s=soon(wait_s), abort=abort, **fields).sock


def unknown(listener: Listener, sent: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", listener.port), timeout=patience.FAR_S)
    sock.sendall(sent)
    return sock


def assert_ended(sock: socket.socket) -> None:
    try:
        assert sock.recv(1) == b""
    except ConnectionResetError:
        return


def assert_open(listener: Listener, sent: ConnectionRequest | None = None) -> None:
    """A real peer is still served."""
    with call(listener, sent) as theirs, take(listener) as ours:
        theirs.sendall(b"ping")
        assert ours.recv(4) == b"ping"


def test_a_peer_is_accepted_and_taken() -> None:
    with listening() as listener:
        assert_open(listener)
        with call(listener) as theirs, take(listener) as ours:
            for sock in (theirs, ours):
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
            send_all(theirs, [b"a" * 300_000, memoryview(b"b" * 300_000)], deadline_s=soon())
            received = bytearray(600_000)
            recv_exactly(ours, memoryview(received), deadline_s=soon())
            assert received == b"a" * 300_000 + b"b" * 300_000


@pytest.fixture
def default_timeout() -> Iterator[float]:
    """The default of a program that has set one for its downloads."""
    before, found = socket.getdefaulttimeout(), 0.05
    socket.setdefaulttimeout(found)
    try:
        yield found
    finally:
        socket.setdefaulttimeout(before)


def test_a_default_timeout_of_the_program_changes_nothing(default_timeout: float) -> None:
    def silent_for_longer(connection: Connection, _: ConnectionRequest) -> None:
        received = memoryview(bytearray(4))
        recv_exactly(connection.sock, received, deadline_s=soon())
        connection.sock.sendall(received)

    with listening(silent_for_longer) as listener, unknown(listener):
        assert_open(listener)
        for ours in (call(listener, request("heal")), call(listener)):
            with ours:
                assert ours.gettimeout() is None
        with call(listener, request("heal")) as theirs:
            time.sleep(4 * default_timeout)
            theirs.sendall(b"ping")
            assert theirs.recv(4) == b"ping"


FORKS = """
import os, signal, sys, time, warnings
warnings.simplefilter("ignore")  # JAX warns of forks in a process with threads, which programs do all the same
from jaxft._transport._listener import ConnectionRequest, Listener, dial

said = ConnectionRequest("exchange", "job", "group-1", 3, "me", 9, 5)
dialled = dial(sys.argv[1], said, deadline_s=time.monotonic() + 3600)
listener = Listener(host="127.0.0.1", job="job", group="group-1", incarnation=3, on_heal=None)
print(listener.port, flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
taken = listener.take(quorum_id=5, group="me", incarnation=9, deadline_s=time.monotonic() + 3600, abort=None)
worker = os.fork()
if worker == 0:
    signal.pause()
print(worker, flush=True)
sys.stdin.readline()
dialled.close()
taken.close()
listener.close()
signal.pause()
"""


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=patience.FAR_S).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.processes
@pytest.mark.parametrize("ends", ["closes", "is killed"])
def test_a_worker_that_the_program_has_forked_keeps_nothing_open(ends: str, tmp_path: Path) -> None:
    """Loaders of data fork after the first step has connected, and may outlive a process that is killed."""
    with listening() as listener:
        command = [sys.executable, "-c", FORKS, f"127.0.0.1:{listener.port}", str(tmp_path / "dialled")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            worker = None
            try:
                port = int(process.stdout.readline())
                back = request(group="me", incarnation=9, to_group="group-1", to_incarnation=3)
                dialled = dial(f"127.0.0.1:{port}", back, deadline_s=soon()).sock
                (tmp_path / "dialled").touch()
                worker = int(process.stdout.readline())
                with dialled, take(listener) as taken:
                    if ends == "closes":
                        process.stdin.write(b"\n")
                        process.stdin.flush()
                    else:
                        process.kill()
                    for sock in (dialled, taken):
                        poller = select.poll()
                        poller.register(sock, select.POLLRDHUP)
                        patience.until(lambda poller=poller: poller.poll(0), "the end of a connection")
                patience.until(
                    lambda: is_refused(port), "the end of the listener, which is the last to close"
                )
                os.kill(worker, 0)  # it is still there
            finally:
                process.kill()
                if worker is not None:
                    os.kill(worker, signal.SIGKILL)


def test_taking_may_come_first() -> None:
    with listening() as listener:
        taken: queue.Queue[socket.socket] = queue.Queue()
        thread = threading.Thread(target=lambda: taken.put(take(listener)))
        thread.start()
        with call(listener), taken.get(timeout=patience.FAR_S):
            thread.join()


def test_connections_are_kept_apart_by_quorum_and_incarnation() -> None:
    with listening() as listener, ExitStack() as stack:
        for quorum_id, incarnation in ((5, 3), (6, 3), (5, 4)):
            theirs = stack.enter_context(call(listener, request(number=quorum_id, incarnation=incarnation)))
            theirs.sendall(bytes([quorum_id, incarnation]))
        for quorum_id, incarnation in ((5, 4), (5, 3), (6, 3)):
            with take(listener, quorum_id=quorum_id, incarnation=incarnation) as ours:
                assert ours.recv(2) == bytes([quorum_id, incarnation])


def test_who_dials_again_has_given_up_the_first_connection() -> None:
    with listening() as listener, call(listener) as first, call(listener) as second:
        assert_ended(first)
        with take(listener) as ours:
            second.sendall(b"2")
            assert ours.recv(1) == b"2"


def test_taking_has_a_deadline_and_can_be_aborted() -> None:
    with listening() as listener:
        with pytest.raises(TimeoutError, match="for group 'group-1' to connect for quorum 5"):
            take(listener, wait_s=0.02)
        abort = Abort()
        timer = threading.Timer(0.02, abort.set, ["new quorum"])
        timer.start()
        with pytest.raises(ConnectionError, match="new quorum"):
            take(listener, abort=abort)
        timer.join()


def test_forgotten_quorums_are_closed_and_refused() -> None:
    with listening() as listener, call(listener) as old, call(listener, request(number=6)):
        listener.forget(5)
        assert_ended(old)
        match = r"refused the exchange connection of group 'group-1'\. Quorum 5 is over here"
        with pytest.raises(ConnectionError, match=match):
            call(listener)
        with pytest.raises(ConnectionError, match="Quorum 5 is over here"):
            take(listener)
        take(listener, quorum_id=6).close()


def test_forgetting_wakes_who_waits() -> None:
    with listening() as listener:
        timer = threading.Timer(0.02, listener.forget, [5])
        timer.start()
        with pytest.raises(ConnectionError, match="Quorum 5 is over here"):
            take(listener)
        timer.join()


def test_closing_ends_everything() -> None:
    listener = Listener(
        host="127.0.0.1", job="job", group="me", incarnation=9, on_heal=lambda one, _: assert_ended(one.sock)
    )
    parked, healing = call(listener), call(listener, request("heal", number=0))
    silent = unknown(listener)
    timer = threading.Timer(0.02, listener.close)
    timer.start()
    with pytest.raises(ConnectionError, match="This process is leaving"):
        take(listener, quorum_id=9)
    timer.join()
    listener.close()  # idempotent
    for sock in (parked, healing, silent):
        assert_ended(sock)
        sock.close()
    with pytest.raises(ConnectionError, match="Connection refused"):
        call(listener)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        bytes(4),
        b"\xff" * 4096,
        b"jaxft-re" + bytes(100),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["http", "tls", "zeros", "ones", "answer", "grpc"],
)
def test_garbage_is_dropped_without_an_answer(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="jaxft"), listening() as listener:
        with unknown(listener, sent) as sock:
            assert_ended(sock)
        assert_open(listener)
    assert any("in the handshake: it begins with" in record.getMessage() for record in caplog.records)
    assert all(record.levelno == logging.DEBUG for record in caplog.records)


def test_a_cut_request_is_dropped() -> None:
    whole = encode(request())
    with listening() as listener:
        for cut in (1, 8, 42, 43, len(whole) - 1):
            with unknown(listener, whole[:cut]) as sock:
                sock.shutdown(socket.SHUT_WR)
                assert_ended(sock)
        with unknown(listener) as sock:
            for byte in whole:
                sock.sendall(bytes([byte]))
            take(listener).close()


def test_silent_strangers_block_nobody_and_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_door, "_MAX_UNKNOWN", 8)
    monkeypatch.setattr(_door, "_HELLO_TIMEOUT_S", 3600.0)
    with listening() as listener, ExitStack() as stack:
        socks = [stack.enter_context(unknown(listener, b"jaxft-hi")) for _ in range(20)]
        assert_open(listener)  # none of them has lost its patience
        for sock in socks[:12]:
            assert_ended(sock)
    monkeypatch.setattr(_door, "_HELLO_TIMEOUT_S", 0.05)
    with listening() as listener, unknown(listener, b"jaxft") as sock:
        assert_ended(sock)


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        (raw_request(version=1), b"has version 1 of the data plane; this process has version 5"),
        (raw_request(version=1)[:35], b"has version 1 of the data plane; this process has version 5"),
        (
            raw_request(to=b"you"),
            b"for incarnation 9 of group 'you'; this process is incarnation 9 of group 'me'",
        ),
        (raw_request(to_incarnation=8), b"for incarnation 8 of group 'me'; this process is incarnation 9"),
        (raw_request(kind=9), b"unknown kind 9"),
        (raw_request(group=b"\xff\xfe"), b"not UTF-8"),
        (raw_request(job=b"other"), b"for job 'other'; this process belongs to job 'job'"),
        (raw_request(kind=1), b"does not heal other groups"),
    ],
)
def test_a_request_that_is_refused_is_answered(sent: bytes, match: bytes) -> None:
    with listening() as listener:
        with unknown(listener, sent) as sock:
            answer = sock.recv(1000)
            assert answer.startswith(b"jaxft-re")
            assert match in answer
            assert_ended(sock)
        assert_open(listener)


def test_the_dialler_hears_why_it_is_refused() -> None:
    with listening(job="other") as listener:
        with pytest.raises(ConnectionError, match=r"^127.0.0.1:\d+ refused .* for job 'job'.* job 'other'"):
            call(listener)


def test_names_have_a_bound() -> None:
    with pytest.raises(ConfigurationError, match="job's name '' has 0 bytes"):
        Listener(job="", group="me", incarnation=9, on_heal=None)
    with listening() as listener:
        with pytest.raises(
            ConfigurationError, match=r"group's name 'xx.* has 256 bytes; it must have 1 to 255"
        ):
            call(listener, request(group="x" * 256))
        with call(listener, request(group="ü" * 127)):
            pass


def test_parked_connections_are_bounded_and_the_oldest_quorum_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_pending, "MAX_PENDING", 3)
    with listening() as listener, ExitStack() as stack:
        socks = {q: stack.enter_context(call(listener, request(number=q))) for q in (8, 6, 7, 9)}
        assert_ended(socks[6])
        for quorum_id in (7, 8, 9):
            take(listener, quorum_id=quorum_id).close()


def test_one_whose_request_is_there_is_not_dropped_for_one_that_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many come in a row; messages of the first are read before they are judged."""
    monkeypatch.setattr(_door, "_MAX_UNKNOWN", 1)
    with listening() as listener, unknown(listener) as peer:
        patience.until(lambda: len(listener._door.half_open) == 1, "the peer's connection")
        (waiting,) = listener._door.half_open.values()
        take_in = listener._door._take_in

        def crowded(sock: socket.socket, name: str) -> None:
            peer.sendall(encode(request()))
            select.select([waiting.sock], [], [])
            take_in(sock, name)

        monkeypatch.setattr(listener._door, "_take_in", crowded)
        with unknown(listener), take(listener, wait_s=10.0):
            pass


def test_healing_has_a_thread_of_its_own() -> None:
    seen: queue.Queue[tuple[str, ConnectionRequest]] = queue.Queue()

    def on_heal(connection: Connection, sent: ConnectionRequest) -> None:
        seen.put((threading.current_thread().name, sent))
        connection.sock.sendall(b"state")

    joiner = request("heal", number=0)
    with listening(on_heal) as listener, call(listener, joiner) as sock:
        assert sock.recv(5, socket.MSG_WAITALL) == b"state"
        assert_ended(sock)  # closed when on_heal returns
        assert seen.get(timeout=patience.FAR_S) == ("jaxft-heal-group-1", joiner)


def test_healing_that_fails_is_logged_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def on_heal(*_: object) -> None:
        raise RuntimeError("no such state")

    with listening(on_heal) as listener:
        with call(listener, request("heal")) as sock:
            assert_ended(sock)
        assert_open(listener)
    assert "Healing group 'group-1' failed" in caplog.text
    assert "RuntimeError: no such state" in caplog.text


def test_a_process_without_room_for_a_thread_sends_the_joiner_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = threading.Event()
    start = threading.Thread.start

    def without_room(thread: threading.Thread) -> None:
        if thread.name.startswith("jaxft-heal"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with listening(lambda *_: served.set()) as listener:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", without_room)
            with call(listener, request("heal")) as sock:
                assert_ended(sock)
        assert not listener._healing
        sent = "Group 'group-1' has to ask again to be healed: can't start new thread."
        assert [record.getMessage() for record in caplog.records] == [sent]
        with call(listener, request("heal")) as sock:
            assert_ended(sock)
        assert served.is_set()


def test_healing_is_bounded_and_a_stopped_joiner_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_listener, "_MAX_HEALING", 2)
    with listening(lambda one, _: assert_ended(one.sock)) as listener, ExitStack() as stack:
        socks = [stack.enter_context(call(listener, request("heal", group=f"g{k}"))) for k in range(2)]
        with pytest.raises(ConnectionError, match="already healing 2 groups, its limit: ask another donor"):
            call_until_answered(listener, request("heal"))
        assert_open(listener)
        threading.Timer(0.05, socks[0].close).start()
        stack.enter_context(call(listener, request("heal")))  # it dials again while the donor is busy


def call_until_answered(listener: Listener, sent: ConnectionRequest) -> None:
    """Dial with little time; with more of it if the machine was too slow for an answer."""
    wait_s = 0.1
    while True:
        with contextlib.suppress(TimeoutError):
            call(listener, sent, wait_s=wait_s)
            return
        wait_s *= 4


def test_a_hundred_joiners_are_healed_at_once() -> None:
    with listening(lambda one, _: assert_ended(one.sock)) as listener, ExitStack() as stack:
        for joiner in range(100):
            stack.enter_context(call(listener, request("heal", group=f"g{joiner}")))
        patience.until(lambda: len(listener._healing) == 100, "all of them to be served")


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_dialling_something_else(sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dials = 0

        def serve() -> None:
            nonlocal dials
            with contextlib.suppress(OSError):  # shut down below
                while True:
                    with server.accept()[0] as sock:
                        dials += 1
                        sock.recv(1000)
                        sock.sendall(sent)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        match = (
            "Another program, or another version"
            if sent
            else "closed the connection 21 times before it answered"
        )
        with pytest.raises(ConnectionError, match=f"^{address} .*{match}"):
            dial(address, request(), deadline_s=soon())
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        assert dials == (1 if sent else 21)


def test_dialling_a_stopped_process_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=f"waiting for {address} to accept a connection for exchange"):
            dial(address, request(), deadline_s=soon(0.05))
        abort = Abort()
        abort.set("stop")
        with pytest.raises(ConnectionError, match="stop"):
            dial(address, request(), deadline_s=soon(), abort=abort)


def test_all_addresses_and_both_families() -> None:
    with listening(host="") as listener:
        assert_open(listener)
        if socket.has_dualstack_ipv6():
            with dial(f"[::1]:{listener.port}", request(), deadline_s=soon()):
                take(listener).close()


def test_the_door_stays_open_after_an_error_of_our_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with listening() as listener:
        with monkeypatch.context() as patch:
            patch.setattr(_door, "decode", lambda _: 1 // 0)
            with unknown(listener, raw_request()) as sock:
                sock.shutdown(socket.SHUT_WR)
                assert_ended(sock)
        assert_open(listener)
    assert "A connection from 127.0.0.1 to port" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_an_error_of_the_listener_itself_reaches_the_training_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with listening() as listener, call(listener, request(number=7)) as parked:
        monkeypatch.setattr(listener._door, "_accept_some", lambda: 1 // 0)

        def knocked() -> bool:
            """The first may still be taken by work under way."""
            with contextlib.suppress(OSError):
                unknown(listener).close()
            return not listener._thread.is_alive()

        patience.until(knocked, "the listener to end")
        assert_ended(parked)
        with pytest.raises(ConnectionError, match="This process is leaving"):
            take(listener, quorum_id=7)
        with pytest.raises(JaxftError, match=r"group 'me' on port \d+ failed with ZeroDivisionError"):
            listener.check(2)
    assert "The listener on port" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_dialler_that_was_dropped_before_it_was_answered_dials_again() -> None:
    with listening() as listener, socket.create_server(("127.0.0.1", 0)) as drops_some:

        def serve() -> None:
            for reset in (True, False):
                with drops_some.accept()[0] as sock:
                    sock.recv(1000)
                    if reset:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with drops_some.accept()[0] as sock, unknown(listener, sock.recv(1000)) as onward:
                sock.sendall(onward.recv(1000))

        thread = threading.Thread(target=serve)
        thread.start()
        dial(f"127.0.0.1:{drops_some.getsockname()[1]}", request(), deadline_s=soon()).close()
        thread.join()


def test_a_group_may_open_as_many_descriptors_as_its_machine_lets_it() -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    usual = 4096 if hard == resource.RLIM_INFINITY else hard - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (usual, hard))
    try:
        with listening() as listener:
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
            assert listener._descriptors == (sys.maxsize if hard == resource.RLIM_INFINITY else hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def test_too_few_descriptors_for_a_quorum_are_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    with listening() as listener:
        listener._descriptors = 4096
        listener.check(1000)
        assert not caplog.records
        for _ in range(2):
            listener.check(4000)
    (sent,) = caplog.messages
    assert (
        "Connections to 4000 other groups may need 8500 file descriptors, but this process may open only 4096"
        in sent
    )


def healing() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("jaxft-heal")]


def test_no_descriptor_is_left_behind() -> None:
    def once() -> None:
        with listening(lambda *_: None) as listener, ExitStack() as stack:
            for sent in (
                b"",
                b"garbage",
                raw_request(job=b"other"),
                raw_request(group=b"g"),
                raw_request(kind=1),
            ):
                stack.enter_context(unknown(listener, sent))
            assert_open(listener)
            call(listener, request(number=8)).close()

    once()
    patience.until(lambda: not healing(), "the first ones to end")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        once()
    gc.collect()
    # Threads that heal close their connections after the listener is closed.
    patience.until(lambda: len(os.listdir("/proc/self/fd")) <= before, "all descriptors to be closed")
