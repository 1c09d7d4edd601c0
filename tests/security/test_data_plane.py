"""The data plane with a key: who does not know it is neither let in nor healed, and learns nothing."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from jaxft_protocol import credentials
from jaxft_protocol.credentials import DataKey, JobKey

from jaxft._transport import _door
from jaxft._transport._handshake import MAX_REASON_BYTES, RESPONSE_BYTES, accepted, challenge, refused
from jaxft._transport._listener import Connection, ConnectionRequest, Listener, dial
from tests import patience
from tests.security.unknown_clients import assert_ended, raw_request

KEY = credentials.data_key(JobKey(b"k" * 32))
OTHER_KEY = credentials.data_key(JobKey(b"o" * 32))
PATIENCE_S = patience.FAR_S

OnHeal = Callable[[Connection, ConnectionRequest], None]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds must not cost us a connection in the middle of a test."""
    monkeypatch.setattr(_door, "_HELLO_TIMEOUT_S", PATIENCE_S)


def soon(wait_s: float = PATIENCE_S) -> float:
    return time.monotonic() + wait_s


def request(kind: str = "exchange", group: str = "group-1", job: str = "job") -> ConnectionRequest:
    return ConnectionRequest(kind, job, group, 3, "me", 9, 5)


@contextmanager
def listening(key: DataKey | None = KEY, on_heal: OnHeal | None = None) -> Iterator[Listener]:
    listener = Listener(host="127.0.0.1", job="job", group="me", incarnation=9, on_heal=on_heal, key=key)
    try:
        yield listener
    finally:
        listener.close()


def call(
    listener: Listener, sent: ConnectionRequest | None = None, key: DataKey | None = KEY
) -> socket.socket:
    return dial(f"127.0.0.1:{listener.port}", sent or request(), deadline_s=soon(), key=key).sock


def take(listener: Listener, group: str = "group-1", wait_s: float = PATIENCE_S) -> socket.socket:
    return listener.take(quorum_id=5, group=group, incarnation=3, deadline_s=soon(wait_s), abort=None).sock


def assert_serves(listener: Listener) -> None:
    """A group that knows the key is still served."""
    with call(listener, request(group="friend")) as theirs, take(listener, "friend") as ours:
        theirs.sendall(b"ping")
        assert ours.recv(4, socket.MSG_WAITALL) == b"ping"


def assert_nothing_is_pending(listener: Listener, group: str = "group-1") -> None:
    with pytest.raises(TimeoutError):
        take(listener, group, wait_s=0.0)


def connect(listener: Listener, sent: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", listener.port), timeout=PATIENCE_S)
    sock.sendall(sent)
    return sock


def challenged(listener: Listener, sent: bytes) -> tuple[socket.socket, bytes]:
    """Say a connection request by hand; return the connection and the nonce of the challenge that comes back."""
    sock = connect(listener, sent)
    got = sock.recv(len(challenge(bytes(32))), socket.MSG_WAITALL)
    assert got[:-32] == challenge(bytes(32))[:-32]
    return sock, got[-32:]


def test_tags_are_under_keys_of_each_connection_and_direction() -> None:
    """Of equal frames each has another tag, which only the other end knows. A checksum could be made by anyone."""
    tags: set[bytes] = set()
    with listening() as listener:
        for _ in range(2):
            with dial(f"127.0.0.1:{listener.port}", request(), deadline_s=soon(), key=KEY) as theirs:
                with listener.take(
                    quorum_id=5, group="group-1", incarnation=3, deadline_s=soon(), abort=None
                ) as ours:
                    for outgoing, incoming in (
                        (theirs.outgoing, ours.incoming),
                        (ours.outgoing, theirs.incoming),
                    ):
                        tag = outgoing.tag(b"header", b"payload")
                        assert incoming.tag(b"header", b"payload") == tag
                        tags.add(tag)
    assert len(tags) == 4


@pytest.mark.parametrize("kind", ["exchange", "heal"])
@pytest.mark.parametrize(
    ("dialler", "listener", "text"),
    [
        (None, KEY, "asks for a proof of the job's key, but group 'group-1' has no key"),
        (
            OTHER_KEY,
            KEY,
            "refused .* did not prove that it knows the key of job 'job': start .* same token",
        ),
        (KEY, None, "did not prove that it knows the key of job 'job': it is not a group of this job"),
    ],
    ids=["dialler without", "two keys", "listener without"],
)
def test_unequal_keys_do_not_connect(
    kind: str, dialler: DataKey | None, listener: DataKey | None, text: str
) -> None:
    healed = threading.Event()
    with listening(listener, lambda *_: healed.set()) as door:
        with pytest.raises(ConnectionError, match=text):
            call(door, request(kind), dialler)
        if listener is not None:
            assert_nothing_is_pending(door)
            assert_serves(door)
            assert not healed.is_set()


def test_a_stranger_gets_no_byte_of_the_state() -> None:
    def give_all(connection: Connection, _: ConnectionRequest) -> None:
        connection.sock.sendall(b"state")

    with listening(on_heal=give_all) as listener:
        with call(listener, request("heal")) as sock:
            assert sock.recv(5, socket.MSG_WAITALL) == b"state"
        # All that it may say at once, in the hope that no check follows.
        eager = raw_request(kind=1) + bytes(RESPONSE_BYTES) + b"\0" * 1000
        with connect(listener, eager) as sock:
            got = b"".join(iter(lambda: receive(sock), b""))
            assert got.startswith(challenge(b"")[:10])
            assert b"state" not in got
        assert_serves(listener)


def receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionResetError:
        return b""


def response(key: DataKey, sent: bytes, nonce: bytes) -> bytes:
    ours = credentials.new_nonce()
    return ours + credentials.dialler_proof(key, sent, listener_nonce=nonce, dialler_nonce=ours)


def test_a_response_serves_for_one_connection_and_one_request_only() -> None:
    sent = raw_request()
    with listening() as listener:
        first, nonce = challenged(listener, sent)
        good = response(KEY, sent, nonce)
        first.sendall(good)
        take(listener).close()
        first.close()
        for bad in (good, good[32:] + good[:32], bytes(64), response(KEY, raw_request(group=b"x"), nonce)):
            again, _ = challenged(listener, sent)
            again.sendall(bad)
            assert again.recv(1000).startswith(refused("")[:10])
            assert_ended(again)
            again.close()
        assert_nothing_is_pending(listener)


def test_the_response_may_come_in_pieces_and_has_no_more_time_than_a_request() -> None:
    sent = raw_request()
    with listening() as listener:
        sock, nonce = challenged(listener, sent)
        for byte in response(KEY, sent, nonce):
            sock.sendall(bytes([byte]))
        take(listener).close()
        sock.close()
    with listening() as listener, connect(listener) as silent:
        patience.until(lambda: listener._door.half_open, "the connection")
        (half,) = listener._door.half_open.values()
        until_s = half.deadline_s
        silent.sendall(sent)
        silent.recv(len(challenge(bytes(32))), socket.MSG_WAITALL)
        assert half.deadline_s == until_s
        half.deadline_s = soon(0.0)
        connect(listener).close()  # so that the listener looks
        assert_ended(silent)


def test_a_key_tells_a_stranger_nothing_about_the_job() -> None:
    """Neither its name nor its quorums: a connection request is answered with a challenge, whatever it asks."""
    with listening() as listener:
        listener.forget(5)
        for sent in (raw_request(), raw_request(job=b"another")):
            sock, _ = challenged(listener, sent)
            sock.close()


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ([accepted()], "did not prove"),
        ([challenge(bytes(32)), accepted(bytes(32))], "did not prove"),
        ([challenge(bytes(32)), challenge(bytes(32)), accepted()], "an invalid challenge"),
        ([challenge(bytes(31))], "an invalid challenge"),
        ([struct.pack("<8sBBH", b"jaxft-re", 4, 1, MAX_REASON_BYTES + 1)], "Another program, or another ver"),
    ],
    ids=["no proof", "a wrong proof", "two challenges", "a short nonce", "a long reason"],
)
def test_a_listener_that_cannot_prove_itself_is_not_believed(script: list[bytes], text: str) -> None:
    with impostor(script) as address, pytest.raises(ConnectionError, match=f"{address}.* {text}"):
        dial(address, request(), deadline_s=soon(), key=KEY)


def test_an_impostor_cannot_hand_back_what_it_was_given() -> None:
    """It answers with the dialler's own proof."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def mirror() -> None:
            with server.accept()[0] as sock:
                sock.recv(1000)
                sock.sendall(challenge(b"n" * 32))
                given = sock.recv(RESPONSE_BYTES, socket.MSG_WAITALL)
                sock.sendall(accepted(given[32:]))

        thread = threading.Thread(target=mirror)
        thread.start()
        with pytest.raises(ConnectionError, match="did not prove"):
            dial(f"127.0.0.1:{server.getsockname()[1]}", request(), deadline_s=soon(), key=KEY)
        thread.join()


@contextmanager
def impostor(script: list[bytes]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as sock:
                for sent in script:
                    sock.recv(1000)
                    sock.sendall(sent)
                receive(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()
