"""What carries out an exchange: `_python_lane.py`, or `_compiled_lane.py` where that was built."""

import enum
from typing import Protocol

import numpy as np


class Turn(enum.IntEnum):
    """What a turn came to. The values are those of lane.h."""

    STILL = 0
    MOVED = 1  # bytes have moved
    DONE = 2


class PeerLost(Exception):
    """The connection to a member failed, or it sent what it must not."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(number, why)
        self.number = number
        self.why = why


class Lane(Protocol):
    """One exchange, in progress. Members are named by their number in the quorum."""

    result: tuple[np.ndarray, ...]

    def turn(self, seconds: float) -> Turn:
        """Send, receive and sum, for about so long. Returns early if all is done or the abort flag is set.

        Raises:
            PeerLost: a connection failed.
        """
        ...

    def owing(self) -> list[int]:
        """The members that owe partial sums, which they can send without waiting for any other member."""
        ...

    def unfinished(self) -> list[int]:
        """The members to whom there is something to send, or from whom to receive."""
        ...

    def moved_s(self, number: int) -> float:
        """When bytes last moved to or from a member, on the clock of `time.monotonic()`."""
        ...

    def close(self) -> None:
        """Free what the lane holds, but not the result."""
        ...
