"""Progress output of a run, as lines."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from jaxft_launch.supervise._output import PlainLines

# The default number of committed steps per plain progress line.
PLAIN_EVERY_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The current state of a run. `participating`: how many of its `groups` took part in the newest step."""

    title: str
    step: int
    planned_steps: int | None
    loss: float | None
    participating: int
    groups: int
    quorum_id: int | None


class Display(PlainLines):
    """A run in lines: a line every `every_steps` steps, and never twice."""

    def __init__(
        self,
        stream: IO[str],
        *,
        name: str,
        every_steps: int = PLAIN_EVERY_STEPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stream, name=name, clock=clock)
        self._every_steps = every_steps
        self._last: tuple[str, int] | None = None

    def show(self, view: View) -> None:
        mark = (view.title, view.step // self._every_steps)
        if view.step > 0 and mark != self._last:
            self._last = mark
            self.say(progress_line(view))


def progress_line(view: View) -> str:
    """Return the plain line of a step: the same fields in the same columns."""
    step = str(view.step)
    if view.planned_steps is not None:
        step = f"{view.step:>{len(str(view.planned_steps))}}/{view.planned_steps}"
    loss = "      -" if view.loss is None else f"{view.loss:7.4f}"
    # The loss of a user's program is not known.
    loss = "" if view.loss is not None and math.isnan(view.loss) else f"  loss {loss}"
    quorum = "-" if view.quorum_id is None else view.quorum_id
    return f"step {step}{loss}  groups {view.participating}/{view.groups}  quorum {quorum:>3}"
