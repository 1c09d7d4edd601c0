"""Fast copies of frozen values: the most frequent operation in both cores."""

from typing import Any, TypeVar

V = TypeVar("V")


def changed(value: V, **changes: Any) -> V:
    """Return a copy of `value`, a frozen dataclass without slots and without `__post_init__`, with `changes`.

    Like `dataclasses.replace`, but ten times faster: it copies the whole dictionary instead of field by field.
    """
    fields = value.__dict__.copy()
    fields.update(changes)
    assert len(fields) == len(value.__dict__)
    copy = object.__new__(type(value))
    object.__setattr__(copy, "__dict__", fields)
    return copy
