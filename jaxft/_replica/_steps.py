"""How far the user's loop follows the job's step, and `steps`, the loop that always does.

A call of the step may advance by many steps (a heal), by none, or begin far from 0 (a restored checkpoint). So a loop
that counts its own calls ends at another state than the other groups. Two signs distinguish such a loop from a loop
that follows the job: it does not iterate over `steps`, and it does not read the step after it has jumped.

Any call may jump, and only the step shows it. So once a call has jumped, a loop that follows the job has read the
step before each later call too: a loop that reads it now and then, to log it or to save, is found at the first call
where it has not. A loop over a range that reads the step between every two calls looks like `while manager.step < n`:
after a jump both are warned at once.
"""

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from jaxft._base._numbers import whole
from jaxft._errors import ConfigurationError

_log = logging.getLogger("jaxft")

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
        self._in_body = False
        self._over = False  # a loop over `steps` has come to its total, and none has begun since
        self._looked = False  # the loop has read the step since its last call of the step
        self.calls = 0
        # The leaves that calls were given since the last return: the user's code has them.
        self._given: Sequence[Any] | None = None
        # How many calls of `step.edit` stand before the next step, and how many of these the loop's body has come to.
        self.edits_made = 0
        self._edits_seen = 0
        self._unread: str = ""  # how the step came to its value, if the loop has not read it since
        self._jump: str = ""  # how a call came to jump, if one has
        self._warned = False  # of a loop that may count its calls

    def read(self) -> None:
        """The user's code has read the step."""
        self._unread = ""
        self._looked = True

    def jumped(self, why: str, *, in_call: bool = False) -> None:
        """The step differs from the count of a loop that counts its calls, because `why`.

        A loop over a range may begin at the step to which a restore or a join has led, so only what happens
        `in_call` is remembered.
        """
        self._unread = why
        if in_call:
            self._jump = why

    def given(self, leaves: Sequence[Any]) -> None:
        """A call begins with these leaves, or with older ones that stand for them (`lacks`)."""
        if self._given is None:
            self._given = leaves

    def returned(self) -> None:
        """A call has returned the state, or none has begun to hold one."""
        self._given = None

    def lacks(self, held: Sequence[Any]) -> bool:
        """Whether a call has come to the state `held`, and an exception such as Ctrl-C kept it from returning it.

        What later calls are given is older then, and may be consumed.
        """
        return self._given is not None and any(map(operator.is_not, self._given, held))

    @contextmanager
    def calling(self, step: Callable[[], int]) -> Iterator[None]:
        """Around a call of the step by the user's code.

        Raises:
            ConfigurationError: it cannot know that the job is at `step()`.
        """
        at_top, before = self.at_top, step()
        self._called(before)
        try:
            yield
        except BaseException:
            if step() == before:  # the body of the loop may begin again
                self.at_top, self._edits_seen = at_top, 0
            raise

    def not_called(self) -> None:
        """A call of the step has failed before it began: the body of the loop may begin again."""
        self._edits_seen = 0

    def begins(self) -> None:
        """An iteration over `steps` begins."""
        self.read()
        self.at_top, self._in_body, self._over, self._edits_seen = True, True, False, 0

    def ends(self) -> None:
        """The body of a loop over `steps` ends, or is left."""
        self.at_top = self._in_body = False

    def is_over(self) -> None:
        """A loop over `steps` has come to its total."""
        self._over, self._looked = True, False

    def repeats_edit(self) -> bool:
        """Whether this edit of the iteration stands already, because the iteration is tried again."""
        if self._edits_seen == self.edits_made:
            return False
        self._edits_seen += 1
        return True

    def edited(self) -> None:
        """An edit was made before the next step."""
        self.edits_made += 1
        self._edits_seen = self.edits_made

    def _called(self, step: int) -> None:
        if self._unread:
            raise ConfigurationError(
                f"The loop that calls the step does not follow the job: this group is now at step {step}, because "
                f"{self._unread}, and the loop has not read the new number. A loop that counts its calls would "
                f"end at another step than the other groups. {_WRITE}"
            )
        if self._in_body and not self.at_top and not self._looked:
            raise ConfigurationError(
                f"The body of the loop over `steps` calls the step again, at step {step}: `steps` looks for its end "
                "between iterations, so the loop could end after its total, at another state than the other groups. "
                "Call the step once in each iteration."
            )
        if self._over and not self._looked:
            self._over = False
            _log.warning(
                "The step is called after the loop over `steps` has come to its total, at step %d: it trains a "
                "further step. To evaluate, call a function of your model that does not train; to train on, write "
                "another loop over `steps` with a larger total.",
                step,
            )
        if self._jump and not (self._in_body or self._warned):
            self._warned = True
            _log.warning(
                "A call of the step has come to step %d, because %s, and the loop is not one over `steps`. If it "
                "counts its calls, as `for i in range(n)` does, it trains further than the other groups. %s",
                *(step, self._jump, _WRITE),
            )
        self._unread = self._jump
        self.at_top = self._looked = False
        self.calls += 1


class Steps(Protocol):
    """The questions of a loop over `steps` to an engine."""

    @property
    def step(self) -> int:
        """The number of committed steps."""
        ...

    @property
    def handed(self) -> Sequence[Any] | None:
        """The leaves of the state that is held, with edits; None before the first call or join."""
        ...

    @property
    def loop(self) -> LoopWatch:
        """Whether the user's loop has seen the step."""
        ...


def steps(engine: Steps, total: int | None) -> Iterator[int]:
    """Yield the number of the next step until the state is that after `total` steps; without end if that is None.

    Raises:
        ConfigurationError: this group has not joined the job, or the loop's body does not call the step, or calls it
            again without having read the step.
    """
    if total is not None:
        total = whole("total, the number of all steps of the run,", total)
    watch = engine.loop
    if engine.handed is None:
        raise ConfigurationError(
            "This group has not joined the job, so its step and state may be old ones. Call "
            "`state = step.join(state, batch)` before the loop: it returns the job's newest state. A step that was "
            "made without this manager joins no job."
        )
    began = watch.calls
    while total is None or engine.step < total:
        calls = watch.calls
        watch.begins()
        try:
            yield engine.step
        finally:
            watch.ends()
        if watch.calls == calls:
            raise ConfigurationError(
                f"The body of the loop over `steps` has not called the step, so step {engine.step} is still to be "
                "done. Call it once in each iteration, also where the rest of the body is left out."
            )
    if watch.calls > began:
        watch.is_over()
