"""How long a member waits for its peers in an exchange.

Time counts only once all members are known to have computed: before that, a silent peer may still be computing, and
the coordinator decides whether it hangs (`jaxft_protocol.coordinator.progress`). From then on each byte that moves
restarts the clock. So an exchange may take as long as it needs while its bytes move (the log mentions a long time).
Both ends of a stalled link time out soon, and at the same time.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from jaxft_protocol.values import SLOW_WAIT_S

_log = logging.getLogger("jaxft")

T = TypeVar("T")

# How often a wait checks whether time counts yet. It delays only the detection of faults.
LOOK_S = 0.25


class Wait(NamedTuple):
    """For one peer.

    Attributes:
        name: of the peer.
        address: where it is; it may differ from thread to thread.
        moved_s: when bytes have moved last, or when the wait began.
    """

    name: str
    address: str
    moved_s: float


class LongWaits:
    """The logged long waits of a group's current exchange. All threads of the exchange share it.

    Where one group computes longer than the others, they wait for it in every step. That is logged again if it takes
    twice as long as in the step before, of which some exchanges may have had no wait.
    """

    def __init__(self) -> None:
        self._step = 0
        # The longest wait for members that compute, in this step and in the step before.
        self._longest_s = self._before_s = 0.0
        # The same for exchanges whose bytes move, and from when on this exchange is mentioned.
        self._slowest_s = self._slowest_before_s = 0.0
        self._slow_from_s = SLOW_WAIT_S
        self._said: set[tuple[str, bool]] = set()
        self._lock = threading.Lock()

    def begin(self, step: int) -> None:
        """The next exchange begins, of this step. For the thread that starts the others."""
        if step != self._step:
            self._before_s, self._longest_s = self._longest_s, 0.0
            self._slowest_before_s, self._slowest_s = self._slowest_s, 0.0
        self._step = step
        self._slow_from_s = max(SLOW_WAIT_S, 2 * self._slowest_before_s)
        self._said.clear()

    def to_say(self, waits_s: Mapping[str, float], *, compute: bool) -> list[str]:
        """Return the names that are due, and that no thread has mentioned yet."""
        with self._lock:
            due_s = max(SLOW_WAIT_S, 2 * self._before_s) if compute else SLOW_WAIT_S
            if compute:
                self._longest_s = max(self._longest_s, *waits_s.values())
            found = [name for name, waited_s in waits_s.items() if waited_s >= due_s]
            new = [name for name in found if (name, compute) not in self._said]
            self._said.update((name, compute) for name in new)
            return new

    def is_slow(self, took_s: float) -> bool:
        """Whether to log that the exchange has taken so long, although its bytes move: then not before twice that."""
        with self._lock:
            self._slowest_s = max(self._slowest_s, took_s)
            silent = any(not compute for _, compute in self._said)
            if silent or took_s < self._slow_from_s:
                return False
            self._slow_from_s = 2 * took_s
            return True


class Patience:
    """The clock of one exchange, or of making its connections. For one thread."""

    def __init__(
        self,
        timeout_s: float,
        *,
        counts: Callable[[], bool] = lambda: True,
        moved: Callable[[], None] = lambda: None,
        waits: LongWaits | None = None,
    ) -> None:
        """Start to wait.

        Args:
            timeout_s: how long may pass without any byte moving, once time counts.
            counts: whether all members are known to have computed. Not called again once it has returned true.
            moved: called when bytes have moved.
            waits: the long waits that other threads of the exchange have logged.
        """
        self.begun_s = time.monotonic()
        self.waits = waits or LongWaits()
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

    @property
    def is_long(self) -> bool:
        return time.monotonic() - self.begun_s >= SLOW_WAIT_S

    def mention(self, waits: Sequence[Wait], text: str, *where: object) -> None:
        """Log each long wait once: at INFO while members may compute, for that is not a fault."""
        compute = math.isinf(self.since_s)
        now_s, from_s = time.monotonic(), -math.inf if compute else self.since_s
        waits_s = {wait.name: now_s - max(wait.moved_s, from_s) for wait in waits}
        late = self.waits.to_say(waits_s, compute=compute) if waits_s else []
        if late:
            longest_s = max(waits_s[name] for name in late)
            names = ", ".join(f"{wait.name} ({wait.address})" for wait in waits if wait.name in late)
            limit = (
                "Not all members are known to have computed; until they have, there is no time limit."
                if compute
                else f"The limit on a time without progress is {self.timeout_s:g} s."
            )
            level = logging.INFO if compute else logging.WARNING
            _log.log(level, f"{text} %s", *where, names, longest_s, limit)

    def mention_slow(self, text: str, *where: object, names: Callable[[], str]) -> None:
        """Log now and then that the exchange takes long although its bytes move."""
        took_s = time.monotonic() - self.since_s  # negative while time does not count
        if self.waits.is_slow(took_s):
            more = "Its bytes still move, so there is no limit. It is not finished with"
            _log.info(f"{text} %s %s.", *where, took_s, more, names())

    def until(self, wait: Callable[[float], T], look: Callable[[], None]) -> T:
        """Call `wait(deadline_s)` until it returns, and `look` in between.

        Raises its TimeoutError when the time is up.
        """
        while True:
            try:
                return wait(time.monotonic() + self.look_s)
            except TimeoutError:
                if self.is_over:
                    raise
                look()
