"""Large exchanges in several strands: the same bits, one end for all of them, and connections that live on."""

import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._arrays._pieces import Pieces
from jaxft._base import _room
from jaxft._errors import ExchangeFailed
from jaxft._exchange import _grid_links, _patience, _plan, _spans
from jaxft._exchange._links import Links, Peer
from jaxft._exchange._patience import LongWaits, Patience, Wait
from jaxft._exchange._plan import Plan, strands_of
from jaxft._exchange._spans import Contribution, SpanLinks, Way
from jaxft._transport._listener import Listener
from jaxft._transport._sockets import Abort
from tests import patience
from tests.interrupts import interrupt, interrupted

from .members import BIG, MIXED, assert_same_bits, partials_of, reference_means, together

LAYOUT = Layout.of(BIG)
SHARDS = [[0, 1], [2], []]
STRANDS = 3


@pytest.fixture(autouse=True)
def small_strands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "STRAND_BYTES", LAYOUT.size_bytes // STRANDS)


class Member:
    """One member, with a listener on loopback."""

    def __init__(self, number: int) -> None:
        self.name = f"group-{number}"
        self.number = number
        self.listener = Listener(host="127.0.0.1", job="job", group=self.name, incarnation=1, on_heal=None)
        self.links: SpanLinks | None = None
        self.abort = Abort()

    def open(self, quorum_id: int, members: Sequence["Member"], shards: Sequence[Sequence[int]]) -> None:
        peers = [
            Peer(member.name, 1, f"127.0.0.1:{member.listener.port}", tuple(held))
            for member, held in zip(members, shards, strict=True)
        ]
        abort = self.abort = Abort()

        def open_links(_: Any, strand: int, stop: Abort, before: Links | None) -> Links:
            return _grid_links.open_links(
                self.listener,
                job="job",
                quorum_id=quorum_id,
                me=self.name,
                members=peers,
                abort=stop,
                patience=Patience(patience.FAR_S),
                strand=strand,
                before=before,
            )

        self.links = SpanLinks(quorum_id, [None], abort, open_links, self.links, STRANDS)

    def exchange(self, layout: Layout, shards: Sequence[int], total: int) -> list[np.ndarray]:
        assert self.links is not None
        given = Contribution(
            partials_of(layout, total, shards), cast(Pieces, SimpleNamespace()), lambda _: layout
        )
        try:
            return self.links.exchange(
                given, step=11, total_shards=total, patience=lambda _: Patience(patience.FAR_S)
            )
        except BaseException:
            self.links.close()  # as an attempt does
            raise

    def connections(self) -> set[int]:
        """The sockets to all others, by their inode."""
        assert self.links is not None
        return {
            connection.sock.fileno()
            for links in self.links._links.values()
            for connection in links.connections.values()
        }

    def close(self) -> None:
        if self.links is not None:
            self.links.close()
        self.listener.close()


@contextmanager
def quorum(count: int = 3) -> Iterator[list[Member]]:
    with ExitStack() as stack:
        members = [Member(number) for number in range(count)]
        for member in members:
            stack.callback(member.close)
        yield members


def open_all(members: Sequence[Member], quorum_id: int, shards: Sequence[Sequence[int]] = SHARDS) -> None:
    for member in members:
        member.open(quorum_id, members, shards)


def exchange_all(
    members: Sequence[Member], layout: Layout = LAYOUT, shards: Sequence[Sequence[int]] = SHARDS
) -> list[Any]:
    total = sum(map(len, shards))
    return together(
        [
            lambda member=member, mine=mine: member.exchange(layout, mine, total)
            for member, mine in zip(members, shards, strict=True)
        ]
    )


def test_strands_divide_every_slice_and_leave_nothing_out() -> None:
    shards = [[0, 1], [2]]
    plans = [Plan.of(LAYOUT, shards, 3, strand, STRANDS) for strand in range(STRANDS)]
    for number, region in enumerate(LAYOUT.regions):
        for member in range(len(shards)):
            whole = _covered(number, Plan.of(LAYOUT, shards, 3).chunks[member])
            assert _covered(number, [chunk for plan in plans for chunk in plan.chunks[member]]) == whole
        every = [chunk for plan in plans for mine in plan.chunks for chunk in mine]
        assert _covered(number, every) == [(0, region.size)]
    assert not any(plan.one_trip for plan in plans), "one trip has no slices to divide"


@pytest.mark.parametrize("strands", [1, 4])
@pytest.mark.parametrize("members", [2, 16, 200, 1000])
def test_scratch_memory_has_a_bound(members: int, strands: int) -> None:
    """8 billion gradients, a shard for each member: with chunks of 1 MiB, 1,000 members would need 4 GB."""
    layout = Layout.of([LeafSpec("x", (8_000_000_000,), "bfloat16")])
    plan = Plan.of(layout, [[member] for member in range(members)], members, 0, strands)
    longest = max(chunk.size * 4 for chunk in plan.chunks[0])
    assert 4 * longest * members * strands <= 257 << 20
    assert longest >= (16 << 10)
    assert sum(chunk.size for mine in plan.chunks for chunk in mine) >= 8_000_000_000 // strands


def _covered(region: int, chunks: Sequence[_plan.Chunk]) -> list[tuple[int, int]]:
    """What chunks cover of a region; they do not overlap."""
    found: list[tuple[int, int]] = []
    for chunk in sorted((each for each in chunks if each.region == region), key=lambda each: each.offset):
        if found and found[-1][1] == chunk.offset:
            found[-1] = (found[-1][0], chunk.stop)
        else:
            found.append((chunk.offset, chunk.stop))
    return found


@pytest.mark.parametrize(
    ("most", "layout", "strands"), [(8, BIG, 3), (2, BIG, 2), (8, MIXED, 1), (1, BIG, 1)]
)
def test_a_strand_has_enough_to_carry(most: int, layout: Any, strands: int) -> None:
    assert strands_of(Layout.of(layout), most) == strands


def test_all_strands_give_the_bits_of_one_and_live_on_in_the_next_quorum() -> None:
    with quorum() as members:
        open_all(members, 1)
        for _ in range(2):
            for means in exchange_all(members):
                assert_same_bits(means, reference_means(BIG, 3))
        before = [member.connections() for member in members]
        assert [len(each) for each in before] == [2 * STRANDS] * 3
        open_all(members, 2, [[2], [1], [0]])
        for means in exchange_all(members, shards=[[2], [1], [0]]):
            assert_same_bits(means, reference_means(BIG, 3))
        assert [member.connections() for member in members] == before


def test_small_exchanges_between_large_ones_need_one_strand() -> None:
    with quorum() as members:
        open_all(members, 1)
        for specs, used in ((MIXED, 1), (BIG, STRANDS), (MIXED, STRANDS)):
            for means in exchange_all(members, Layout.of(specs)):
                assert_same_bits(means, reference_means(specs, 3))
            for member in members:
                assert member.links is not None
                assert len(member.links._links) == used


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a choice needs two cores")
def _held_up(monkeypatch: pytest.MonkeyPatch, then: Callable[[Links], None], strand: int) -> None:
    """Do something to one strand's links of group-0 once they are made, before its exchange."""
    carry_out = _spans.exchange_over

    def held(links: Links, *rest: Any) -> None:
        if links.members[links.me].group == "group-0" and links.strand == strand:
            then(links)
        carry_out(links, *rest)

    monkeypatch.setattr(_spans, "exchange_over", held)


@pytest.mark.parametrize("strand", range(STRANDS))
def test_a_link_that_breaks_in_one_strand_ends_all_and_is_blamed(
    strand: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quorum() as members:
        open_all(members, 1)
        _held_up(monkeypatch, lambda links: links.connections[2].sock.shutdown(socket.SHUT_RDWR), strand)
        errors = exchange_all(members)
        assert all(isinstance(error, ExchangeFailed) for error in errors), errors
        # Who sees a connection close does not know who was first: the third group's close in a cascade.
        assert "group-2" in errors[0].peers or "group-0" in errors[2].peers
        monkeypatch.undo()
        monkeypatch.setattr(_plan, "STRAND_BYTES", LAYOUT.size_bytes // STRANDS)
        open_all(members, 2)
        for means in exchange_all(members):
            assert_same_bits(means, reference_means(BIG, 3))


def test_all_strands_say_once_that_a_peer_is_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No strand of group-1 begins before each strand of group-0 has looked ten times after the message."""
    monkeypatch.setattr(_patience, "SLOW_WAIT_S", 0.05)
    monkeypatch.setattr(_patience, "LOOK_S", 0.01)
    said_by, looks, looked = LongWaits(), Counter[str](), threading.Event()

    class Looking(Patience):
        def mention(self, waits: Sequence[Wait], text: str, *where: object) -> None:
            super().mention(waits, text, *where)
            looks[threading.current_thread().name] += 1
            if len(looks) == STRANDS and min(looks.values()) >= 10:
                looked.set()

    carry_out = _spans.exchange_over

    def waiting(links: Links, task: Any, total: int, made: Any) -> None:
        group = links.members[links.me].group
        if group == "group-1":
            assert looked.wait(patience.FAR_S)
        shared = group == "group-0"
        carry_out(links, task, total, (lambda _: Looking(patience.FAR_S, waits=said_by)) if shared else made)

    monkeypatch.setattr(_spans, "exchange_over", waiting)
    with quorum() as members, caplog.at_level(logging.WARNING, logger="jaxft"):
        open_all(members, 1)
        monkeypatch.setattr(LongWaits, "to_say", _of(said_by))
        for means in exchange_all(members):
            assert_same_bits(means, reference_means(BIG, 3))
    (logged,) = [record.getMessage() for record in caplog.records]
    assert "is still waiting for group 'group-1' (" in logged


def _of(waits: LongWaits) -> Any:
    """No line about all others."""
    to_say = LongWaits.to_say
    return lambda self, waits_s, *, compute: to_say(self, waits_s, compute=compute) if self is waits else []


def test_the_flag_of_the_attempt_ends_all_strands(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    with quorum(2) as members:
        shards = [[0], [1]]
        open_all(members, 1, shards)
        # One strand of group-0 never begins, so that all of its others end and group-1's wait.
        _held_up(monkeypatch, lambda _: patience.until(gate.is_set, "the gate"), 1)
        ended: list[Any] = []
        runs = threading.Thread(target=lambda: ended.extend(exchange_all(members, shards=shards)))
        runs.start()
        patience.until(
            lambda: members[1].links is not None and len(members[1].links._links) == STRANDS, "all to begin"
        )
        links = members[0].links
        assert links is not None
        members[0].abort.set("the quorum has changed")
        patience.until(lambda: links._stop.is_set, "all of its strands to know")
        gate.set()
        patience.join(runs)
        first, second = ended
        assert isinstance(first, ExchangeFailed)
        assert first.peers == (), "no group is to blame"
        assert "the quorum has changed" in str(first)
        assert isinstance(second, ExchangeFailed)
        assert second.peers == ("group-0",), "it sees the other's connections close"


def test_an_error_of_our_own_ends_all_strands_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Links) -> None:
        raise MemoryError("no room for a strand")

    with quorum(2) as members:
        open_all(members, 1, [[0], [1]])
        _held_up(monkeypatch, fails, 2)
        mine, other = exchange_all(members, shards=[[0], [1]])
        assert isinstance(mine, MemoryError)
        assert isinstance(other, ExchangeFailed)
        assert other.peers == ("group-0",)


class _CannotStart(threading.Thread):
    def start(self) -> None:
        if self.name == f"jaxft-exchange-{STRANDS - 1}":
            raise RuntimeError("can't start new thread")
        super().start()


def _working(monkeypatch: pytest.MonkeyPatch) -> list[Way]:
    """The strands that are at work."""
    run, found = _spans._Running.run, list[Way]()

    def noted(self: Any, carry_out: Any, way: Way, task: Any) -> None:
        found.append(way)
        run(self, carry_out, way, task)
        found.remove(way)

    monkeypatch.setattr(_spans._Running, "run", noted)
    return found


def test_no_strand_runs_on_if_there_is_no_room_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_room, "TIMEOUT_S", 0.0)
    monkeypatch.setattr(threading, "Thread", _CannotStart)
    working = _working(monkeypatch)
    with quorum(2) as members:
        open_all(members, 1, [[0], [1]])
        with pytest.raises(RuntimeError, match="can't start new thread"):
            members[0].exchange(LAYOUT, [0], 2)
        assert working == []


def test_no_strand_runs_on_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller closes its connections, and the next sockets of the process would get their descriptors."""
    carry_out, begun = _spans.exchange_over, threading.Barrier(STRANDS)

    def interrupting(*rest: Any) -> None:
        if begun.wait() == 0:
            interrupt()
        carry_out(*rest)

    monkeypatch.setattr(_spans, "exchange_over", interrupting)
    working = _working(monkeypatch)
    with quorum(2) as members:
        member, peer = members
        open_all(members, 1, [[0], [1]])
        # The peer is connected, and does not exchange.
        threads = [threading.Thread(target=_connect, args=(peer, strand)) for strand in range(STRANDS)]
        for thread in threads:
            thread.start()
        with interrupted():
            member.exchange(LAYOUT, [0], 2)
        assert working == []
        for thread in threads:
            patience.join(thread)


def _connect(member: Member, strand: int) -> None:
    assert member.links is not None
    member.links._links[Way(None, strand)] = member.links._open(None, strand, Abort(), None)


def test_what_a_new_quorum_does_not_need_is_closed() -> None:
    with quorum(2) as members:
        shards = [[0], [1]]
        open_all(members, 1, shards)
        exchange_all(members, shards=shards)
        member = members[0]
        assert member.links is not None
        left = SpanLinks(2, [None], Abort(), lambda *_: None, member.links, 1)  # type: ignore[arg-type]
        closed = [
            links.closed for way, links in sorted(member.links._links.items(), key=lambda pair: pair[0][1])
        ]
        assert closed == [False, *[True] * (STRANDS - 1)]
        assert list(left._before) == [Way(None, 0)]
