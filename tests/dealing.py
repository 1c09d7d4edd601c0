"""The order of the tests: each worker of pytest-xdist begins with its part of the tests that wait for processes."""

import itertools
from collections.abc import Sequence

import pytest

# A test that is given more time than by default has groups that train; others have processes that only pretend.
LONG, SHORT = 5, 1


def dealt(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return all items, such that each of equal slices begins with its part of the tests that wait.

    pytest-xdist (--dist worksteal) gives each worker a slice. Tests of one file stay together: they share fixtures.
    """
    files = [list(group) for _, group in itertools.groupby(items, key=lambda item: item.path)]
    waiting = [[item for item in file if item.get_closest_marker("processes")] for file in files]
    computing = [item for file in files for item in file if not item.get_closest_marker("processes")]
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for file in sorted(filter(None, waiting), key=_weight, reverse=True):
        min(parts, key=_weight).extend(file)
    found: list[pytest.Item] = []
    for number, part in enumerate(parts):
        room = (len(items) - len(found)) // (workers - number) - len(part)
        found += part + computing[: max(0, room)]
        del computing[: max(0, room)]
    return found + computing


def _weight(items: Sequence[pytest.Item]) -> int:
    return sum(LONG if item.get_closest_marker("timeout") else SHORT for item in items)
