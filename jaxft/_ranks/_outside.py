"""A rank's program outside of the step, while another rank of its group waits for it there.

It may take any amount of time: an evaluation, a first compilation. But the other rank, and with it the group, stands
still, and its own log can only say that it waits. So the rank that is outside logs where it stands.
"""

import contextlib
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from jaxft_protocol.values import SLOW_WAIT_S

# Callers outside of JAX that are named.
_CALLERS = 4
_JAX = os.path.dirname(jax.__file__)
_COMPILES = str(Path(__file__).parents[1] / "_programs" / "_compile.py")


class Outside:
    """Whether the training thread is outside of the step, since when, and where it stands."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._since_s: float | None = time.monotonic()
        self._mention_s = SLOW_WAIT_S

    @contextlib.contextmanager
    def in_step(self, *, now: bool) -> Iterator[None]:
        """For the training thread, which is in the step within the context, or outside of it."""
        self._thread = threading.get_ident()
        before, self._since_s = self._since_s, None if now else time.monotonic()
        try:
            yield
        finally:
            # Also after a short time in the step, it has only now left it.
            self._since_s = None if before is None else time.monotonic()

    def to_say(self, other: str, awaited_s: float) -> str:
        """Return a new text if the rank `other` has waited for long, or twice as long as at the last text."""
        since_s = self._since_s
        if since_s is None or awaited_s < SLOW_WAIT_S:
            self._mention_s = SLOW_WAIT_S
            return ""
        if awaited_s < self._mention_s:
            return ""
        self._mention_s = 2 * awaited_s
        outside_s, stack = time.monotonic() - since_s, self._stack()
        if any(frame.filename == _COMPILES for frame in stack):
            return f"compiles the step, and {other} has waited for it in the step for {awaited_s:.0f} s."
        return (
            f"has been outside of the step for {outside_s:.0f} s, and {other} has waited for it in the step for "
            f"{awaited_s:.0f} s. Its program stands at {_where(stack)}. If that is a computation of all ranks, it "
            "cannot end: every rank must run the same number of steps."
        )

    def _stack(self) -> Sequence[traceback.FrameSummary]:
        frame = sys._current_frames().get(self._thread)
        return [] if frame is None else traceback.extract_stack(frame)


def _where(stack: Sequence[traceback.FrameSummary]) -> str:
    if not stack:
        return "its end"
    *callers, innermost = stack
    own = [frame for frame in callers if not frame.filename.startswith(_JAX)]
    frames = [innermost, *reversed(own[-_CALLERS:])]
    return ", called from ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)


class Awaited:
    """How long something has been waited for, for a caller that asks from time to time."""

    def __init__(self) -> None:
        self._since_s = math.inf

    def seconds(self, *, is_awaited: bool) -> float:
        now_s = time.monotonic()
        self._since_s = min(self._since_s, now_s) if is_awaited else math.inf
        return max(0.0, now_s - self._since_s)
