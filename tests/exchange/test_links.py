"""How a quorum's members connect."""

import contextlib
import gc
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from jaxft_protocol.credentials import DataKey

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._errors import ExchangeFailed, JaxftError
from jaxft._exchange import _grid_links, _patience
from jaxft._exchange._continuing import Continuing, NotContinued
from jaxft._exchange._links import Links, Peer
from jaxft._exchange._patience import Patience
from jaxft._transport._listener import Abort, ConnectionRequest, Listener, dial
from jaxft._transport._seals import Connection, Macs
from tests import patience

from .members import (
    MIXED,
    assert_same_bits,
    exchange_all,
    partials_of,
    peers_of,
    reference_means,
    together,
)


@contextmanager
def listeners(count: int, key: DataKey | None = None) -> Iterator[list[Listener]]:
    made = [
        Listener(host="127.0.0.1", job="job", group=f"group-{i}", incarnation=7 + i, on_heal=None, key=key)
        for i in range(count)
    ]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def members_of(made: Sequence[Listener], shards: Sequence[Sequence[int]]) -> list[Peer]:
    return peers_of(shards, [f"127.0.0.1:{each.port}" for each in made])


def open_links(  # noqa: PLR0913 (by name: those of `open_links`, with defaults)
    listener: Listener,
    members: Sequence[Peer],
    me: int,
    *,
    wait_s: float = 20.0,
    abort: Abort | None = None,
    quorum_id: int = 1,
    patience: Patience | None = None,
    before: Links | None = None,
) -> Links:
    return _grid_links.open_links(
        listener,
        job="job",
        quorum_id=quorum_id,
        me=members[me].group,
        members=members,
        abort=abort or Abort(),
        patience=patience or Patience(wait_s),
        before=before,
    )


# No process listens there, nor will another test while this one dials.
UNUSED_ADDRESS = "127.0.0.1:1"


def descriptors() -> int:
    gc.collect()  # exceptions that were raised in threads keep their frames in circles
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def silent_address() -> Iterator[str]:
    """An address whose kernel accepts connections for a process that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield f"127.0.0.1:{sock.getsockname()[1]}"


def test_members_connect_and_exchange_quorum_after_quorum() -> None:
    shards = [[0], [1], [3, 2], []]
    layout = Layout.of(MIXED)
    with listeners(4) as made:
        members = members_of(made, shards)
        for quorum_id in (1, 2, 5):
            links = together(
                [lambda me=me, q=quorum_id: open_links(made[me], members, me, quorum_id=q) for me in range(4)]
            )
            for means in exchange_all(links, [partials_of(layout, 4, held) for held in shards]):
                assert_same_bits(means, reference_means(MIXED, 4))
            for each in links:
                each.close()


def test_a_lone_member_opens_nothing() -> None:
    with listeners(1) as made:
        links = open_links(made[0], members_of(made, [[0]]), 0)
        assert links.connections == {}
        links.close()


def test_nobody_listens_there() -> None:
    with listeners(1) as made:
        members = peers_of([[0], [1]], [f"127.0.0.1:{made[0].port}", UNUSED_ADDRESS])
        match = r"'group-0' could not connect .* quorum 1\. Cannot connect to 127.*: Connection refused"
        with pytest.raises(ExchangeFailed, match=match) as caught:
            open_links(made[0], members, 0)
        assert caught.value.peers == ("group-1",)


def test_an_address_that_is_none() -> None:
    with listeners(1) as made:
        for address in ("nonsense", "host:", ":77", "host:http", "no.such.host:80"):
            members = peers_of([[0], [1]], ["127.0.0.1:1", address])
            with pytest.raises(ExchangeFailed, match=r"is not an address|names a host, but") as caught:
                open_links(made[0], members, 0)
            assert caught.value.peers == ("group-1",)


def test_a_peer_that_never_dials() -> None:
    with listeners(2) as made:
        members = members_of(made, [[0], [1]])
        with pytest.raises(
            ExchangeFailed, match=r"group 'group-0' at 127.* did not connect to this group in time"
        ) as caught:
            open_links(made[1], members, 1, wait_s=0.1)
        assert caught.value.peers == ("group-0",)


def test_a_peer_that_takes_long_to_dial_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_patience, "SLOW_WAIT_S", 0.05)
    monkeypatch.setattr(_patience, "LOOK_S", 0.01)
    with listeners(2) as made, caplog.at_level(logging.INFO, logger="jaxft"):
        first, second = members_of(made, [[0], [1]])
        members = [replace(first, ranks=2), second]
        with pytest.raises(ExchangeFailed, match=r"rank 0 of group 'group-0' at .* did not connect"):
            open_links(made[1], members, 1, wait_s=1.0)
    (logged,) = [record.getMessage() for record in caplog.records if "still waiting" in record.getMessage()]
    assert logged == (
        f"The exchange of group 'group-1' in quorum 1 is still waiting to connect to rank 0 of group 'group-0' "
        f"({first.address}) after 0 s. The limit on a time without progress is 1 s."
    )


def test_who_still_computes_is_waited_for() -> None:
    looked = threading.Semaphore(0)

    def counts() -> bool:
        looked.release()
        return False

    with listeners(2) as made:
        members = members_of(made, [[0], [1]])

        def computes_first() -> Links:
            for _ in range(4):  # many times the other's patience
                assert looked.acquire(timeout=patience.FAR_S)
            return open_links(made[0], members, 0)

        outcomes = together(
            [
                computes_first,
                lambda: open_links(made[1], members, 1, patience=Patience(0.01, counts=counts)),
            ]
        )
        for each in outcomes:
            assert isinstance(each, Links), each
            each.close()


def test_a_silent_peer_hides_no_other() -> None:
    """Time counts once the two others have each other: a busy machine is not taken for silence."""
    connected = {0: threading.Event(), 2: threading.Event()}

    def time_counts() -> bool:
        return all(each.is_set() for each in connected.values())

    with listeners(3) as made, silent_address() as silent:
        addresses = [f"127.0.0.1:{made[0].port}", silent, f"127.0.0.1:{made[2].port}"]
        members = peers_of([[0], [1], [2]], addresses)
        outcomes = together(
            [
                lambda me=me: open_links(
                    made[me],
                    members,
                    me,
                    patience=Patience(0.5, counts=time_counts, moved=connected[me].set),
                )
                for me in connected
            ]
        )
    assert [outcome.peers for outcome in outcomes] == [("group-1",), ("group-1",)]


def test_another_incarnation_is_not_taken_for_the_member() -> None:
    with listeners(2) as made:
        members = members_of(made, [[0], [1]])
        mine, theirs = members[0].incarnation + 1, members[1].incarnation
        request = ConnectionRequest("exchange", "job", "group-0", mine, "group-1", theirs, 1)
        with dial(members[1].address, request, deadline_s=patience.far()):
            with pytest.raises(ExchangeFailed) as caught:
                open_links(made[1], members, 1, wait_s=0.1)
        assert caught.value.peers == ("group-0",)


def test_abort_ends_the_wait_and_blames_nobody() -> None:
    with listeners(2) as made, silent_address() as silent:
        waits_to_dial = peers_of([[0], [1]], ["127.0.0.1:1", silent])
        waits_to_be_dialled = members_of(made, [[0], [1]])
        for me, members in ((0, waits_to_dial), (1, waits_to_be_dialled)):
            abort = Abort()
            timer = threading.Timer(0.05, abort.set, ["another quorum"])
            timer.start()
            with pytest.raises(ExchangeFailed, match="another quorum") as caught:
                open_links(made[me], members, me, abort=abort, wait_s=10)
            assert caught.value.peers == ()
            timer.join()


def test_a_quorum_that_failed_here_is_refused_to_those_who_still_dial() -> None:
    with listeners(2) as made:
        members = members_of(made, [[0], [1]])
        with pytest.raises(ExchangeFailed):
            open_links(made[1], members, 1, wait_s=0.0)
        with pytest.raises(ExchangeFailed, match=r"refused .* Quorum 1 is over here") as caught:
            open_links(made[0], members, 0)
        assert caught.value.peers == ("group-1",)


def test_closing_links_tells_peers_that_dial_late() -> None:
    with listeners(2) as made:
        members = members_of(made, [[0], [1]])
        links = together([lambda me=me: open_links(made[me], members, me) for me in range(2)])
        for each in links:
            each.close()
            each.close()  # idempotent
        with pytest.raises(ExchangeFailed, match="Quorum 1 is over here"):
            open_links(made[0], members, 0)


def connect_and_fail_to_connect(made: Sequence[Listener]) -> None:
    members = members_of(made, [[0], [1], [2]])
    for each in together([lambda me=me: open_links(made[me], members, me) for me in range(3)]):
        each.close()
    gone = [*members[:2], Peer("group-2", 1, UNUSED_ADDRESS, (2,))]
    outcomes = together([lambda me=me: open_links(made[me], gone, me, quorum_id=2) for me in range(2)])
    assert all(isinstance(outcome, ExchangeFailed) for outcome in outcomes)


def test_no_descriptor_is_left_behind() -> None:
    before = descriptors()
    for _ in range(3):
        with listeners(3) as made:
            connect_and_fail_to_connect(made)
        del made
    assert descriptors() <= before


# ---- when the quorum changes ----

SHARDS = [[0], [1], [2]]
ALL = (0, 1, 2)


class Members:
    """Three processes, and the links that each of them has."""

    def __init__(self, made: Sequence[Listener]) -> None:
        self.made = made
        self.links: dict[int, Links] = {}

    def quorum(self, quorum_id: int, numbers: Sequence[int] = ALL, *, wait_s: float = 20.0) -> list[Any]:
        """Let some of them open a quorum, in this order, and return what came of it."""
        everyone = members_of(self.made, SHARDS)
        members = [everyone[number] for number in numbers]

        def open_one(me: int, number: int) -> Links:
            before = self.links.pop(number, None)
            given = {"quorum_id": quorum_id, "before": before, "wait_s": wait_s}
            self.links[number] = open_links(self.made[number], members, me, **given)
            return self.links[number]

        return together(
            [lambda me=me, number=number: open_one(me, number) for me, number in enumerate(numbers)]
        )

    def ports(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Both ports of each connection, by the numbers of its ends: other ones if it is another connection."""
        names = [each.group for each in members_of(self.made, SHARDS)]
        return {
            (number, names.index(links.members[peer].group)): (
                each.sock.getsockname()[1],
                each.sock.getpeername()[1],
            )
            for number, links in self.links.items()
            for peer, each in links.connections.items()
        }

    def exchange(self) -> None:
        """Check that what travels over the links comes to the right bits."""
        layout, links = Layout.of(MIXED), list(self.links.values())
        shards = {each.group: each.shards for each in members_of(self.made, SHARDS)}
        mine = [shards[each.members[each.me].group] for each in links]
        assert sorted(shard for held in mine for shard in held) == list(range(len(links)))
        for means in exchange_all(links, [partials_of(layout, len(links), held) for held in mine]):
            assert_same_bits(means, reference_means(MIXED, len(links)))


@pytest.fixture(params=[None, DataKey(bytes(range(32)))], ids=["checksums", "macs"])
def three(request: pytest.FixtureRequest) -> Iterator[Members]:
    with listeners(3, request.param) as made:
        members = Members(made)
        yield members
        for each in members.links.values():
            each.close()


def test_connections_stay_when_the_quorum_changes(three: Members) -> None:
    three.quorum(1)
    first = three.ports()
    assert len(first) == 6
    for quorum_id in (2, 3, 7):
        three.exchange()
        three.quorum(quorum_id)
        assert three.ports() == first
    three.exchange()


def test_only_what_is_new_is_dialled(three: Members) -> None:
    three.quorum(1, (0, 1))
    three.exchange()
    both = three.ports()
    three.quorum(2)
    joined = three.ports()
    assert {pair: joined[pair] for pair in both} == both
    three.exchange()
    three.quorum(3, (1, 0))  # other numbers, too; the third has left
    assert three.ports().items() >= both.items()
    three.links.pop(2).close()
    three.exchange()
    three.quorum(4, (2, 1, 0))
    assert three.ports().items() >= both.items()
    assert three.ports()[0, 2] != joined[0, 2]


@pytest.mark.parametrize("failed", ALL)
def test_who_has_failed_in_an_exchange_is_dialled_again(three: Members, failed: int) -> None:
    three.quorum(1)
    before = three.ports()
    three.links[failed].close()
    three.quorum(2)
    for pair, ports in three.ports().items():
        assert (ports == before[pair]) == (failed not in pair)
    three.exchange()


def test_who_has_not_read_what_an_exchange_has_sent_is_dialled_again(three: Members) -> None:
    """An exchange may end without a member that has nothing to add: for it, it has not even begun."""
    one_number = Layout.of((LeafSpec("loss", (), "float32"),))
    three.quorum(1)
    three.exchange()
    before = three.ports()
    for links in three.links.values():
        links.members = tuple(
            replace(peer, shards=held) for peer, held in zip(links.members, [(0,), (1,), ()], strict=True)
        )
    ended = exchange_all(
        [three.links[0], three.links[1]], [partials_of(one_number, 2, [shard]) for shard in (0, 1)]
    )
    assert [means[0].shape for means in ended] == [(), ()]
    three.quorum(2)
    for pair, ports in three.ports().items():
        assert (ports == before[pair]) == (2 not in pair)
    three.exchange()


@pytest.mark.parametrize("ahead", ALL)
def test_a_quorum_that_only_one_has_opened_makes_no_difference(three: Members, ahead: int) -> None:
    three.quorum(1)
    before = three.ports()
    everyone = members_of(three.made, SHARDS)
    with pytest.raises(ExchangeFailed):
        open_links(three.made[ahead], everyone, ahead, quorum_id=2, before=three.links.pop(ahead), wait_s=0.0)
    three.quorum(3)
    for pair, ports in three.ports().items():
        assert (ports == before[pair]) == (ahead not in pair)
    three.exchange()


def test_another_life_of_a_process_is_dialled_again(three: Members) -> None:
    three.quorum(1)
    before = three.ports()
    old = three.made[1]
    three.links.pop(1).close()
    again = Listener(host="127.0.0.1", job="job", group="group-1", incarnation=80, on_heal=None, key=old.key)
    try:
        everyone = members_of(three.made, SHARDS)
        everyone[1] = replace(everyone[1], incarnation=80, address=f"127.0.0.1:{again.port}")
        listening = [three.made[0], again, three.made[2]]
        three.links = dict(
            enumerate(
                together(
                    [
                        lambda me=me: open_links(
                            listening[me], everyone, me, quorum_id=2, before=three.links.get(me)
                        )
                        for me in ALL
                    ]
                )
            )
        )
        for pair, ports in three.ports().items():
            assert (ports == before[pair]) == (1 not in pair)
        three.exchange()
    finally:
        again.close()


@pytest.mark.parametrize("silent", ALL)
def test_who_does_not_go_on_is_blamed_alone(three: Members, silent: int) -> None:
    three.quorum(1)
    everyone = members_of(three.made, SHARDS)
    others = [number for number in ALL if number != silent]
    connected = {number: threading.Event() for number in others}

    def time_counts() -> bool:
        return all(each.is_set() for each in connected.values())

    outcomes = together(
        [
            lambda me=me: open_links(
                three.made[me],
                everyone,
                me,
                quorum_id=2,
                before=three.links.pop(me),
                patience=Patience(0.5, counts=time_counts, moved=connected[me].set),
            )
            for me in others
        ]
    )
    assert [outcome.peers for outcome in outcomes] == [(f"group-{silent}",)] * 2


def test_what_an_aborted_wait_would_have_taken_is_closed() -> None:
    """The other end must not go on, in the next quorum, with a connection that this end never took."""
    with listeners(2) as made:
        members = members_of(made, [[0], [1]])
        first = open_links(made[0], members, 0)  # this end's listener has accepted
        gone = Abort()
        gone.set("a newer quorum")
        with pytest.raises(ExchangeFailed) as caught:  # as a notebook does, keep the frames
            open_links(made[1], members, 1, abort=gone)
        both = together(
            [
                lambda: open_links(made[0], members, 0, quorum_id=2, before=first, wait_s=5.0),
                lambda: open_links(made[1], members, 1, quorum_id=2, wait_s=5.0),
            ]
        )
        assert all(isinstance(each, Links) for each in both), both
        for each in both:
            each.close()
        del caught


def test_links_that_cannot_open_leave_their_connections_to_the_owner(
    three: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    three.quorum(1)
    before = three.links.pop(0)

    def ended(_: int) -> None:
        raise JaxftError("its thread has ended")

    monkeypatch.setattr(three.made[0], "check", ended)
    with pytest.raises(JaxftError, match="has ended"):
        open_links(three.made[0], members_of(three.made, SHARDS), 0, quorum_id=2, before=before)
    assert len(before.connections) == 2
    before.close()
    assert {each.sock.fileno() for each in before.connections.values()} == {-1}


def test_a_connection_that_is_refused_restarts_the_clock(three: Members) -> None:
    """Else the next dialler would have only the rest of the time in which the other computed."""
    three.quorum(1)
    three.links.pop(1).close()
    moves = {me: 0 for me in ALL}

    def moved(me: int) -> None:
        moves[me] += 1

    opened = together(
        [
            lambda me=me: open_links(
                three.made[me],
                members_of(three.made, SHARDS),
                me,
                quorum_id=2,
                before=three.links.pop(me, None),
                patience=Patience(20.0, moved=lambda: moved(me)),
            )
            for me in ALL
        ]
    )
    assert moves == {0: 3, 1: 2, 2: 3}  # each connection, and that 1 had closed two of the old ones
    three.links = dict(enumerate(opened))


def continuing(mine: bytes = b"m" * 64, theirs: bytes = b"t" * 64) -> tuple[Continuing, socket.socket]:
    end, other = socket.socketpair()
    connection = Connection.sealed(end, outgoing=bytes(32), incoming=bytes(range(32)))
    return Continuing(connection, mine, theirs, b"s" * 64), other


def test_the_frame_may_come_in_pieces() -> None:
    """And frames that no one has read before it."""
    one, other = continuing()
    tags = Macs(bytes(range(32)))
    frame = b"".join(header + tags.tag(header, b"") for header in (b"s" * 64, b"s" * 64, b"t" * 64))
    assert other.recv(200) == b"m" * 64 + Macs(bytes(32)).tag(b"m" * 64, b"")
    with one.sock, other:
        for at in range(len(frame) - 1):
            other.send(frame[at : at + 1])
            assert one.advance() is None
            assert one.advance() is None
        other.send(frame[-1:] + b"what an exchange sends")
        assert one.advance() is not None
        assert one.sock.recv(100) == b"what an exchange sends"


def second_frame() -> bytes:
    macs = Macs(bytes(range(32)))
    return [b"t" * 64 + macs.tag(b"t" * 64, b"") for _ in range(2)][1]


@pytest.mark.parametrize(
    "frame",
    [
        b"u" * 64 + Macs(bytes(range(32))).tag(b"u" * 64, b""),
        b"t" * 64 + Macs(bytes(32)).tag(b"t" * 64, b""),
        b"t" * 64 + bytes(16),
        second_frame(),
    ],
    ids=["another quorum", "another key", "forged", "out of its turn"],
)
def test_another_frame_is_refused(frame: bytes) -> None:
    one, other = continuing()
    with other:
        other.send(frame)
        with pytest.raises(NotContinued, match="sent something else"):
            one.advance()
        assert one.sock.fileno() == -1


def test_a_connection_that_is_lost_or_full_is_not_gone_on_with() -> None:
    one, other = continuing()
    other.close()
    with pytest.raises(NotContinued, match=r"closed the connection|reset"):
        one.advance()
    end, other = socket.socketpair()
    end.settimeout(0.0)
    with other:
        with contextlib.suppress(BlockingIOError):
            while True:
                end.send(bytes(65536))
        with pytest.raises(NotContinued):
            Continuing(Connection.plain(end), b"m" * 64, b"t" * 64, b"s" * 64)
    assert end.fileno() == -1


def test_nothing_is_left_open_when_quorums_change() -> None:
    before = descriptors()
    with listeners(3) as made:
        three = Members(made)
        for quorum_id, numbers in enumerate([(0, 1), ALL, (2, 0), ALL, (1, 2, 0)]):
            three.quorum(quorum_id + 1, numbers)
            for gone in set(three.links) - set(numbers):
                three.links.pop(gone).close()
        outcomes = three.quorum(9, (0, 1), wait_s=0.0) + three.quorum(10, (2, 1), wait_s=0.0)
        for each in [*three.links.values(), *outcomes]:
            if isinstance(each, Links):
                each.close()
        del three, outcomes, each, made
    assert descriptors() <= before
