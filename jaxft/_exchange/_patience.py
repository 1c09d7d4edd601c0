"""How long a member waits for its peers in an exchange.

Time counts only once all members are known to have computed: before that, a silent peer may still be computing, and
the coordinator decides whether it hangs (`jaxft_protocol.coordinator.progress`). From then on each byte that moves
restarts the clock. So an exchange may take as long as it needs while its bytes move, and both ends of a stalled link
time out soon, and at the same time.
"""

import math
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# How often a wait checks whether time counts yet. It delays only the detection of faults.
LOOK_S = 0.25


class Patience:
    """The clock of one exchange, or of making its connections. For one thread."""

    def __init__(
        self,
        timeout_s: float,
        *,
        counts: Callable[[], bool] = lambda: True,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to wait.

        Args:
            timeout_s: how long may pass without any byte moving, once time counts.
            counts: whether all members are known to have computed. Not called again once it has returned true.
            moved: called when bytes have moved.
        """
        self.timeout_s = timeout_s
        self.since_s = math.inf  # since when time counts
        self._counts = counts
        self._tell = moved
        self._moved_s = -math.inf

    def moved(self) -> None:
        """Bytes have moved, or a peer has connected: restart the clock."""
        self._moved_s = time.monotonic()
        self._tell()

    @property
    def still_s(self) -> float:
        """How long nothing has moved; 0 while time does not count."""
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
        """How long to wait before the next check."""
        return max(0.0, min(LOOK_S, self.timeout_s - self.still_s))

    def until(self, wait: Callable[[float], T]) -> T:
        """Call `wait(deadline_s)` until it returns. Raises its TimeoutError when the time is up."""
        while True:
            try:
                return wait(time.monotonic() + self.look_s)
            except TimeoutError:
                if self.is_over:
                    raise
