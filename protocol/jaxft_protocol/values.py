"""Fast copies of frozen values, the most frequent operation in both cores; and long waits."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

V = TypeVar("V")

_new, _set = object.__new__, object.__setattr__


def changed(value: V, **changes: Any) -> V:
    """Return a copy of `value`, a frozen dataclass without slots and without `__post_init__`, with `changes`.

    Like `dataclasses.replace`, but ten times faster: it copies the whole dictionary instead of field by field.
    """
    known = value.__dict__
    fields = known | changes
    assert len(fields) == len(known)
    copy = _new(value.__class__)
    _set(copy, "__dict__", fields)
    return copy


# How long a wait is before the log names for whom.
SLOW_WAIT_S = 5.0


@dataclass(slots=True)
class LongWait:
    """A wait that the log should mention after 5 s, and again each time it has doubled.

    Attributes:
        began_s: when it began.
        due_s: how many seconds it lasts when it is mentioned next.
    """

    began_s: float
    due_s: float = field(default_factory=lambda: SLOW_WAIT_S)

    def to_say(self, now_s: float) -> float | None:
        """Return how many seconds the wait has lasted, if it is time to mention it."""
        waited_s = now_s - self.began_s
        if waited_s < self.due_s:
            return None
        self.due_s = 2 * waited_s
        return waited_s
