"""What carries out an exchange: `_python_lane.py`, or `_compiled_lane.py` where that was built."""

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxft._arrays._layout import Layout
from jaxft._exchange._node_values import Sliced
from jaxft._exchange._partials import Partials
from jaxft._exchange._plan import Plan


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


@dataclass(frozen=True, slots=True)
class Task:
    """What a lane carries out: an exchange, or one strand of it.

    Attributes:
        layout: the layout of the leaves, the same at every member.
        step: the step that the contributions are for.
        partials: what this member contributes: exactly its shards of the quorum. Only read.
        result: where the means and sums are written, region by region. All strands write into the same arrays.
        strands: into how many strands the exchange is divided; the links know which of them they carry.
        plan: who sums what; None: everyone a part (`Links.plan`).
        kept: where the nodes go that the plan keeps, in its order.
        heeds_progress: whether frames by which members say that they make progress in an earlier round count as moved
            bytes; None: there are no such frames.
    """

    layout: Layout
    step: int
    partials: Partials
    result: tuple[np.ndarray, ...]
    strands: int = 1
    plan: Plan | None = None
    kept: tuple[Sliced, ...] = ()
    heeds_progress: bool | None = None


class Lane(Protocol):
    """A task, in progress. Members are named by their number in the quorum."""

    task: Task

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

    def idle(self) -> list[int]:
        """The members for whom nothing is queued, so that another frame may be sent to them between two turns."""
        ...

    def moved_s(self, number: int) -> float:
        """When bytes last moved to or from a member, on the clock of `time.monotonic()`."""
        ...

    def close(self) -> None:
        """Free what the lane holds."""
        ...
