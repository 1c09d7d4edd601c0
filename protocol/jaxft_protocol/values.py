"""Copies of frozen values: what a turn of either core makes most of."""

from typing import Any, TypeVar

V = TypeVar("V")


def changed(value: V, **changes: Any) -> V:
    """Return a copy of a frozen dataclass that has no slots and checks nothing as it is made, with `changes`.

    As `dataclasses.replace`, which reads and writes one field after the other; this copies the whole dictionary, and
    takes a tenth of the time.
    """
    assert changes.keys() <= value.__dict__.keys()
    copy = object.__new__(type(value))
    copy.__dict__.update(value.__dict__)
    copy.__dict__.update(changes)
    return copy
