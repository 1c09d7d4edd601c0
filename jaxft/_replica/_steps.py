"""What the user's loop knows of the job's step, and `steps`, the loop that always knows it.

A call of the step may advance by many steps (a heal), by none, or begin far from 0 (a restored checkpoint). So a loop
that counts its own calls ends at another state than the other groups. Two things tell such a loop from one that
follows the job: it does not iterate over `steps`, and it does not read the step after it has jumped.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxft._errors import ConfigurationError

if TYPE_CHECKING:
    from jaxft._replica._engine import Engine

_WRITE = (
    "Write `for number in manager.steps(total):` (`step.steps(total)` without a manager), after "
    "`state = step.join(state, batch)`; or `while manager.step < total:`."
)


class LoopWatch:
    """Whether the user's loop knows the step. The training thread owns it."""

    def __init__(self) -> None:
        self.at_top = (
            False  # of the body of a loop over `steps`: the step of this iteration was not called yet
        )
        self.calls = 0
        self._unread: str = ""  # how the step came to be what it is, if the loop has not read it since

    def read(self) -> None:
        """The user's code has read the step."""
        self._unread = ""

    def jumped(self, why: str) -> None:
        """The step is not what a loop that counts its calls believes, because `why`."""
        self._unread = why

    def called(self, step: int) -> None:
        """The user's code calls the step.

        Raises:
            ConfigurationError: it cannot know that the job is at `step`.
        """
        if self._unread:
            raise ConfigurationError(
                f"The loop that calls the step does not follow the job: it is at step {step}, because {self._unread},"
                f" and the loop has not looked. A loop that counts its calls would end at another step than the "
                f"other groups. {_WRITE}"
            )
        self.at_top = False
        self.calls += 1


def steps(engine: "Engine", total: int | None) -> Iterator[int]:
    """Yield the number of the next step until the state is that after `total` steps; without end if that is None.

    Raises:
        ConfigurationError: this group has not joined the job, or the loop's body does not call the step.
    """
    if total is not None and (isinstance(total, bool) or not isinstance(total, int)):  # pyright: ignore
        raise ConfigurationError(f"steps takes the number of all steps of the run, not {total!r}.")
    watch = engine.loop
    if engine.handed is None:
        raise ConfigurationError(
            "This group has not joined the job, so its step and state may be old ones. Call "
            "`state = step.join(state, batch)` before the loop: it returns the job's newest state."
        )
    while total is None or engine.step < total:
        watch.read()
        watch.at_top, calls = True, watch.calls
        yield engine.step
        watch.at_top = False
        if watch.calls == calls:
            raise ConfigurationError(
                f"The body of the loop over `steps` has not called the step, so step {engine.step} is still to be "
                "done. Call it once in each iteration, also where the rest of the body is left out."
            )
