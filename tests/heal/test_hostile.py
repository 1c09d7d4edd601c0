"""Whatever a donor or a joiner sends: it ends its connection, and nothing else."""

import contextlib
import gc
import json
import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxft._errors import HealFailed
from jaxft._heal import _server, _stripes
from jaxft._heal._frames import MAGIC, BadFrame, Kind, Reply, Request, Status
from jaxft._transport._listener import Abort, ConnectionRequest, dial
from tests import patience

from .donors import (
    LONG_S,
    MB,
    Script,
    blob_of_leaves,
    descriptors,
    donor,
    fetch_state,
    heal_threads,
    hostile,
    in_thread,
    joiner,
    manifest,
    request_bytes,
    same_bits,
    send_chunk,
    send_text,
    soon,
    specs_of,
    tagged,
    until,
    values,
)

HEAL = 5
STATE = [values((3 * MB,)), values((5,), "bfloat16")]  # 13 chunks: two spans
BLOB = blob_of_leaves(STATE)


def zeros() -> list[np.ndarray]:
    return [np.zeros_like(leaf) for leaf in STATE]


def header(status: int, index: int, length: int, *, magic: int = MAGIC) -> bytes:
    return struct.pack("!IBxxxII", magic, status, index, length)


def after_the_manifest(then: Callable[[socket.socket, Request], None]) -> Script:
    """Begins as a good donor does, then answers the first request for chunks so."""

    def script(sock: socket.socket, ask: Callable[[], Request]) -> None:
        ask()
        manifest(sock, STATE)
        then(sock, ask())
        sock.shutdown(socket.SHUT_WR)
        ask()  # waits for the joiner to close

    return script


def answers(data: bytes) -> Script:
    """Answers the first request with these bytes, and hears out whatever else the joiner sends."""

    def script(sock: socket.socket, ask: Callable[[], Request]) -> None:
        ask()
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while True:
            ask()

    return script


def answers_text(given: str | bytes, status: Status = Status.OK) -> Script:
    def script(sock: socket.socket, ask: Callable[[], Request]) -> None:
        ask()
        send_text(sock, status, given)
        ask()

    return script


def chunks_then(count: int, then: Callable[[socket.socket, int], None]) -> Script:
    """Serves some chunks well, and then something else."""

    def serve(sock: socket.socket, request: Request) -> None:
        for chunk in range(request.first, request.first + count):
            send_chunk(sock, BLOB, chunk)
        then(sock, request.first + count)

    return after_the_manifest(serve)


def flipped(sock: socket.socket, chunk: int) -> None:
    send_chunk(sock, BLOB, chunk, flip=True)


def half_a_chunk(sock: socket.socket, chunk: int) -> None:
    data = b"".join(BLOB.read(chunk))
    sock.sendall(Reply(Status.OK, chunk, len(data)).encode() + data[: len(data) // 2])


def another_chunk(sock: socket.socket, chunk: int) -> None:
    send_chunk(sock, BLOB, chunk + 1)


SCRIPTS: dict[str, tuple[Script, str]] = {
    "it closes at once": (lambda *_: None, "closed the connection|reset|broke"),
    "it closes after the request": (answers(b""), "closed the connection"),
    "garbage": (answers(random.Random(1).randbytes(1000)), "is not a reply of healing"),
    "no magic": (answers(header(0, 0, 0, magic=7)), "magic 0x7"),
    "unknown status": (answers(header(9, 0, 0)), "a reply of status 9"),
    "half a header": (answers(header(0, 0, 0)[:10]), "closed the connection"),
    "a huge manifest": (answers(header(0, 0, 2**32 - 1)), "announced a text of 4294967295 bytes"),
    "a manifest cut off": (answers(header(0, 0, 5000) + b'{"step"'), "closed the connection"),
    "a damaged manifest": (answers(header(0, 0, 2) + b"{}" + bytes(8)), "answer was damaged"),
    "no JSON": (answers_text("request"), "manifest cannot be read"),
    "not UTF-8": (answers_text(b"\xff\xfe\x00"), "manifest cannot be read"),
    "another JSON": (answers_text("[1, 2]"), "manifest cannot be read"),
    "nothing in it": (answers_text("{}"), "manifest cannot be read"),
    "deep JSON": (answers_text("[" * 100_000), "manifest cannot be read"),
    "leaves of nonsense": (answers_text(json.dumps({"step": 0, "leaves": [3]})), "manifest cannot be read"),
    "shapes of nonsense": (answers_text('{"step": 0, "leaves": [[["x"], "f4"]]}'), "manifest cannot be read"),
    "an endless shape": (answers_text('{"step": 0, "leaves": [[[1e999], "f4"]]}'), "manifest cannot be read"),
    "a step of nonsense": (answers_text('{"step": [], "leaves": []}'), "manifest cannot be read"),
    "a status that makes no sense": (answers_text("so there", Status.BAD), "so there"),
    "a huge refusal": (after_the_manifest(lambda s, _: s.sendall(header(2, 0, 10_001))), "10001 bytes"),
    "gone, later": (
        chunks_then(2, lambda s, _: send_text(s, Status.GONE, "it is overwritten")),
        "overwritten",
    ),
    "not yet, after it has begun": (
        chunks_then(2, lambda s, _: send_text(s, Status.NOT_YET, "later")),
        "it stopped in the middle of a state or means: later",
    ),
    "another chunk": (chunks_then(1, another_chunk), "it sent chunk 2 with .* instead of chunk 1 with"),
    "a huge chunk": (
        chunks_then(3, lambda s, c: s.sendall(header(0, c, 2**32 - 1))),
        "chunk 3 with 4294967295 bytes instead of chunk 3 with 1048576",
    ),
    "an empty chunk": (chunks_then(0, lambda s, c: s.sendall(header(0, c, 0))), "chunk 0 with 0 bytes"),
    "flipped bits": (chunks_then(3, flipped), r"chunk \d was damaged"),
    "half a chunk": (chunks_then(3, half_a_chunk), "of 1048576 bytes missing"),
    "no more after two": (chunks_then(2, lambda *_: None), "closed the connection"),
    "garbage between chunks": (
        chunks_then(1, lambda s, _: s.sendall(random.Random(2).randbytes(100))),
        "is not a reply of healing",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_hostile_donor_alone_fails_the_heal_by_name(name: str) -> None:
    script, reason = SCRIPTS[name]
    with hostile("evil", script) as evil, joiner(evil) as fetcher:
        with pytest.raises(HealFailed, match=f"(?s)no donor is left \\(evil: .*({reason})"):
            fetch_state(fetcher, 0, zeros())


@pytest.mark.parametrize(
    "name", [name for name in SCRIPTS if "chunk" in name or "flip" in name or "JSON" in name]
)
def test_a_good_donor_makes_up_for_a_hostile_one(name: str) -> None:
    """The good one begins only when the other has begun to take spans, so both take part."""
    begun = threading.Event()
    script = SCRIPTS[name][0]

    def noted(sock: socket.socket, ask: Callable[[], Request]) -> None:
        begun.set()
        script(sock, ask)

    with hostile("evil", noted) as evil, donor("good", STATE) as good, joiner(evil, good) as fetcher:
        state_of = good.store.state

        def waits(heal_id: int, *span: Any, deadline_s: float) -> Any:
            assert begun.wait(LONG_S)
            return state_of(heal_id, *span, deadline_s=deadline_s)

        good.store.state = waits  # pyright: ignore[reportAttributeAccessIssue]
        good.store.pin(HEAL, 0)
        assert same_bits(fetch_state(fetcher, 0, zeros()), STATE)


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_donor_is_dialled_once_more_if_a_chunk_arrives_damaged(
    damaged: int, caplog: pytest.LogCaptureFixture
) -> None:
    """By itself the network damages little. Stripes that have arrived are not fetched again."""
    dials: list[list[int]] = []
    sent: list[int] = []

    def script(sock: socket.socket, ask: Callable[[], Request]) -> None:
        dials.append([])
        ask()
        manifest(sock, STATE)
        while True:
            request = ask()
            for chunk in range(request.first, request.first + request.count):
                flip = len(dials) <= damaged and len(dials[-1]) == 2
                dials[-1].append(chunk)
                sent.extend([] if flip else [chunk])
                send_chunk(sock, BLOB, chunk, flip=flip)
                if flip:
                    _drain(sock)
                    return

    with hostile("only", script) as only, joiner(only) as fetcher:
        if damaged == 1:
            assert same_bits(fetch_state(fetcher, 0, zeros()), STATE)
            assert sorted(sent) == list(range(BLOB.layout.chunks))
        else:
            with pytest.raises(HealFailed, match=r"only: chunk \d was damaged"):
                fetch_state(fetcher, 0, zeros())
    assert len(dials) == 2
    assert caplog.text.count("Dials donor only once more: chunk ") == 1
    assert caplog.text.count("Dropped donor only") == damaged - 1


def test_a_heal_that_ends_while_a_donor_is_dialled_again_says_why_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other donor does not keep the missing stripe, and its keeper is silent after that."""
    monkeypatch.setattr(_stripes, "_STALL_S", patience.stretched(0.3))
    dials: list[int] = []
    again = threading.Event()

    def damages(sock: socket.socket, ask: Callable[[], Request]) -> None:
        dials.append(len(dials))
        ask()
        if len(dials) == 1:
            manifest(sock, STATE, stripe=[0, 2], live=False)
            send_chunk(sock, BLOB, ask().first, flip=True)
        else:
            again.set()
        _drain(sock)

    def keeps_the_rest(sock: socket.socket, ask: Callable[[], Request]) -> None:
        ask()
        assert again.wait(LONG_S)
        manifest(sock, STATE, stripe=[1, 2], live=False)
        send_chunk(sock, BLOB, ask().first)
        _drain(sock)

    with hostile("a", damages) as one, hostile("b", keeps_the_rest) as other, joiner(one, other) as fetcher:
        why = r"keeps 12 of 13 chunks, .*\(a: dialled once more, since chunk 0 was damaged"
        with pytest.raises(HealFailed, match=why):
            fetch_state(fetcher, 0, zeros())
    assert len(dials) == 2


def test_a_dropped_donor_is_not_asked_again() -> None:
    asked: list[Request] = []

    def script(sock: socket.socket, ask: Callable[[], Request]) -> None:
        while True:
            asked.append(ask())
            sock.sendall(b"\0" * 100)

    with hostile("evil", script) as evil, donor("good", STATE) as good, joiner(evil, good) as fetcher:
        fetched = in_thread(lambda: fetch_state(fetcher, 0, zeros()))
        until(lambda: asked, "the question")
        good.store.pin(HEAL, 0)  # not before: it alone would have served all of it
        fetched()
        fetcher._donors[0].failed = fetcher._donors[0].failed or "dropped"
        good.store.log(0, [values((3,))])
        fetcher.means(0, specs_of([values((3,))]), cancel=Abort())
    assert [request.kind for request in asked] == [Kind.MANIFEST]


# ---- silence ----


def silent(_: socket.socket, ask: Callable[[], Request]) -> None:
    while True:
        ask()


@pytest.mark.parametrize("where", ["from the start", "after the manifest", "in a chunk", "drop by drop"])
def test_a_silent_donor_is_dropped_after_the_timeout(where: str) -> None:
    def in_a_chunk(sock: socket.socket, request: Request) -> None:
        half_a_chunk(sock, request.first)
        _drain(sock)  # nothing comes: the joiner gives up

    def drop_by_drop(sock: socket.socket, request: Request) -> None:
        data = tagged(Reply(Status.OK, request.first, MB), b"".join(BLOB.read(request.first)))
        for drop in data:
            sock.sendall(bytes([drop]))
            time.sleep(0.01)  # the drip itself, not a wait

    script: Script = {
        "from the start": silent,
        "after the manifest": after_the_manifest(lambda sock, _: _drain(sock)),
        "in a chunk": after_the_manifest(in_a_chunk),
        "drop by drop": after_the_manifest(drop_by_drop),
    }[where]
    with hostile("mute", script) as mute, joiner(mute, timeout_s=1.0) as fetcher:
        began_s, began_machine_s = time.monotonic(), patience.machine_s()
        with pytest.raises(
            HealFailed, match=r"mute: Timed out after \d+\.\d s waiting for donor mute's (answer|chunk)"
        ):
            fetch_state(fetcher, 0, zeros())
        assert 1.0 <= time.monotonic() - began_s
        assert patience.machine_s() - began_machine_s < 10


def _drain(sock: socket.socket) -> None:
    while sock.recv(100):
        pass


def test_a_donor_that_stands_still_with_a_span_is_soon_relieved_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Alone it would have 30 s; the other has nothing left to do but that span."""
    monkeypatch.setattr(_stripes, "_STALL_S", 0.2)
    took = threading.Event()

    def stuck(sock: socket.socket, request: Request) -> None:
        send_chunk(sock, BLOB, request.first)
        took.set()
        _drain(sock)

    with hostile("stuck", after_the_manifest(stuck)) as one, donor("good", STATE) as good:
        with joiner(one, good, timeout_s=LONG_S) as fetcher, caplog.at_level(logging.WARNING, "jaxft"):
            state_of = good.store.state

            def waits(heal_id: int, *span: Any, deadline_s: float) -> Any:
                assert took.wait(LONG_S)
                return state_of(heal_id, *span, deadline_s=deadline_s)

            good.store.state = waits  # pyright: ignore[reportAttributeAccessIssue]
            good.store.pin(HEAL, 0)
            began_s = patience.machine_s()
            assert same_bits(fetch_state(fetcher, 0, zeros()), STATE)
            assert patience.machine_s() - began_s < LONG_S / 2
    assert "Dropped donor stuck: it sent nothing for 0.2 s while other donors were idle" in caplog.text


def test_nobody_waits_for_a_donor_that_has_not_begun(caplog: pytest.LogCaptureFixture) -> None:
    with hostile("mute", silent) as mute, donor("good", STATE) as good:
        with joiner(mute, good, timeout_s=LONG_S) as fetcher, caplog.at_level(logging.WARNING, "jaxft"):
            good.store.pin(HEAL, 0)
            began_s = patience.machine_s()
            assert same_bits(fetch_state(fetcher, 0, zeros()), STATE)
            assert patience.machine_s() - began_s < LONG_S / 2
    assert not caplog.records, "it was slow, which is no fault yet"


def test_an_address_where_nobody_answers_delays_nobody() -> None:
    """As of a process that is stopped: its kernel takes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as stopped, donor("good", STATE) as good:
        address = f"127.0.0.1:{stopped.getsockname()[1]}"
        with joiner(("stopped", address), good, timeout_s=LONG_S) as fetcher:
            good.store.pin(HEAL, 0)
            began_s = patience.machine_s()
            assert same_bits(fetch_state(fetcher, 0, zeros()), STATE)
            assert patience.machine_s() - began_s < LONG_S / 2
        with joiner(("stopped", address), timeout_s=0.2) as fetcher:
            with pytest.raises(HealFailed, match=r"stopped: Timed out after \d+\.\d s"):
                fetch_state(fetcher, 0, zeros())


def test_hostile_donors_leave_nothing_behind() -> None:
    def all_of_them() -> None:
        for script, _ in SCRIPTS.values():
            with hostile("evil", script) as evil, joiner(evil) as fetcher:
                with pytest.raises(HealFailed):
                    fetch_state(fetcher, 0, [np.zeros(3, np.float32)])
        until(lambda: not heal_threads(), "the threads to end")

    all_of_them()
    gc.collect()
    before = descriptors()
    all_of_them()
    gc.collect()
    assert descriptors() <= before


# ---- joiners ----


def request() -> ConnectionRequest:
    return ConnectionRequest("heal", "job", "joiner", 3, "group-0", 1, HEAL)


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" + bytes(40),
        random.Random(3).randbytes(4000),
        Request(Kind.MANIFEST, HEAL, 0).encode()[:20],
        struct.pack("!IBxxxQQII", MAGIC, 77, HEAL, 0, 0, 0),
        struct.pack("!IBxxxQQII", MAGIC, 0, HEAL, 0, 0, 0),
        struct.pack("!IBxxxQQII", 1, 1, HEAL, 0, 0, 0),
    ],
    ids=["nothing", "http", "garbage", "cut off", "unknown kind", "kind 0", "no magic"],
)
def test_a_hostile_joiner_ends_its_own_connection_only(given: bytes) -> None:
    with donor(leaves=STATE) as one, dial(one.address, request(), deadline_s=soon(), abort=None).sock as sock:
        one.store.pin(HEAL, 0)
        sock.sendall(given)
        with contextlib.suppress(OSError):  # the donor was quicker
            sock.shutdown(socket.SHUT_WR)
        assert_ended(sock)
        with joiner(one) as fetcher:
            assert same_bits(fetch_state(fetcher, 0, zeros()), STATE)


def assert_ended(sock: socket.socket) -> None:
    sock.settimeout(LONG_S)
    try:
        while sock.recv(1000):
            pass
    except ConnectionResetError:
        return


def test_a_joiner_that_dies_in_the_middle_of_a_chunk() -> None:
    with donor(leaves=STATE) as one:
        one.store.pin(HEAL, 0)
        for _ in range(3):
            with dial(one.address, request(), deadline_s=soon(), abort=None).sock as sock:
                sock.sendall(request_bytes(Request(Kind.STATE, HEAL, 0, 0, 13)))
                assert sock.recv(100)
        until(lambda: not heal_threads(), "the donor's threads to end")


def test_a_joiner_that_stops_reading_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "TRANSFER_TIMEOUT_S", 0.5)
    state = [values((16 * MB,), "uint8")]
    with donor(leaves=state) as one, dial(one.address, request(), deadline_s=soon(), abort=None).sock as sock:
        one.store.pin(HEAL, 0)
        sock.sendall(request_bytes(Request(Kind.STATE, HEAL, 0, 0, 16)))
        assert sock.recv(100)
        began_s = patience.machine_s()
        one.store.log(0, [values((3,))])
        one.store.before_donation()
        one.store.publish(1, [values((3,))])
        one.store.release(HEAL)
        assert patience.machine_s() - began_s < 0.5
        one.store.pin(6, 1)
        with joiner(one, heal_id=6) as fetcher:
            assert same_bits(fetch_state(fetcher, 1, [values((3,))]), [values((3,))])
        until(lambda: not heal_threads(), "the donor to give the first one up")
        assert_ended(sock)


def test_a_request_that_stays_incomplete_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "TRANSFER_TIMEOUT_S", 0.1)
    with donor(leaves=STATE) as one, dial(one.address, request(), deadline_s=soon(), abort=None).sock as sock:
        sock.sendall(Request(Kind.MANIFEST, HEAL, 0).encode()[:5])
        assert_ended(sock)


def test_a_joiner_that_says_nothing_for_long_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "IDLE_TIMEOUT_S", 0.1)
    with donor(leaves=STATE) as one, dial(one.address, request(), deadline_s=soon(), abort=None).sock as sock:
        assert_ended(sock)


def test_the_end_of_the_donor_ends_its_connections() -> None:
    with donor(leaves=STATE) as one:
        sock = dial(one.address, request(), deadline_s=soon(), abort=None).sock
        waiting = in_thread(lambda: assert_ended(sock))
    waiting()
    sock.close()


# ---- frames ----


def test_frames_keep_every_field() -> None:
    for kind in Kind:
        request = Request(kind, 2**64 - 1, 2**63, 2**32 - 1, 7)
        assert Request.decode(request.encode()) == request
    for status in Status:
        reply = Reply(status, 2**32 - 1, 12)
        assert Reply.decode(reply.encode()) == reply


def test_no_kind_and_no_status_is_zero_by_accident() -> None:
    with pytest.raises(BadFrame):
        Request.decode(bytes(len(Request(Kind.STATE, 0, 0).encode())))
    with pytest.raises(BadFrame):
        Reply.decode(bytes(len(Reply(Status.OK, 0, 0).encode())))
