"""Fast copies of frozen values: the most frequent operation in both cores."""

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
