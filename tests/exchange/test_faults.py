"""Attacks of a peer on an exchange: at worst they make it fail, soon, by name, with the contributions kept."""

import contextlib
import itertools
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._arrays._memory import result_regions
from jaxft._errors import ExchangeFailed
from jaxft._exchange import _exchange, _patience, _reducer
from jaxft._exchange._exchange import exchange_into
from jaxft._exchange._frames import PARTIAL, VERSION, Stamp, tag
from jaxft._exchange._links import Links
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import LongWaits, Patience
from jaxft._exchange._plan import Plan, Task, partials_to, results_from
from jaxft._transport._seals import Checksums, Connection
from jaxft._transport._sockets import Abort
from tests import patience

from .members import (
    BIG,
    assert_same_bits,
    exchange_all,
    mesh,
    partials_of,
    peers_of,
    reference_means,
    regions_of,
    run_exchange,
    together,
)

pytestmark = pytest.mark.usefixtures("lane")

SPECS = (LeafSpec("x", (300_000,), "float32"),)
LAYOUT = Layout.of(SPECS)
QUORUM, STEP = 4, 11


@contextmanager
def against(abort: Abort | None = None) -> Iterator[tuple[Links, socket.socket]]:
    """Member 0 of two, and the raw socket of the other."""
    ours, theirs = socket.socketpair()
    links = Links(
        job="job",
        quorum_id=QUORUM,
        me=0,
        members=peers_of([[0], [1]]),
        connections={1: Connection.plain(ours)},
        abort=abort or Abort(),
    )
    with theirs:
        yield links, theirs
        links.close()


def expected_frames(**changes: int) -> list[bytes]:
    """The headers that member 1 sends, in order; with some fields other than they should be."""
    plan = Plan.of(LAYOUT, [[0], [1]], 2)
    fields = {"sender": 1, "job": tag("job"), "quorum_id": QUORUM, "step": STEP, "layout": tag(LAYOUT.digest)}
    stamp = Stamp(**{**fields, **changes})
    return [frame.header for frame in partials_to(0, stamp=stamp, plan=plan, layout=LAYOUT)]


def first_header(**changes: int) -> bytes:
    return expected_frames(**changes)[0]


def raw_header(**changes: int) -> bytes:
    """A first header, with a late field replaced."""
    names = ("node_start", "node_stop", "region", "length_bytes", "offset")
    values = dict(zip(names, struct.unpack_from("<IIIIQ", first_header(), 40), strict=True))
    return first_header()[:40] + struct.pack("<IIIIQ", *{**values, **changes}.values())


def refuse(payload: bytes, match: str) -> None:
    """The exchange refuses these bytes of its peer, naming it, and closes everything."""
    held = partials_of(LAYOUT, 2, [0])
    with against() as (links, theirs):
        theirs.sendall(payload)
        with pytest.raises(ExchangeFailed, match=match) as caught:
            run_exchange(links, held, step=STEP)
        assert caught.value.peers == ("group-1",)
        assert links.closed
        while theirs.recv(1 << 20):  # earlier bytes, and then the end
            pass
    assert_same_bits(regions_of(held, held.nodes[0]), regions_of(partials_of(LAYOUT, 2, [0]), held.nodes[0]))


def test_raw_header_is_the_first_header() -> None:
    assert raw_header() == first_header()
    assert len(first_header()) == 64


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (
            (b"GET / HTTP/1.1\r\nHost: x\r\n" + b" " * 64)[:64],
            "'group-1' .*begins with b'GET / HTTP/1.1.*not a frame",
        ),
        (bytes(64), "not a frame of an exchange"),
        (b"\xff" * 64, "not a frame of an exchange"),
        (first_header(quorum_id=3), "quorum_id is 3, expected 4"),
        (first_header(step=10), "step is 10, expected 11"),
        (first_header()[:6] + b"\x02\x00" + first_header()[8:], "sender is 2, expected 1"),
        (first_header(job=tag("other")), "job is .*, expected"),
        (first_header(layout=5), "layout is 5, expected"),
        (expected_frames()[1], "offset is .*, expected 0"),
        (raw_header(length_bytes=2**32 - 1), "length_bytes is 4294967295, expected"),
        (raw_header(length_bytes=0), "length_bytes is 0, expected"),
        (raw_header(offset=2**63), "offset is 9223372036854775808, expected 0"),
        (raw_header(region=7), "region is 7, expected 0"),
        (raw_header(node_start=0), "node_start is 0, expected 1"),
        (first_header()[:4] + b"\x09" + first_header()[5:], f"version is 9, expected {VERSION}"),
        (first_header()[:5] + b"\x07" + first_header()[6:], "kind is 7, expected 1"),
    ],
)
def test_a_frame_that_does_not_belong_here(header: bytes, match: str) -> None:
    refuse(header, match)


def test_nothing_is_taken_from_a_refused_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reducer.Reducer, "buffer_for", lambda *_: pytest.fail("asked for memory"))
    with against() as (links, theirs):
        theirs.sendall(raw_header(offset=64) + b"\x01" * 1000)
        with pytest.raises(ExchangeFailed, match="offset is 64"):
            run_exchange(links, partials_of(LAYOUT, 2, [0]), step=STEP)


def test_means_of_a_slice_that_is_not_theirs() -> None:
    plan = Plan.of(LAYOUT, [[0], [1]], 2)
    stamp = Stamp(sender=0, job=tag("job"), quorum_id=QUORUM, step=STEP, layout=tag(LAYOUT.digest))
    (header, *_) = [frame.header for frame in results_from(stamp=stamp, plan=plan, layout=LAYOUT)]
    refuse(header, "sender is 0, expected 1")


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 5000])
def test_a_peer_that_closes(cut: int) -> None:
    held = partials_of(LAYOUT, 2, [0])
    with against() as (links, theirs):
        theirs.sendall((first_header() + bytes(10_000))[:cut])
        theirs.close()
        with pytest.raises(ExchangeFailed, match="'group-1'") as caught:
            run_exchange(links, held, step=STEP)
    assert caught.value.peers == ("group-1",)


@pytest.mark.parametrize("sent", [b"", first_header(), first_header() + bytes(5000)])
def test_a_peer_that_stands_still(sent: bytes) -> None:
    with against() as (links, theirs):
        theirs.sendall(sent)
        begun_s, begun_machine_s = time.monotonic(), patience.machine_s()
        with pytest.raises(
            ExchangeFailed, match=r"made no progress for \d+\.\d s, waiting for group 'group-1'"
        ) as caught:
            run_exchange(links, partials_of(LAYOUT, 2, [0]), step=STEP, progress_timeout_s=0.2)
        assert 0.2 <= time.monotonic() - begun_s
        assert patience.machine_s() - begun_machine_s < 2
    assert caught.value.peers == ("group-1",)


def test_an_exchange_goes_on_while_bytes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a link so slow that the whole takes many times the patience: each piece takes a part of it.

    More pieces than wait in the buffers, so that a member which gets no core for a while has lost no time.
    """
    now_s = 0.0
    for module in (_exchange, _patience):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    lock = threading.Lock()
    held = [partials_of(LAYOUT, 2, [0]), partials_of(LAYOUT, 2, [1])]

    def slowly(source: socket.socket, target: socket.socket, piece_bytes: int) -> None:
        nonlocal now_s
        with contextlib.suppress(OSError):
            while data := source.recv(piece_bytes):
                with lock:
                    now_s += 1 / 40
                target.sendall(data)

    ours, one = socket.socketpair()
    other, theirs = socket.socketpair()
    with one, other:
        links = [
            Links(
                job="job",
                quorum_id=QUORUM,
                me=me,
                members=peers_of([[0], [1]]),
                connections={1 - me: Connection.plain(sock)},
                abort=Abort(),
            )
            for me, sock in enumerate((ours, theirs))
        ]
        lanes = [
            threading.Thread(target=slowly, args=(source, target, 20_000), daemon=True)
            for source, target in ((one, other), (other, one))
        ]
        for lane in lanes:
            lane.start()
        outcomes = together(
            [
                lambda link=link, mine=mine: run_exchange(link, mine, step=STEP, progress_timeout_s=1.0)
                for link, mine in zip(links, held, strict=True)
            ]
        )
        for means in outcomes:
            assert_same_bits(means, reference_means(SPECS, 2))
        assert now_s > 2 * 1.0
        for link in links:
            link.close()
        for lane in lanes:
            patience.join(lane)


def test_no_time_counts_while_a_peer_may_be_computing() -> None:
    held = [partials_of(LAYOUT, 2, [0]), partials_of(LAYOUT, 2, [1])]
    with mesh([[0], [1]]) as links:
        looked = threading.Semaphore(0)

        def counts() -> bool:
            looked.release()
            return False

        def computes_first() -> list[np.ndarray]:
            for _ in range(8):  # many times the other's patience
                assert looked.acquire(timeout=patience.FAR_S)
            return run_exchange(links[1], held[1])

        outcomes = together(
            [lambda: run_exchange(links[0], held[0], progress_timeout_s=0.01, counts=counts), computes_first]
        )
    for means in outcomes:
        assert_same_bits(means, reference_means(SPECS, 2))


def test_time_counts_from_when_all_have_computed_on() -> None:
    heard = threading.Event()
    with against() as (links, _):
        timer = threading.Timer(0.3, heard.set)
        begun_s = time.monotonic()
        timer.start()
        with pytest.raises(
            ExchangeFailed, match=r"made no progress for \d+\.\d s, waiting for group 'group-1'"
        ):
            run_exchange(
                links,
                partials_of(LAYOUT, 2, [0]),
                step=STEP,
                progress_timeout_s=0.2,
                counts=heard.is_set,
            )
        assert time.monotonic() - begun_s >= 0.5
        timer.join()


def test_one_that_is_silent_is_named_while_another_moves_bytes() -> None:
    while (outcome := silent_beside_a_trickle(patience_s=1.0)) is None:
        pass
    assert isinstance(outcome, ExchangeFailed)
    assert outcome.peers == ("group-2",)


def silent_beside_a_trickle(*, patience_s: float) -> object:
    """What becomes of the exchange; None if the machine let no byte move for as long as the patience."""
    layout = Layout.of(SPECS)
    with mesh([[0], [1], [2]]) as links:
        stop = threading.Event()
        sent_s = [time.monotonic()]

        def trickle() -> None:
            plan = links[1].plan(layout, 3)
            stamp = Stamp(sender=1, job=tag("job"), quorum_id=QUORUM, step=STEP, layout=tag(layout.digest))
            frame = next(iter(partials_to(0, stamp=stamp, plan=plan, layout=layout)))
            links[1].connections[0].sock.sendall(frame.header)
            while not stop.wait(0.02):
                links[1].connections[0].sock.sendall(b"\0")
                sent_s.append(time.monotonic())

        def fail() -> list[np.ndarray]:
            try:
                return run_exchange(
                    links[0], partials_of(layout, 3, [0]), step=STEP, progress_timeout_s=patience_s
                )
            finally:
                stop.set()
                sent_s.append(time.monotonic())

        outcome, _ = together([fail, trickle])
    longest_s = max(later - earlier for earlier, later in itertools.pairwise(sent_s))
    return outcome if longest_s < patience_s / 2 else None


def test_only_those_that_owe_partial_sums_are_blamed_for_a_standstill() -> None:
    layout = Layout.of(BIG)
    shards = [[0], [1], [2]]
    with mesh(shards) as links:
        calls: list[Callable[[], object]] = [
            lambda one=one, held=held: run_exchange(one, partials_of(layout, 3, held), progress_timeout_s=2.0)
            for one, held in zip(links[:2], shards[:2], strict=True)
        ]
        outcomes = together(calls)  # group-2 is connected, and silent
    stalled = [outcome for outcome in outcomes if "made no progress" in str(outcome)]
    assert stalled  # the other may have noticed that this one closed its connections
    assert {outcome.peers for outcome in stalled} == {("group-2",)}


def test_one_failure_ends_the_exchange_of_all() -> None:
    layout = Layout.of(BIG)
    shards = [[0], [1], [2], []]
    with mesh(shards) as links:
        calls: list[Callable[[], object]] = [
            lambda one=one, held=held: run_exchange(one, partials_of(layout, 3, held))
            for one, held in zip(links[:3], shards[:3], strict=True)
        ]
        calls.append(links[3].close)
        *outcomes, _ = together(calls)
        for outcome in outcomes:
            assert isinstance(outcome, ExchangeFailed)
            assert outcome.peers
        assert all(one.closed for one in links)


def test_all_who_are_seen_failing_are_named() -> None:
    layout = Layout.of(SPECS)
    with mesh([[0], [1], [2], []]) as links:
        links[1].close()
        links[3].close()
        with pytest.raises(
            ExchangeFailed, match=r"'group-1' .* closed the connection; group 'group-3'"
        ) as caught:
            run_exchange(links[0], partials_of(layout, 3, [0]))
        assert sorted(caught.value.peers) == ["group-1", "group-3"]


def test_abort_wakes_an_exchange_and_blames_nobody() -> None:
    with against() as (links, _):
        woken: list[float] = []
        wait_here = threading.Event()

        def run() -> None:
            wait_here.set()
            with pytest.raises(ExchangeFailed, match="was aborted: a new quorum was formed") as caught:
                run_exchange(links, partials_of(LAYOUT, 2, [0]), step=STEP)
            woken.append(patience.machine_s())
            assert caught.value.peers == ()
            assert links.closed

        thread = threading.Thread(target=run)
        thread.start()
        wait_here.wait(timeout=patience.FAR_S)
        aborted_s = patience.machine_s()
        links.abort.set("a new quorum was formed")
        thread.join(timeout=patience.FAR_S)
        assert woken[0] - aborted_s < 0.5


def test_an_exchange_that_was_aborted_before_it_began() -> None:
    with against() as (links, _):
        links.abort.set("too late")
        with pytest.raises(ExchangeFailed, match="too late"):
            run_exchange(links, partials_of(LAYOUT, 2, [0]), step=STEP)


def test_links_are_not_used_again_after_a_failure() -> None:
    with against() as (links, theirs):
        theirs.close()
        held = partials_of(LAYOUT, 2, [0])
        for _ in range(2):
            with pytest.raises(ExchangeFailed):
                run_exchange(links, held, step=STEP)


def test_after_an_abort_another_quorum_gives_the_undisturbed_bits() -> None:
    layout = Layout.of(BIG)
    held = [partials_of(layout, 5, mine) for mine in ([0], [1, 2], [3, 4])]
    before = [[buffer.copy() for node in mine.nodes for buffer in regions_of(mine, node)] for mine in held]
    with mesh([[0], [1, 2], [3, 4]], quorum_id=4) as links:
        links[2].close()
        assert all(isinstance(each, ExchangeFailed) for each in exchange_all(links[:2], held[:2]))
    after = [[buffer for node in mine.nodes for buffer in regions_of(mine, node)] for mine in held]
    for each, other in zip(before, after, strict=True):
        assert_same_bits(each, other)
    lost: Partials = partials_of(layout, 5, [3, 4])
    assert lost.nodes == held[2].nodes
    survivors = [partials_of(layout, 5, [0, 3]), partials_of(layout, 5, [1, 2, 4])]
    with mesh([[0, 3], [1, 2, 4]], quorum_id=5) as links:
        for means in exchange_all(links, survivors):
            assert_same_bits(means, reference_means(BIG, 5))


def test_a_long_wait_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs for ten looks after that."""
    monkeypatch.setattr(_patience, "SLOW_WAIT_S", 0.05)
    looks = itertools.count()

    class Looking(Abort):
        @property
        def is_set(self) -> bool:
            if caplog.records and next(looks) == 10:
                self.set("enough")
            return super().is_set

    monkeypatch.setattr(_patience, "LOOK_S", 0.02)
    with against(Looking()) as (links, _), caplog.at_level(logging.WARNING, logger="jaxft"):
        with pytest.raises(ExchangeFailed, match="was aborted: enough"):
            run_exchange(links, partials_of(LAYOUT, 2, [0]), step=STEP, progress_timeout_s=patience.FAR_S)
    (record,) = caplog.records
    assert (
        "exchange of step 11 in quorum 4 is still waiting for group 'group-1' (memory:1)"
        in record.getMessage()
    )
    assert record.getMessage().endswith(f"The limit on a time without progress is {patience.FAR_S:g} s.")


def test_a_peer_that_computes_long_is_said_once_and_again_if_it_takes_twice_as_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other begins once this one has looked so often."""
    monkeypatch.setattr(_patience, "SLOW_WAIT_S", 0.05)
    monkeypatch.setattr(_patience, "LOOK_S", 0.01)
    held = [partials_of(LAYOUT, 2, [0]), partials_of(LAYOUT, 2, [1])]
    waits = LongWaits()

    def exchange(step: int, least_s: float) -> float:
        """Return how long the other has computed."""
        begun_s = time.monotonic()
        computed = threading.Event()

        def counts() -> bool:
            if time.monotonic() - begun_s >= least_s:
                computed.set()
            return False

        def computes_first() -> float:
            assert computed.wait(patience.FAR_S)
            computed_s = time.monotonic() - begun_s
            run_exchange(links[1], held[1], step=step)
            return computed_s

        waits.begin(step)
        limit = Patience(0.01, counts=counts, waits=waits)
        task = Task(LAYOUT, step, held[0], result_regions(LAYOUT))
        _, computed_s = together([lambda: exchange_into(links[0], task, 2, limit), computes_first])
        return computed_s

    with mesh([[0], [1]]) as links, caplog.at_level(logging.INFO, logger="jaxft"):
        exchange(1, 1.0)
        waits.begin(1)  # another exchange of that step has no wait
        took_s = exchange(2, 0.1)  # the machine would have to stand still for two seconds
        (record,) = caplog.records
        assert record.levelno == logging.INFO
        assert re.fullmatch(
            r"The exchange of step 1 in quorum 4 is still waiting for group 'group-1' \(memory:1\) after 0 s. Not "
            r"all members are known to have computed; until they have, there is no time limit.",
            record.getMessage(),
        )
        exchange(3, 4 * took_s)
    assert "step 3" in caplog.records[1].getMessage()


def test_a_peer_that_is_silent_is_said_while_another_moves_bytes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_patience, "SLOW_WAIT_S", 1.0)
    while silent_beside_a_trickle(patience_s=2.0) is None:
        caplog.clear()
    (logged,) = [
        record.getMessage() for record in caplog.records if "is still waiting" in record.getMessage()
    ]
    assert "is still waiting for group 'group-2' (memory:2) after" in logged


def test_an_exchange_that_takes_long_while_bytes_move_is_said_and_again_each_time_that_has_doubled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that sends a byte now and then: nothing is silent, and nothing gets on."""
    now_s = 0.0
    for module in (_exchange, _patience):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(_patience, "LOOK_S", 0.01)
    waits = LongWaits()

    def trickle(step: int, until_s: float) -> list[str]:
        """Return the log of an exchange in which a byte comes each second."""
        nonlocal now_s
        now_s, abort = 0.0, Abort()
        caplog.clear()
        waits.begin(step)

        class Ticking(Patience):
            def moved(self) -> None:
                nonlocal now_s
                super().moved()
                now_s += 1.0
                if now_s > until_s:
                    abort.set("enough")
                theirs.sendall(b"\0")

        with against(abort) as (links, theirs):
            theirs.sendall(first_header(step=step) + b"\0")
            task = Task(LAYOUT, step, partials_of(LAYOUT, 2, [0]), result_regions(LAYOUT))
            with pytest.raises(ExchangeFailed, match="was aborted: enough"):
                exchange_into(links, task, 2, Ticking(3.0, waits=waits))
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.INFO, logger="jaxft"):
        logged = trickle(1, 22.0)
        assert [re.findall(r"(\d+) s so far", text) for text in logged] == [["5"], ["10"], ["20"]]
        assert logged[0] == (
            "The exchange of step 1 in quorum 4 takes long: 5 s so far. Its bytes still move, so there is no limit. "
            "It is not finished with group 'group-1' (memory:1)."
        )
        assert trickle(2, 40.0) == []
        assert len(trickle(3, 90.0)) == 1


def test_no_descriptor_is_left_behind() -> None:
    held = [partials_of(LAYOUT, 2, [0]), partials_of(LAYOUT, 2, [1])]

    def once() -> None:
        with mesh([[0], [1]]) as links:
            assert all(isinstance(means, list) for means in exchange_all(links, held))
        with against() as (links, theirs):
            theirs.close()
            with pytest.raises(ExchangeFailed):
                run_exchange(links, held[0], step=STEP)

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        once()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_payloads_and_headers_are_what_the_wire_says() -> None:
    frames: list[bytes] = []
    held = partials_of(LAYOUT, 2, [0])
    with against() as (links, theirs):
        thread = threading.Thread(target=lambda: together([lambda: run_exchange(links, held, step=STEP)]))
        thread.start()
        plan = Plan.of(LAYOUT, [[0], [1]], 2)
        stamp = Stamp(sender=0, job=tag("job"), quorum_id=QUORUM, step=STEP, layout=tag(LAYOUT.digest))
        for frame in partials_to(1, stamp=stamp, plan=plan, layout=LAYOUT):
            header = theirs.recv(64, socket.MSG_WAITALL)
            assert header == frame.header
            assert header[5] == PARTIAL
            frames.append(theirs.recv(frame.length_bytes, socket.MSG_WAITALL))
            assert theirs.recv(8, socket.MSG_WAITALL) == Checksums().tag(header, frames[-1])
        theirs.close()
        thread.join(timeout=patience.FAR_S)
    (whole,) = regions_of(held, held.nodes[0])
    assert np.frombuffer(b"".join(frames), np.float32).tobytes() == whole[whole.size // 2 :].tobytes()
