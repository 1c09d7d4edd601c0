"""A call of the step, and who gets it."""

from dataclasses import dataclass
from typing import Protocol

from jaxft._report import StepReport


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the step that has ended.

    Attributes:
        report: what it did.
        before: the committed steps before it.
        began_ns: when it began, in nanoseconds since 1970.
        ended_ns: when it ended.
        error: the exception that it raised, if it did.
    """

    report: StepReport
    before: int
    began_ns: int
    ended_ns: int
    error: BaseException | None = None


class Observer(Protocol):
    """Gets each call of the step, from the training thread. It must not wait."""

    def called(self, call: Call) -> None: ...

    def close(self, reason: str) -> None:
        """The group ends; `reason`: the exception that ends it, or empty."""
        ...
