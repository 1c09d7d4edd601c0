"""Two ranks: in `python -m tests.ranks.talking`, rank 0 decides, and its child follows."""

import itertools
import logging
import os
import socket
import sys
import threading

from jaxft_protocol.messages import Stripe

from jaxft._ranks import _link
from jaxft._ranks._follower import Follower
from jaxft._ranks._leader import Leader
from jaxft._transport import _sockets
from jaxft._transport._seals import Connection
from tests import patience

_DECISIONS = 20
_BEATS = 5


class NoPins:
    def pin(self, heal_id: int, step: int, *, log_only: bool, stripe: Stripe) -> None: ...
    def release(self, heal_id: int) -> None: ...


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    _link.BEAT_S = 0.1
    _sockets.TIMEOUT_S = 1.0
    one, two = socket.socketpair()
    if child := os.fork():
        two.close()
        lead(one)
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
    else:
        one.close()
        follow(two)


def lead(sock: socket.socket) -> None:
    leader = Leader([Connection.plain(sock)], silence_s=patience.FAR_S, stuck_s=patience.FAR_S, name="a")
    leader.start()
    for number in range(_DECISIONS):
        leader.choose("a number", number)
    leader.save_ends(1, "")  # waits for the other rank
    leader.close()


def follow(sock: socket.socket) -> None:
    beats, enough = itertools.count(1), threading.Event()

    def address() -> str:
        """Read at each beat."""
        if next(beats) == _BEATS:
            enough.set()
        return "h:2"

    patient = {"silence_s": patience.FAR_S, "first_s": patience.FAR_S}
    connection = Connection.plain(sock)
    follower = Follower(connection, rank=1, size=2, address=address, pins=NoPins(), name="a", **patient)
    for _ in range(_DECISIONS):
        sys.stdout.write(f"{follower.choose('a number', 0)}\n")
    assert enough.wait(patience.FAR_S)
    follower.save_ends(1, "")
    follower.close()
    sys.stdout.write("the other rank has ended\n")


if __name__ == "__main__":
    main()
