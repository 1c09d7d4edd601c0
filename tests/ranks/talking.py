"""Two ranks: in `python -m tests.ranks.talking [SILENCE_S]`, rank 0 decides, and its child follows.

They end after the end of their standard input.
"""

import itertools
import logging
import os
import socket
import sys
import threading

from jaxft_protocol.messages import Stripe

from jaxft._ranks import _link
from jaxft._ranks._follower import Follower, Place
from jaxft._ranks._leader import Leader
from jaxft._ranks._link import Silence
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
    silence_s = float(sys.argv[1]) if len(sys.argv) > 1 else patience.FAR_S
    one, two = socket.socketpair()
    if child := os.fork():
        two.close()
        lead(one, silence_s)
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
    else:
        one.close()
        follow(two, silence_s)


def lead(sock: socket.socket, silence_s: float) -> None:
    leader = Leader([Connection.plain(sock)], silence_s=silence_s, stuck_s=patience.FAR_S, name="a")
    leader.start()
    for number in range(_DECISIONS):
        leader.choose("a number", number)
    sys.stdin.read()
    leader.save_ends(1, "")  # waits for the other rank
    leader.close()


def follow(sock: socket.socket, silence_s: float) -> None:
    beats, enough = itertools.count(1), threading.Event()

    class Counting(Follower):
        def _beat(self) -> bytes:
            if next(beats) == _BEATS:
                enough.set()
            return super()._beat()

    follower = Counting(Connection.plain(sock), Place(1, 2, "h:2"), NoPins(), Silence(silence_s), name="a")
    for _ in range(_DECISIONS):
        sys.stdout.write(f"{follower.choose('a number', 0)}\n")
        sys.stdout.flush()
    assert enough.wait(patience.FAR_S)
    follower.save_ends(1, "")
    follower.close()
    sys.stdout.write("the other rank has ended\n")


if __name__ == "__main__":
    main()
