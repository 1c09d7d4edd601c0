"""How a quorum's members connect."""

import gc
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from jaxft._errors import ExchangeFailed
from jaxft._exchange import Layout, Links, Patience, Peer
from jaxft._transport._listener import Abort, ConnectionRequest, Listener, dial
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
def listeners(count: int) -> Iterator[list[Listener]]:
    made = [
        Listener(host="127.0.0.1", job="job", group=f"group-{i}", incarnation=7 + i, on_heal=None)
        for i in range(count)
    ]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def members_of(made: Sequence[Listener], shards: Sequence[Sequence[int]]) -> list[Peer]:
    return peers_of(shards, [f"127.0.0.1:{one.port}" for one in made])


def open_links(
    listener: Listener,
    members: Sequence[Peer],
    me: int,
    *,
    wait_s: float = 20.0,
    abort: Abort | None = None,
    quorum_id: int = 1,
    patience: Patience | None = None,
) -> Links:
    return Links.open(
        listener,
        job="job",
        quorum_id=quorum_id,
        me=members[me].group,
        members=members,
        abort=abort or Abort(),
        patience=patience or Patience(wait_s),
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
            for one in links:
                one.close()


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
        for address in ("nonsense", "host:", ":77", "host:http", "no.such.host.invalid:80"):
            members = peers_of([[0], [1]], ["127.0.0.1:1", address])
            with pytest.raises(ExchangeFailed, match=r"is not an address|is unknown") as caught:
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
        for one in outcomes:
            assert isinstance(one, Links), one
            one.close()


def test_a_silent_peer_hides_no_other() -> None:
    """Time counts once the two others have each other: a busy machine is not taken for silence."""
    connected = {0: threading.Event(), 2: threading.Event()}

    def time_counts() -> bool:
        return all(one.is_set() for one in connected.values())

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
        for one in links:
            one.close()
            one.close()  # idempotent
        with pytest.raises(ExchangeFailed, match="Quorum 1 is over here"):
            open_links(made[0], members, 0)


def connect_and_fail_to_connect(made: Sequence[Listener]) -> None:
    members = members_of(made, [[0], [1], [2]])
    for one in together([lambda me=me: open_links(made[me], members, me) for me in range(3)]):
        one.close()
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
