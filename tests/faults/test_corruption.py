"""A bit flips on the wire, where TCP's checksum has missed it."""

import contextlib
import socket
from pathlib import Path

import numpy as np
import pytest

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._errors import ExchangeFailed
from jaxft._exchange._frames import HEADER_BYTES
from jaxft._exchange._links import Links
from jaxft._exchange._partials import Partials
from jaxft._transport._seals import Connection
from jaxft._transport._sockets import Abort
from tests.clusters import digest_alone
from tests.exchange.members import (
    assert_same_bits,
    partials_of,
    peers_of,
    reference_means,
    run_exchange,
    together,
)
from tests.faults.trial import STEPS, figures, trial

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

DAMAGED = "was damaged or changed on the way: its tag does not match"


@pytest.mark.storm
def test_what_arrives_damaged_in_a_heal_is_fetched_again(tmp_path: Path, undisturbed: str) -> None:
    with trial(tmp_path) as job:
        # From one donor: the other makes up for it.
        job.network.damage(job.network.around("group-1", out=False), times=1)
        job.kill("group-1")
        job.start("group-1")
        job.until_back("group-1")
        assert job.network.damaged == 1
        assert job.workers["group-1"].log().count(DAMAGED) == 1
        assert not job.workers["group-1"].logged("no donor is left")
        # From both: the heal fails, by name, and another one begins.
        job.network.damage(job.network.around("group-1", out=False), times=2)
        job.kill("group-1")
        job.start("group-1")
        job.until_back("group-1")
        figures.info("damaged %d pieces of heals", job.network.damaged)
        assert job.workers["group-1"].logged(DAMAGED)
        job.finish(undisturbed)


def test_a_damaged_payload_of_an_exchange_is_noticed() -> None:
    """Two members in memory, and between them a link that flips bits behind the first header."""
    layout = Layout.of((LeafSpec("x", (100_000,), "float32"),))
    ours, near = socket.socketpair()
    far, theirs = socket.socketpair()
    peers = peers_of([[0], [1]])
    members = [
        Links(
            job="job",
            quorum_id=4,
            me=me,
            members=peers,
            connections={1 - me: Connection.plain(sock)},
            abort=Abort(),
        )
        for me, sock in ((0, ours), (1, theirs))
    ]
    with near, far:
        outcomes = together(
            [
                lambda: exchange_and_close(members[0], partials_of(layout, 2, [0])),
                lambda: exchange_and_close(members[1], partials_of(layout, 2, [1])),
                lambda: relay(near, far, flip_at=HEADER_BYTES + 1000),
                lambda: relay(far, near, flip_at=None),
            ]
        )
    for outcome in outcomes[:2]:
        if not isinstance(outcome, ExchangeFailed):
            assert_same_bits(outcome, reference_means(layout.specs, 2))
    assert "damaged or changed on the way" in str(outcomes[1])


def exchange_and_close(links: Links, partials: Partials) -> list[np.ndarray]:
    try:
        return run_exchange(links, partials)
    finally:
        links.close()


def relay(source: socket.socket, target: socket.socket, *, flip_at: int | None) -> None:
    """Carry bytes until the source ends, with four bits flipped at an offset."""
    offset = 0
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            changed = bytearray(piece)
            if flip_at is not None and offset <= flip_at < offset + len(piece) - 4:
                for number in range(flip_at - offset, flip_at - offset + 4):
                    changed[number] ^= 0x10
            offset += len(piece)
            target.sendall(changed)
    target.shutdown(socket.SHUT_WR)


@pytest.mark.storm
def test_what_arrives_damaged_in_an_exchange_changes_nothing(
    tmp_path: Path,
) -> None:
    width = ("--width", "2000")
    with trial(tmp_path, *width) as job:
        pairs = [(a, b) for a in job.workers for b in job.workers if a != b]
        job.network.damage(pairs, times=1, kind="exchange")
        job.here.until(lambda: job.network.damaged == 1, "a piece of an exchange to be damaged")
        job.finish(digest_alone(STEPS, *width))
