"""How long a member waits for its peers in an exchange.

Time counts only from the moment at which all members are known to have computed: before it, a peer that sends nothing
may be computing, and whether it hangs is for the coordinator to say (`jaxft_protocol.coordinator.progress`). From
then on each byte that moves restarts the clock. So an exchange may take as long as it likes while its bytes move, and
both ends of a link that carries nothing find out soon, and at the same time.
"""

import math
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# How often a wait looks whether time has begun to count. Nothing but finding a fault waits for it.
LOOK_S = 0.25


class Patience:
    """For one exchange, or for the connections before it. For one thread."""

    def __init__(
        self,
        timeout_s: float,
        *,
        counts: Callable[[], bool] = lambda: True,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to wait.

        Args:
            timeout_s: how long no byte may move, once time counts.
            counts: whether all members are known to have computed. Once it is true it is not asked again.
            moved: called when bytes have moved.
        """
        self.timeout_s = timeout_s
        self.since_s = math.inf  # since when time counts
        self._counts = counts
        self._tell = moved
        self._moved_s = -math.inf

    def moved(self) -> None:
        """Bytes have moved, or a peer has connected: the time begins anew."""
        self._moved_s = time.monotonic()
        self._tell()

    @property
    def still_s(self) -> float:
        """For how long nothing has moved; 0 while time does not count."""
        if math.isinf(self.since_s):
            if not self._counts():
                return 0.0
            self.since_s = time.monotonic()
        return time.monotonic() - max(self.since_s, self._moved_s)

    @property
    def is_over(self) -> bool:
        return self.still_s >= self.timeout_s

    @property
    def look_s(self) -> float:
        """For how long to wait before looking again."""
        return max(0.0, min(LOOK_S, self.timeout_s - self.still_s))

    def until(self, wait: Callable[[float], T]) -> T:
        """Call `wait(deadline_s)` until it returns. Raises its TimeoutError once patience is over."""
        while True:
            try:
                return wait(time.monotonic() + self.look_s)
            except TimeoutError:
                if self.is_over:
                    raise
