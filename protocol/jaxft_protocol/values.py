"""Fast copies of frozen values: the most frequent operation in both cores."""

from typing import Any, TypeVar

V = TypeVar("V")


def changed(value: V, **changes: Any) -> V:
    """Return a copy of `value`, a frozen dataclass without slots and without `__post_init__`, with `changes`.

    Like `dataclasses.replace`, but ten times faster: it copies the whole dictionary instead of field by field.
    """
    assert changes.keys() <= value.__dict__.keys()
    copy = object.__new__(type(value))
    copy.__dict__.update(value.__dict__)
    copy.__dict__.update(changes)
    return copy
